"""The model card of an exported drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.shapes import DrafterShape


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
    revision = f" (revision `{facts.target_revision}`)" if facts.target_revision else ""
    return [
        "---",
        "tags: [dflash, speculative-decoding, draft-model]",
        *([] if "/" not in facts.target or facts.target.startswith(("/", ".")) else [f"base_model: {facts.target}"]),
        "---",
        "",
        f"# {name}",
        "",
        f"A DFlash drafter (arXiv 2602.06036) for `{facts.target}`{revision}. It drafts {shape.block_size - 1} tokens "
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
    commands = [("vLLM", vllm_command(shape, facts.target, "."))]
    if layout == "dflash":
        commands.append(("SGLang", sglang_command(shape, facts.target, ".")))
    lines = ["## Serving", ""]
    for engine, command in commands:
        lines += [f"{engine}:", "", "```bash", command, "```", ""]
    return lines


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


def _training(facts: CardFacts) -> list[str]:
    lines: list[str] = []
    if facts.data:
        lines += ["## Training data", "", *(f"- `{source}`" for source in facts.data), ""]
    if facts.settings:
        lines += ["## Settings", "", "```toml", facts.settings.strip(), "```", ""]
    return lines
