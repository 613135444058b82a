"""The model card of an exported drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.shapes import DrafterShape
from paceline.target.source import resolve


@dataclass(frozen=True)
class TauRow:
    """Acceptance of one kind of prompt."""

    kind: str
    tau: float
    accepted: float
    """Drafted tokens accepted a step, the bonus token not counted."""
    steps: int
    low: float = float("nan")
    high: float = float("nan")


@dataclass(frozen=True)
class CardFacts:
    """What the exported folder cannot know by itself."""

    target: str
    target_revision: str = ""
    """A hub commit or a fingerprint of the target's files."""
    target_weights: str = ""
    """A fingerprint of the files of the target's weights alone."""
    data: tuple[str, ...] = ()
    settings: str = ""
    """The resolved configuration, as TOML."""
    results: tuple[TauRow, ...] = ()
    measured: str = ""
    """How τ was measured: dtype, greedy or sampled, on what."""
    version: str = ""
    notes: tuple[str, ...] = field(default=())


CONVENTION = (
    "τ is the number of tokens that a step commits (accepted drafts and the bonus token, cut at the first end token "
    "or at the length limit), over all steps of all prompts. The token that the prefill gives is not counted."
)


def render(shape: DrafterShape, facts: CardFacts, name: str, layout: str = "dflash") -> str:
    """README.md, with the commands that serve this very folder."""
    serving = _serving(shape, facts, layout)
    return "\n".join([*_head(shape, facts, name), *_results(facts), *serving, *_training(facts)])


def _head(shape: DrafterShape, facts: CardFacts, name: str) -> list[str]:
    target = target_words(facts.target)
    told = facts.target_weights or facts.target_revision if target.local else facts.target_revision
    word = "fingerprint" if target.local else "revision"
    revision = f" ({word} `{told}`)" if told else ""
    return [
        "---",
        "tags: [dflash, speculative-decoding, draft-model]",
        *([] if target.local or "/" not in target.name else [f"base_model: {target.name}"]),
        "---",
        "",
        f"# {name}",
        "",
        f"A DFlash drafter (arXiv 2602.06036) for `{target.name}`{revision}. It drafts {shape.block_size - 1} tokens "
        f"in one forward; the target verifies them, so what is written stays the target's own.",
        "",
        f"- {shape.layers} layers, hidden size {shape.hidden_size}, block size {shape.block_size}",
        f"- reads the outputs of target layers {list(shape.layer_ids)} of {shape.target_layers} (0-based)",
        f"- mask token {shape.mask_token_id}; embedding and head are the target's",
        f"- made with Paceline {facts.version}".rstrip(),
        *(f"- {note}" for note in facts.notes),
        "",
    ]


def _results(facts: CardFacts) -> list[str]:
    if not facts.results:
        return []
    rows = [f"| {r.kind} | {r.tau:.3f} | {_interval(r)} | {r.accepted:.3f} | {r.steps} |" for r in facts.results]
    head = ["| prompts | τ | 95 % | accepted drafts a step | steps |", "|---|---|---|---|---|"]
    return [
        "## Acceptance length",
        "",
        CONVENTION,
        "",
        *([facts.measured, ""] if facts.measured else []),
        *head,
        *rows,
        "",
    ]


def _interval(row: TauRow) -> str:
    return f"{row.low:.2f} … {row.high:.2f}" if row.low == row.low else "–"


def _serving(shape: DrafterShape, facts: CardFacts, layout: str) -> list[str]:
    target = target_words(facts.target)
    lines = ["## Serving", "", f"Run inside this folder: `.` is the drafter. {target.explanation}".rstrip(), ""]
    for engine, command in serving_commands(shape, facts.target, ".", layout):
        lines += [f"{engine}:", "", "```bash", command, "```", ""]
    return lines


@dataclass(frozen=True)
class TargetWords:
    """How a text that travels speaks of a target; a path of this machine means nothing elsewhere."""

    name: str
    """The hub id, or the last part of a path."""
    argument: str
    """What a serving command is given: the hub id, or TARGET."""
    local: bool = False
    gguf: str = ""
    """The GGUF file's name, where it is one."""

    @property
    def explanation(self) -> str:
        """What TARGET stands for; empty for a hub id."""
        if self.gguf:
            return (
                f"TARGET is the folder or hub id of the original model of `{self.gguf}`: vLLM, SGLang and llama.cpp's "
                "converter want that, not the GGUF file; llama-server takes the path of the GGUF file itself."
            )
        return f"TARGET is the folder or hub id of `{self.name}`." if self.local else ""


def target_words(target: str) -> TargetWords:
    """Tell a hub id from a folder and a GGUF file, also where neither lies on this machine."""
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        return TargetWords(path.name, "TARGET", local=True, gguf=path.name)
    try:
        source = resolve(TargetConfig(model=target))
    except UserError:  # a path of another machine, or a folder that has gone
        return TargetWords(path.name or target, "TARGET", local=True)
    if source.folder is None:
        return TargetWords(source.name, source.name)
    return TargetWords(
        path.resolve().name, "TARGET", local=True, gguf=source.gguf_file.name if source.gguf_file else ""
    )


def serving_commands(shape: DrafterShape, target: str, folder: str, layout: str) -> list[tuple[str, str]]:
    """(engine, command) for every engine that reads this layout; llama.cpp's where the target is its own format."""
    words = target_words(target)
    commands = [("vLLM", vllm_command(shape, words.argument, folder))]
    if layout == "dflash":
        commands.append(("SGLang", sglang_command(shape, words.argument, folder)))
    if layout == "dflash" and words.gguf:
        commands.append(("llama.cpp", llama_cpp_command(shape, words, folder)))
    return commands


def vllm_command(shape: DrafterShape, target: str, folder: str) -> str:
    """vLLM speculates B - 1 tokens a step."""
    speculative = f'{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {shape.block_size - 1}}}'
    return f"vllm serve {target} \\\n  --speculative-config '{speculative}'"


def sglang_command(shape: DrafterShape, target: str, folder: str) -> str:
    """SGLang counts the anchor among the draft tokens: B."""
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm DFLASH --speculative-draft-model-path {folder} \\\n"
        f"  --speculative-num-draft-tokens {shape.block_size} --enable-metrics"
    )


def llama_cpp_command(shape: DrafterShape, target: TargetWords, folder: str) -> str:
    """llama.cpp counts the drafted tokens, B - 1, and wants the drafter as GGUF."""
    return (
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {target.argument} --outtype bf16 "
        "--outfile drafter.gguf\n"
        f"llama-server -m {target.gguf} -md drafter.gguf --spec-type draft-dflash \\\n"
        f"  --spec-draft-n-max {shape.block_size - 1} -fa on --jinja"
    )


def _training(facts: CardFacts) -> list[str]:
    lines: list[str] = []
    if facts.data:
        lines += ["## Training data", "", *(f"- `{source}`" for source in facts.data), ""]
    if facts.settings:
        lines += ["## Settings", "", "```toml", facts.settings.strip(), "```", ""]
    return lines
