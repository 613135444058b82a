"""The configuration of a run: frozen sections, strict TOML, dotted overrides, and the dump that reruns it.

A new knob is one line here and one place that reads it. Sections travel whole; they are never unpacked.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from paceline.errors import UserError

ShardOptimizer = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    name: str = "run"
    """The run's folder is `folder`/`name`."""
    folder: str = "runs"
    """Where runs live."""
    seed: int = 0
    """Of anchors, order and a random start."""


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model whose tokens are drafted."""

    model: str = ""
    """A model folder, a GGUF file, or a hub id."""
    revision: str = ""
    """Of a hub model: a branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 on CUDA and float32 on CPU."""
    features: int = 5
    """K, how many layers' hidden states the drafter reads (ignored when layer_ids is given)."""
    layer_ids: tuple[int, ...] = ()
    """0-based layers whose outputs are captured; empty takes the method's spacing."""
    mask_token_id: int = -1
    """An id of the target's vocabulary that never occurs in text. Required: never guessed."""
    chat_template: str = ""
    """A Jinja file that replaces the tokenizer's own template."""
    tensor_parallel: int = 1
    """GPUs that share one target: each holds a part of every layer."""
    weights: Literal["full", "float8"] = "full"
    """`float8` keeps the layers' matrices in float8: half the memory, faster on Hopper and later."""
    feature_cache: Literal["none", "memory", "disk"] = "none"
    """Keep the features of every document, so that epochs after the first cost no target compute."""
    feature_cache_dtype: Literal["auto", "same", "float8"] = "auto"
    """`float8` has a scale for each token and layer; `auto` is that on disk, and the target's dtype in memory."""
    feature_cache_folder: str = ""
    """Where a cache on disk lies; empty takes the user's cache folder."""


@dataclass(frozen=True)
class DataConfig:
    """Conversations in."""

    train: tuple[str, ...] = ()
    """Files, folders, globs, or hub data sets (`hub:owner/name`)."""
    weights: tuple[float, ...] = ()
    """One a source of `train`: how often its rows are seen in an epoch (1 = once); empty means once each."""
    held_out: tuple[str, ...] = ()
    """Conversations never trained on; empty splits `held_out_fraction` off by content hash."""
    held_out_fraction: float = 0.02
    """Share of the conversations that is never trained on, where `held_out` is empty."""
    shape: Literal["auto", "messages", "sharegpt", "completion", "alpaca", "prompt", "text"] = "auto"
    """What rows look like; `auto` finds out."""
    max_tokens: int = 4096
    """Longest document in tokens; what is longer is cut and counted."""
    thinking: Literal["template", "on", "off"] = "template"
    """The template's switch for reasoning; `template` leaves it as it is."""
    max_set_aside: float = 0.5
    """Share of rows that may be set aside before the run refuses to start."""
    cache_folder: str = ""
    """Tokenised data; empty is a folder of the user's cache."""


