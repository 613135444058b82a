"""What `paceline bench` is asked to time, and which parts read which option."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError


@dataclass(frozen=True)
class BenchOptions:
    """Time a part of the work on this machine, beside the machine's ceilings; a number left at 0 is chosen."""

    part: str = "drafter"
    """drafter (one step), target (its packed forward), handoff (one target and one drafter in two processes), pipeline
    (target and drafter in one process), or decoding (with a drafter and without)."""
    geometry: str = ""
    """qwen3-4b, qwen3-8b, qwen3-32b, smollm2, or tiny; empty takes --model's, else qwen3-8b on a GPU and tiny on a
    CPU."""
    model: str = ""
    """Real weights of the target: a folder, a GGUF file or a hub id (target, pipeline, decoding)."""
    drafter: str = ""
    """A drafter's folder, with --model (decoding)."""
    prompts: str = "human-eval"
    """A JSONL file of prompts, or human-eval, for real weights; random ids otherwise (decoding)."""
    tokens: int = 0
    """Of a batch; 8192, or 256 on a CPU and for tiny."""
    documents: int = 2
    """Documents of equal length in a batch."""
    anchors: int = 0
    """1024, or 32."""
    block_size: int = 16
    steps: int = 0
    """Timed repeats."""
    warm: int = 0
    """Steps before the clock starts (handoff, pipeline)."""
    dtype: str = "auto"
    """float32 or bfloat16; auto is bfloat16 on CUDA."""
    matmul: str = "same"
    """same or float8, of the drafter."""
    weights: str = "full"
    """full or float8, of the target."""
    form: str = "same"
    """same, bfloat16 or float8: how features travel (handoff)."""
    compile: bool = True
    """On CUDA; a CPU always runs uncompiled."""
    batches: tuple[int, ...] = (1, 8)
    """Requests decoded together (decoding)."""
    context: int = 0
    """Tokens of a random prompt; 512, or 16 (decoding)."""
    answer: int = 0
    """Longest answer in tokens; 256, or 24 (decoding)."""
    graphs: str = "auto"
    """on decodes through CUDA graphs; auto does so on a GPU (decoding)."""
    out: str = ""
    """Write the record here as JSON."""
    compare: str = ""
    """A record to compare with; slower than it by more than `tolerance` is a failure."""
    tolerance: float = 0.05


@dataclass(frozen=True)
class Part:
    """A part that can be timed."""

    kind: str
    """As its records name it."""
    module: str
    """Holds `measure(case) -> facts`; imported when the part is timed."""
    options: frozenset[str]
    """The options that it reads, besides those that all parts read."""
    steps: tuple[int, int]
    """Timed repeats on a GPU, and elsewhere."""


_BATCH = frozenset({"tokens", "documents", "steps"})
_DRAFTER = _BATCH | {"anchors", "matmul"}

PARTS: dict[str, Part] = {
    "drafter": Part("drafter step", "paceline.bench.drafter", _DRAFTER, (200, 5)),
    "target": Part("target forward", "paceline.bench.target", _BATCH | {"model", "weights"}, (20, 3)),
    "handoff": Part("hand-off", "paceline.bench.handoff", _DRAFTER | {"weights", "form", "warm"}, (40, 4)),
    "pipeline": Part("pipeline", "paceline.bench.pipeline", _DRAFTER | {"model", "weights", "warm"}, (40, 4)),
    "decoding": Part(
        "decoding",
        "paceline.bench.decoding",
        frozenset({"model", "drafter", "prompts", "batches", "context", "answer", "graphs"}),
        (0, 0),
    ),
}

_ALL = frozenset({"part", "geometry", "block_size", "dtype", "compile", "out", "compare", "tolerance"})
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "matmul": ("same", "float8"),
    "weights": ("full", "float8"),
    "form": ("same", "bfloat16", "float8"),
    "graphs": ("auto", "on", "off"),
}


def check(options: BenchOptions) -> None:
    """Refuse what cannot be timed. Raises UserError."""
    _one_of("part", options.part, tuple(PARTS))
    given = dataclasses.asdict(options)
    for field in dataclasses.fields(BenchOptions):
        if field.name not in _ALL | PARTS[options.part].options and given[field.name] != field.default:
            readers = [name for name, part in PARTS.items() if field.name in part.options]
            raise UserError(
                f"--{field.name.replace('_', '-')} = {given[field.name]!r} says nothing to part {options.part}",
                f"leave it out, or time {' or '.join(readers)}",
            )
    for name, choices in _CHOICES.items():
        _one_of(name, given[name], choices)
    least = {"documents": 1, "block_size": 2} | dict.fromkeys(
        ("tokens", "anchors", "steps", "warm", "context", "answer"), 0
    )
    for name, low in least.items():
        if given[name] < low:
            raise UserError(f"--{name.replace('_', '-')} = {given[name]} is less than {low}", f"give at least {low}")
    if not options.batches or min(options.batches) < 1:
        raise UserError(f"--batches = {list(options.batches)}: nothing to decode", "give sizes of 1 or more")
    if options.tolerance < 0:
        raise UserError(f"--tolerance = {options.tolerance} is negative", "give a share, such as 0.05")
    if options.part == "decoding" and bool(options.model) != bool(options.drafter):
        raise UserError(
            "decoding needs both --model and --drafter, or neither", "give both, or a --geometry for random weights"
        )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{name} {value!r} is unknown", f"{hint}choose one of {', '.join(choices)}")


def check_geometry(name: str, known: tuple[str, ...]) -> None:
    _one_of("geometry", name, known)


def options_of(options: BenchOptions) -> dict[str, Any]:
    """The options that the part reads, for its record."""
    read = _ALL | PARTS[options.part].options
    return {name: value for name, value in dataclasses.asdict(options).items() if name in read}
