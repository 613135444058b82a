"""The verbs of `paceline`. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

import paceline
from paceline import config as configuration
from paceline.errors import UserError

Overrides = Positional[tuple[str, ...]]
_PARSING = (tyro.conf.FlagCreatePairsOff,)
Through = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], arg(metavar="'COMMAND …'")]


def train(config: Positional[Path], overrides: Overrides = (), *, resume: bool = False) -> int:
    """Train a drafter: `paceline train run.toml training.steps=200`.

    Args:
        config: the run's TOML file.
        overrides: section.key=value, applied over the file.
        resume: continue from the run folder's last whole checkpoint.
    """
    from paceline import launch
    from paceline.report import write_report
    from paceline.training.metrics import read_metrics
    from paceline.training.progress import closing_words
    from paceline.training.setup import preflight

    chosen = configuration.load(config, overrides)
    if launch.under_torchrun():
        return launch.run(chosen, resume=resume)
    preflight(chosen, claims=not resume)
    folder = Path(chosen.run.folder) / chosen.run.name
    try:
        code = launch.run(chosen, resume=resume)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted " + _way_on(folder, config, overrides)) from None
    except SystemExit:  # the launcher has said which signal stopped the run
        _say("interrupted " + _way_on(folder, config, overrides))
        raise
    if code == 0:
        write_report(folder)
        for line in closing_words(folder, read_metrics(folder)):
            _say(line)
    return code


def _way_on(folder: Path, config: Path, overrides: Overrides) -> str:
    """Where a run that was stopped stands, and the command that continues it."""
    from paceline.doctor.diagnosis import left_from
    from paceline.doctor.travel.workers import left_in

    left = left_from(left_in(str(folder)))
    command = shlex.join(["paceline", "train", str(config), *overrides, "--resume"])
    return f"{left.standing}\n  {left.resumption(command)}"


def plan(
    config: Positional[Path],
    overrides: Overrides = (),
    *,
    world: int = 0,
    gpu: str = "H200",
    records: Path = Path("benchmarks/records"),
) -> int:
    """Show who would do what, and what it would cost, without touching a GPU or loading weights.

    Args:
        config: the run's TOML file.
        overrides: section.key=value, applied over the file.
        world: processes; 0 takes the configuration's.
        gpu: the kind of GPU to reckon with.
        records: a folder of benchmark records; measured rates of the same GPU and shapes are preferred to counted ones.
    """
    from paceline.pipeline.plan import make_plan, read_records, render
    from paceline.training.setup import set_up

    setup = set_up(configuration.load(config, overrides))
    topology = setup.config.topology
    processes = world or setup.config.launch.workers or max(1, topology.targets + topology.drafters)
    print(render(make_plan(setup.config, setup.target, setup.drafter, processes, gpu, read_records(records))))
    if not records.is_dir():
        print(f"note: there is no folder {records} here, so no rate is a measured one; --records names it")
    return 0


def warmup(config: Positional[Path], overrides: Overrides = ()) -> int:
    """Compile everything that a run needs into the cache, and stop: for an image build, say.

    Args:
        config: the run's TOML file.
        overrides: section.key=value, applied over the file.
    """
    from paceline import launch
    from paceline.training.setup import preflight

    chosen = configuration.load(config, overrides)
    preflight(chosen, claims=False)
    return launch.run(chosen, program="paceline.training.loop:warm_only")


def doctor(  # noqa: PLR0913 - the flags of one question
    target: Positional[str | None] = None,
    *,
    pid: int | None = None,
    through: Through = (),
    python: str = "",
    json: bool = False,
    source: bool = False,
    compile_check: bool = False,
    race_check: bool = False,
    timeout: float = 120.0,
) -> int:
    """Say what is wrong with this machine, a run, a process, or a machine far away.

    Args:
        target: a run's folder: its workers are asked.
        pid: a process, ours or not.
        through: a layer of the way there, outermost first; repeat it for each (--through 'ssh root@host').
        python: the interpreter to look at.
        json: print findings as JSON.
        source: show how the installed torch implements the FX-tracing check.
        compile_check: compile and run a small flex_attention, cold and warm.
        race_check: reproduce the known hazards and say which this torch has.
        timeout: seconds for the whole answer.
    """
    from paceline.doctor.command import DoctorOptions, run_doctor

    options = DoctorOptions(target, pid, through, python, json, source, compile_check, race_check, timeout)
    return run_doctor(options)


def run_there(
    script: Annotated[Positional[str], arg(metavar="SCRIPT", help_behavior_hint="")] = "",
    args: Annotated[Positional[tuple[str, ...]], arg(metavar="[ARGUMENT …]", help_behavior_hint="")] = (),
    *,
    through: Through = (),
    python: str = "",
    timeout: float = 600.0,
) -> Callable[[Sequence[str]], int]:
    """Run a Python file at the far end of any chain of shells; no quoting can touch it.

    What the script itself shall get goes after --, options included:

    paceline run-there check.py --through 'ssh root@host' --through 'docker exec box' -- --steps 3 'two words'

    Args:
        script: the Python file, here.
        args: its arguments; those that begin with a dash only behind --.
        through: a layer of the way there, outermost first; repeat it for each (--through 'ssh root@host').
        python: the interpreter there; empty takes python3, or this one where no layer is named.
        timeout: seconds that the script may take.
    """
    from paceline.doctor.command import run_there as run

    def go(rest: Sequence[str]) -> int:
        file, *its = (script, *args, *rest) if script else rest or ("",)
        if not file:
            example = "paceline run-there check.py --through 'ssh root@host' -- --steps 3"
            raise UserError("no script was named", f"for example: {example}")
        return run(file, its, through, python, timeout)

    return go


def cache(
    action: Positional[Literal["list", "prune", "pack", "unpack"]] = "list",
    file: Positional[str] = "",
    *,
    root: str = "",
    key: str = "",
    older_than_days: float = 0.0,
    replace: bool = False,
) -> int:
    """Compile caches: list them, prune them, pack one into a file, unpack it on another host.

    Args:
        action: list, prune, pack or unpack.
        file: the file to pack into or unpack from.
        root: folder of the caches, as compiling.cache names it; empty takes the default.
        key: the cache to pack, or the only one to keep; empty takes those that this machine can use.
        older_than_days: prune only what was not used for so long.
        replace: unpack over a cache of the same key.
    """
    from paceline.compiling.command import run_cache

    return run_cache(action, file, root=root, key=key, older_than_days=older_than_days, replace=replace)


def data(
    config: Positional[Path],
    overrides: Overrides = (),
    *,
    rows: int = 5,
    html: Path | None = None,
    agreement: bool = False,
) -> int:
    """Look at the data as a run would see it: which tokens are supervised, what was set aside, how rows fill.

    Args:
        config: the run's TOML file.
        overrides: section.key=value, applied over the file.
        rows: how many documents to print.
        html: also write a page.
        agreement: load the target and say how much of the answers is what it would write itself.
    """
    from paceline.data.show import show as run
    from paceline.training.setup import set_up, target_choice

    setup = set_up(configuration.load(config, overrides))
    return run(
        setup.config,
        setup.tokenizer,
        mask_token_id=setup.drafter.mask_token_id,
        eos_ids=setup.target.eos_ids,
        rows=rows,
        html=html,
        agreement=target_choice(setup) if agreement else None,
    )


def report(folder: Positional[Path]) -> int:
    """Write a run's report.html.

    Args:
        folder: the run's folder.
    """
    from paceline.report import write_report

    print(write_report(folder))
    return 0


def demo(*, quick: bool = False, folder: str = "runs", answers: int = 0) -> int:
    """Train a drafter for a real 135 M model on this machine, decode with it, and report.

    Args:
        quick: the short form for CI, under three minutes.
        folder: where the run goes.
        answers: training conversations to use; 0 chooses by device.
    """
    from paceline.demo import run_demo

    return run_demo(quick=quick, folder=Path(folder), answers=answers)


@dataclass(frozen=True)
class Verb:
    """What is behind a word of the command line."""

    about: str
    body: Callable[..., Any] | None = None
    """A function of this file; its parameters are the flags."""
    place: str = ""
    """Else `module:Options:function`, imported when the verb is used; the dataclass's fields are the flags."""
    follow: str = ""
    """The word that must come after the verb."""
    passes_on: str = ""
    """Whose are the words after ``--``: they are no flags, but what the body's result is called with."""

    def run(self, name: str, words: Sequence[str]) -> int:
        """Raises UserError where the word that must follow does not."""
        if self.follow:
            if not words or words[0] not in (self.follow, "-h", "--help"):
                given = f", not {words[0]!r}" if words else ""
                raise UserError(
                    f"after `paceline {name}` comes {self.follow}{given}", f"paceline {name} {self.follow} --help"
                )
            name = f"{name} {self.follow}"
            words = words[1:] if words[0] == self.follow else words
        if self.body is not None:
            return self._pass_on(self.body, name, words) if self.passes_on else _parse(self.body, name, words)
        module_name, options, function = self.place.split(":")
        module = importlib.import_module(module_name)
        return vars(module)[function](_parse(vars(module)[options], name, words))

    def _pass_on(self, body: Callable[..., Any], name: str, words: Sequence[str]) -> int:
        end = words.index("--") if "--" in words else len(words)
        go, unknown = tyro.cli(
            body, prog=f"paceline {name}", args=list(words[:end]), config=_PARSING, return_unknown_args=True
        )
        if unknown:
            raise UserError(
                f"paceline {name} has no option {unknown[0]}",
                f"what {self.passes_on} shall get goes after --: paceline {name} … -- {shlex.join(unknown)}",
            )
        return go(words[end + 1 :])