@dataclass(frozen=True)
class DrafterConfig:
    """The draft model. Sizes not named here are the target's."""

    layers: int = 5
    """Draft layers, each in the shape of the target's own."""
    block_size: int = 16
    """B: the drafter writes B - 1 tokens in one forward, after the last one that was committed."""
    init: str = "target"
    """`random`, `target` (layers copied from the target's own), or a drafter's folder to continue from. A continued
    drafter wants a lower `training.learning_rate` (a tenth, say) and a warm-up.
    """


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation."""

    steps: int = 0
    """Optimiser steps; 0 derives them from `epochs`."""
    epochs: float = 6.0
    """Passes over the training data, where `steps` is 0."""
    tokens: int = 8192
    """S, tokens of one batch: every batch has this shape."""
    anchors: int = 1024
    """A, blocks of one batch."""
    global_batch: int = 1
    """Token batches of one optimiser step, whatever the number of workers."""
    learning_rate: float = 6e-4
    """The highest rate, after the warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """How the rate falls: `cosine` to zero over all steps, `wsd` straight to zero over the last share `decay`, or not
    at all.
    """
    warmup: float = 0.04
    """Share of the steps over which the rate rises."""
    decay: float = 0.2
    """Share of the steps over which the rate falls (schedule `wsd`)."""
    weight_decay: float = 0.0
    """Decoupled (AdamW), on matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's two averages."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    gamma: float = 0.0
    """Decay of the slot weights exp(-(j-1)/gamma); 0 takes the method's value for the block size."""
    weighting: Literal["decay", "dpace"] = "decay"
    """`decay`: the paper's fixed weights by slot; `dpace`: by the drafter's own confidence (arXiv 2605.18810), which
    puts more on the slots that it can win now.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the drafter's products; `auto` is bfloat16 on a GPU, float32 on a CPU. Master weights are float32 always."""
    matmul: Literal["same", "float8"] = "same"
    """`float8` runs the products of layers and head in float8 (Hopper and later): a fifth less time a step."""
    vocabulary: Literal["full", "data"] = "full"
    """`data` takes the loss over the tokens that occur in the training data only: cheaper where the head dominates."""
    head_chunk: int = 0
    """Rows of logits held at once by the loss; 0 chooses."""
    recompute: bool = False
    """Compute what lies between a feed-forward's products again in the backward: less memory, hardly slower."""
    shard_optimizer: ShardOptimizer = "auto"
    """Each drafter rank keeps its share of the float32 weights and moments; `auto` does where they do not fit whole."""
    max_skipped: int = 10
    """Stop after this many batches with non-finite values in a row."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact acceptance length on held-out data while training."""

    every: int = 200
    """Optimiser steps between evaluations; 0 evaluates at the start and at the end only."""
    anchors: int = 4096
    """Bound on held-out answer positions looked at."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """Optimiser steps between training-state checkpoints; 0 saves at the end only."""
    keep: int = 2
    """How many checkpoints stay; older ones are removed when a newer one is whole."""


@dataclass(frozen=True)
class TopologyConfig:
    """Who does what: see `paceline plan`."""

    kind: Literal["colocated", "split", "auto"] = "colocated"
    """Which GPU does what: see the page Scaling."""
    targets: int = 0
    """Targets of a `split`; each takes `target.tensor_parallel` processes."""
    drafters: int = 0
    """Drafters of a `split`, one process each."""
    features: Literal["bfloat16", "float8", "same"] = "same"
    """The form in which features travel between devices."""


@dataclass(frozen=True)
class LaunchConfig:
    workers: int = 0
    """Processes on this host; 0 is one a GPU, or one on CPU."""
    restarts: int = 0
    """How often all workers start again from the last whole checkpoint when one fails; never after a fault of input."""
    stall_seconds: float = 300.0
    """A worker that says nothing for so long is taken for hung: stacks are written, and the launch fails."""
    collective_seconds: float = 600.0
    """How long workers wait for each other, where they meet and in a collective."""
    threads: int = 0
    """CPU threads a worker; 0 shares the cores evenly."""


@dataclass(frozen=True)
class CompilingConfig:
    mode: Literal["auto", "on", "off"] = "auto"
    """`auto` compiles on CUDA and not on CPU."""
    cache: str = ""
    """Root of the compile caches; empty is a folder of the user's cache."""
    warmup_seconds: float = 1800.0
    """How long the other workers wait for the leader of the warm-up."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    compiling: CompilingConfig = field(default_factory=CompilingConfig)


def default_gamma(block_size: int) -> float:
    """The method's decay for a block size: 7 at 16, 5 at 10, 4 at 8 (arXiv 2602.06036, A.1), linear between."""
    if block_size <= 8:
        return block_size / 2
    if block_size <= 10:
        return 4 + (block_size - 8) / 2
    return 5 + (block_size - 10) / 3


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and check every value.

    Raises UserError for a missing file, a syntax error, an unknown key (naming the nearest), a value of the wrong
    type or out of range.
    """
    tree = read_toml(Path(path)) if path is not None else {}
    for text in overrides:
        _apply(tree, text)
    config = _build(Config, tree, "")
    check(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"configuration file not found: {path}", "give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}", "give a readable UTF-8 TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}", "correct the line that it names") from None


def dump(config: Config) -> str:
    """The resolved configuration as TOML; `load` gives back an equal Config."""
    return tomli_w.dumps(_plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _apply(tree: dict[str, Any], text: str) -> None:
    """Set one `section.key=value`; the value is read as TOML, or taken as a string where that fails."""
    key, equals, raw = text.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) != 2:
        raise UserError(f"override {text!r} is not of the form section.key=value", "for example training.steps=200")
    section = tree.setdefault(path[0], {})
    if not isinstance(section, dict):
        raise UserError(f"{path[0]} is not a section", f"write [{path[0]}] and its keys below it")
    section[path[1]] = _toml_value(raw.strip())


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _build(kind: type, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise UserError(f"{where} = {tree!r} is not a section", f"write [{where}] and its keys below it")
    hints = typing.get_type_hints(kind)
    for key in tree:
        if key not in hints:
            raise UserError(f"unknown key {_join(where, key)!r} in the configuration", _nearest(key, where, hints))
    values = {key: _value(hints[key], tree[key], _join(where, key)) for key in tree}
    return kind(**values)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _nearest(key: str, where: str, hints: dict[str, Any]) -> str:
    near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
    if near:
        return f"did you mean {_join(where, near[0])!r}?"
    known = ", ".join(hints)
    return f"keys of [{where}]: {known}" if where else f"sections: {known}"


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise UserError(f"{where} = {value!r} is not one of {', '.join(map(repr, args))}", "choose one of them")
        return value
    if origin is tuple:
        return _tuple(args, value, where)
    if origin is types.UnionType:
        raise AssertionError(f"{where}: unions are not used in the configuration")
    return _scalar(hint, value, where)


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    # One value stands for a list of one, so that `data.train=chats.jsonl` reads as people write it.
    items = list(value) if isinstance(value, list | tuple) else [value]
    if args[-1] is Ellipsis:
        return tuple(_value(args[0], item, where) for item in items)
    if len(items) != len(args):
        raise UserError(f"{where} needs {len(args)} values, got {len(items)}", "write it as [a, b]")
    return tuple(_value(arg, item, where) for arg, item in zip(args, items, strict=True))


def _scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UserError(f"{where} = {value!r} is not {_article(hint)}", f"give {_article(hint)}")
    return value


def _article(hint: type) -> str:
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]


_RANGES: dict[str, tuple[float, float]] = {
    "target.features": (1, 64),
    "target.tensor_parallel": (1, 64),
    "data.held_out_fraction": (0.0, 0.5),
    "data.max_tokens": (8, 1 << 22),
    "data.max_set_aside": (0.0, 1.0),
    "drafter.layers": (1, 64),
    "drafter.block_size": (2, 128),
    "training.steps": (0, 1 << 40),
    "training.epochs": (0.0, 1e6),
    "training.tokens": (16, 1 << 22),
    "training.anchors": (1, 1 << 20),
    "training.global_batch": (1, 1 << 16),
    "training.learning_rate": (1e-9, 1.0),
    "training.warmup": (0.0, 1.0),
    "training.decay": (0.0, 1.0),
    "training.weight_decay": (0.0, 10.0),
    "training.clip": (1e-6, 1e6),
    "training.gamma": (0.0, 1e4),
    "training.head_chunk": (0, 1 << 20),
    "training.max_skipped": (1, 1 << 30),
    "evaluation.every": (0, 1 << 40),
    "evaluation.anchors": (1, 1 << 24),
    "checkpoint.every": (0, 1 << 40),
    "checkpoint.keep": (1, 1 << 20),
    "topology.targets": (0, 1 << 16),
    "topology.drafters": (0, 1 << 16),
    "launch.workers": (0, 4096),
    "launch.restarts": (0, 1000),
    "launch.stall_seconds": (1.0, 1e6),
    "launch.collective_seconds": (1.0, 1e6),
    "launch.threads": (0, 4096),
    "compiling.warmup_seconds": (1.0, 1e6),
}


def check(config: Config) -> None:
    """Refuse values that cannot work, before anything is loaded. Raises UserError."""
    for where, (low, high) in _RANGES.items():
        section, key = where.split(".")
        value = dataclasses.asdict(config)[section][key]
        if not low <= value <= high:  # also false for NaN
            raise UserError(f"{where} = {value} is outside {low:g} … {high:g}", "choose a value inside")
    if any(not 0.0 <= beta < 1.0 for beta in config.training.betas):
        raise UserError(f"training.betas = {list(config.training.betas)}: each must lie in [0, 1)", "use [0.9, 0.999]")
    if config.data.weights and len(config.data.weights) != len(config.data.train):
        raise UserError(
            f"data.weights has {len(config.data.weights)} values for {len(config.data.train)} sources",
            "give one weight for each entry of data.train",
        )
    if config.target.tensor_parallel > 1 and config.target.feature_cache == "disk":
        raise UserError(
            f"target.feature_cache = 'disk' with target.tensor_parallel = {config.target.tensor_parallel}: ranks share "
            "the work on disk by documents, and those of one target must compute each document together",
            "set target.feature_cache = 'memory' or 'none'",
        )
    if config.topology.kind == "split" and (config.topology.targets < 1 or config.topology.drafters < 1):
        raise UserError(
            f"topology.kind = 'split' with {config.topology.targets} targets and {config.topology.drafters} drafters",
            "set topology.targets and topology.drafters to at least 1, or topology.kind = 'auto'",
        )
    if not config.run.name or Path(config.run.name).name != config.run.name:
        raise UserError(f"run.name = {config.run.name!r} is not a plain folder name", "use letters, digits, - and _")
