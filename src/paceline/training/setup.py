"""What a run is made of, decided and checked before any weight is loaded and before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline import export
from paceline.batches import BatchShape, TokenBatch
from paceline.config import Config, default_gamma
from paceline.data.corpus import build_corpus
from paceline.data.stream import Stream
from paceline.drafter.init import check_continues, check_weights, naming_init
from paceline.drafter.model import Drafter
from paceline.drafter.sizes import shape_for
from paceline.errors import UserError
from paceline.shapes import DrafterShape, TargetShape
from paceline.target.describe import check_mask_token, choose_layers, load_tokenizer, read_shape
from paceline.target.transformers_body import TransformersTarget


@dataclass(frozen=True)
class Setup:
    """A configuration with the facts that follow from it."""

    config: Config
    target: TargetShape
    drafter: DrafterShape
    batch: BatchShape
    tokenizer: PreTrainedTokenizerBase


def set_up(config: Config) -> Setup:
    """Read the target's configuration and tokenizer, and fix every shape of the run. Raises UserError."""
    if not config.data.train:
        raise UserError("data.train is empty", 'name your conversations: data.train = ["chats.jsonl"]')
    target = read_shape(config.target)
    layer_ids = choose_layers(target.layers, config.target.features, config.target.layer_ids)
    tokenizer = load_tokenizer(config.target)
    check_mask_token(config.target, target, tokenizer)
    drafter = shape_for(target, layer_ids, config.drafter, config.target.mask_token_id)
    return Setup(config, target, drafter, batch_shape(config), tokenizer)


def batch_shape(config: Config) -> BatchShape:
    """The one shape that every batch of the run has."""
    training, block = config.training, config.drafter.block_size
    if training.anchors > training.tokens:
        raise UserError(
            f"training.anchors = {training.anchors} is more than training.tokens = {training.tokens}",
            "a batch cannot have more anchors than tokens: lower training.anchors",
        )
    return BatchShape(training.tokens, training.anchors, block, training.gamma or default_gamma(block))


def total_steps(config: Config, batches_per_epoch: int) -> int:
    """Optimiser steps of the whole run."""
    if config.training.steps:
        return config.training.steps
    return max(1, round(config.training.epochs * batches_per_epoch / config.training.global_batch))


def preflight(config: Config, *, claims: bool = True) -> None:
    """Everything that can be refused before a worker starts and a file is written. Raises UserError.

    That is the configuration, the target's facts, the data, and the drafter to start from. `claims` says that the run
    folder must not hold a run yet.
    """
    folder = Path(config.run.folder) / config.run.name
    if claims:
        refuse_used_folder(folder)
    setup = set_up(config)
    if claims:
        check_init(setup, weights=True)
    corpus = build_corpus(
        config.data,
        setup.tokenizer,
        mask_token_id=setup.drafter.mask_token_id,
        eos_ids=setup.target.eos_ids,
        seed=config.run.seed,
        report=_silent,
    )
    Stream(corpus.train, setup.batch, config.run.seed, corpus.held_out, config.evaluation.anchors)


def refuse_used_folder(folder: Path) -> None:
    """Raise UserError where a run lies already."""
    if (folder / "metrics.jsonl").exists():
        raise UserError(
            f"{folder} already holds a run", "add --resume to continue it, or choose another run.name (or remove it)"
        )


def check_init(setup: Setup, *, weights: bool = False) -> None:
    """Raise UserError where `drafter.init` cannot be what this run's drafter starts from; `weights` reads them too."""
    init = setup.config.drafter.init
    if init in ("random", "target"):
        return
    folder = Path(init)
    if not folder.is_dir():
        raise UserError(
            f"drafter.init = {init!r} is neither random, nor target, nor a folder", "give a drafter's folder"
        )
    with naming_init(folder):
        shape, _ = export.read_shape(folder)
    check_continues(folder, shape, setup.drafter)
    if weights:
        with naming_init(folder):
            _, state = export.read(folder)
        with torch.device("meta"):
            mine = Drafter(setup.drafter).state_dict()
        check_weights(folder, state, mine)


def _silent(_: str) -> None:
    """The run itself will say it."""


def target_choice(setup: Setup) -> Callable[[TokenBatch], Tensor]:
    """Loads the whole target; what it gives is the target's own next token at each place of a batch, int64 [S]."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = TransformersTarget.load(setup.config.target, device, setup.drafter.layer_ids)
    return lambda batch: target.next_tokens(batch.to(device)).cpu()