VERBS = {
    "train": Verb("train a drafter: paceline train run.toml training.steps=200", train),
    "plan": Verb("who would do what, and what it would cost", plan),
    "warmup": Verb("compile everything a run needs, ahead of time", warmup),
    "doctor": Verb("what is wrong with this machine, a run, a process, or a machine far away", doctor),
    "run-there": Verb(
        "run a Python file at the far end of any chain of shells", run_there, passes_on="the script itself"
    ),
    "cache": Verb("list, prune, pack and unpack compile caches", cache),
    "data": Verb("show the data as a run would see it: paceline data show run.toml", data, follow="show"),
    "regenerate": Verb(
        "have the target answer every prompt of a data set",
        place="paceline.regenerate.command:RegenerateOptions:regenerate",
    ),
    "export": Verb("write a drafter for an engine", place="paceline.export.command:ExportOptions:run_export"),
    "verify": Verb("check an exported drafter", place="paceline.evaluation.command:VerifyOptions:run_verify"),
    "eval": Verb(
        "measure a drafter: acceptance length, speed", place="paceline.evaluation.command:EvalOptions:run_eval"
    ),
    "bench": Verb("time the parts, beside this machine's ceilings", place="paceline.bench:BenchOptions:run_bench"),
    "report": Verb("write a run's report.html", report),
    "demo": Verb("train a drafter for a real 135 M model on this machine, and look at it", demo),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a verb; user errors are one line and a hint on standard error, exit code 2."""
    words = sys.argv[1:] if words is None else words
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where both streams go to one file or pipe, whole lines then stand in the order in which they were printed.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        return _dispatch(words)
    except UserError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt as stop:
        _say(str(stop) or "interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output (head, say) has gone: not a fault, and nothing more to print.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"paceline {paceline.__version__}")
        return 0
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1)
        raise UserError(
            f"paceline has no verb {words[0]!r}", f"did you mean {near[0]!r}?" if near else "see paceline --help"
        )
    return VERBS[words[0]].run(words[0], words[1:])


def _help() -> str:
    lines = [f"  {name:<11} {verb.about}" for name, verb in VERBS.items()]
    head = "usage: paceline VERB … (paceline VERB --help says more)\n\nTrains DFlash speculative-decoding drafters.\n"
    return "\n".join([head, *lines])


def _parse(what: Callable[..., Any], name: str, words: Sequence[str]) -> Any:
    return tyro.cli(what, prog=f"paceline {name}", args=list(words), config=_PARSING)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
