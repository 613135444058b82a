"""The start-up self-check: capture, packing and ends against plain forwards of the whole model.

S context tokens of a batch, n tokens of one document, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import typing

import torch
from torch import Tensor, nn

from paceline.batches import TokenBatch
from paceline.errors import UserError
from paceline.target.packing import packed, row_of

if typing.TYPE_CHECKING:
    from paceline.target.transformers_body import TransformersTarget

_DOCUMENTS = 3
_TOKENS = 512
# Half precision sends a few tokens of a mixture of experts elsewhere; a wrong norm, head or scale agrees by chance.
_AGREEMENT = {torch.float32: 0.99, torch.bfloat16: 0.95, torch.float16: 0.95}
# Relative to the size of a state: other kernels and other shapes round differently, a leak between documents does not
# stay this small.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}


@torch.no_grad()
def check_target(target: TransformersTarget, batch: TokenBatch) -> None:
    """Raise UserError unless the target's features and ends are what a plain forward of the model gives."""
    features_SF = target.features(batch)
    _finite(target, features_SF[: _real_tokens(target, batch)])
    top_S = _rest_of_model(target, batch, features_SF)
    agreed = counted = 0
    for start, end in _documents(target, batch):
        ids = batch.ids_S[start:end].to(target.device)
        states_nF, logits_nV = _alone(target, ids)
        _same_features(target, features_SF[start:end], states_nF)
        agreed += _agreed(top_S[start:end], logits_nV, _TOLERANCE[target.dtype])
        counted += end - start
    _check_embedding(target, batch)
    if counted and agreed < _AGREEMENT[target.dtype] * counted and not _float8(target):
        raise UserError(
            f"target {target.shape.name}: the layers after {target.layer_ids[-1]}, the norm and the head give the "
            f"model's own next token at {agreed} of {counted} positions only",
            "this kind of model is not captured rightly: choose another target, and report it with its configuration",
        )


def _agreed(tokens_n: Tensor, logits_nV: Tensor, tolerance: float) -> int:
    """Positions whose token is the model's own best, or so near it that rounding decides."""
    logits = logits_nV.float()
    own = logits.gather(-1, tokens_n.unsqueeze(-1)).squeeze(-1)
    return int((own >= logits.amax(dim=-1) - tolerance * logits.std(dim=-1)).sum())


def _as_good(top_n: Tensor, logits_nV: Tensor) -> Tensor:
    """bool [n]: the choice is the model's own, or one whose logit is within two roundings of it.

    Narrow dtypes tie the best logits of a vocabulary often, and other kernels break the tie otherwise.
    """
    best_n = logits_nV.amax(dim=-1)
    margin_n = 2 * torch.finfo(logits_nV.dtype).eps * best_n.abs()
    return logits_nV.gather(-1, top_n[:, None])[:, 0] >= best_n - margin_n


def _real_tokens(target: TransformersTarget, batch: TokenBatch) -> int:
    return row_of(batch, target.device).bounds[-1]


def _documents(target: TransformersTarget, batch: TokenBatch) -> list[tuple[int, int]]:
    """The first documents of the row and one that others precede, each cut to a bounded length."""
    bounds = row_of(batch, target.device).bounds
    spans = list(itertools.pairwise(bounds))
    chosen = spans[: _DOCUMENTS - 1] + spans[_DOCUMENTS - 1 :][-1:]
    return [(start, min(end, start + _TOKENS)) for start, end in chosen]


def _finite(target: TransformersTarget, features_SF: Tensor) -> None:
    if not bool(torch.isfinite(features_SF).all()):
        raise UserError(
            f"target {target.shape.name} gives non-finite states in {target.dtype}",
            "check its weights, or set target.dtype = 'float32'",
        )


def _alone(target: TransformersTarget, ids: Tensor) -> tuple[Tensor, Tensor]:
    """One document through the model's own attention, masks and head: captured states [n, F] and logits [n, V]."""
    states: dict[int, Tensor] = {}
    hooks = [target.layers[layer].register_forward_hook(_keeper(states, layer)) for layer in target.layer_ids]
    try:
        logits = target.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([states[layer] for layer in target.layer_ids], dim=-1), logits


def _keeper(states: dict[int, Tensor], layer: int) -> typing.Callable[[nn.Module, typing.Any, typing.Any], None]:
    def keep(_module: nn.Module, _inputs: typing.Any, output: typing.Any) -> None:
        states[layer] = (output[0] if isinstance(output, tuple) else output)[0]

    return keep


def _rest_of_model(target: TransformersTarget, batch: TokenBatch, features_SF: Tensor) -> Tensor:
    """Greedy next tokens [S] from the last captured state alone: below it, the model is given ids of zero."""
    last_SH = features_SF[:, -target.shape.hidden_size :]

    def replace(_module: nn.Module, _inputs: typing.Any, output: typing.Any) -> typing.Any:
        state = last_SH.unsqueeze(0)
        return (state, *output[1:]) if isinstance(output, tuple) else state

    hook = target.layers[target.layer_ids[-1]].register_forward_hook(replace)
    try:
        with packed(target.decoder.config, row_of(batch, target.device)):
            result = target.decoder(
                input_ids=torch.zeros_like(batch.ids_S, device=target.device).unsqueeze(0),
                position_ids=batch.positions_S.to(target.device).unsqueeze(0),
                use_cache=False,
            )
    finally:
        hook.remove()
    hidden_SH = result.last_hidden_state[0]
    return torch.cat([target.ends.logits(part).argmax(dim=-1) for part in hidden_SH.split(1024)])


def _same_features(target: TransformersTarget, packed_nF: Tensor, alone_nF: Tensor) -> None:
    difference = (packed_nF.float() - alone_nF.float()).norm() / alone_nF.float().norm().clamp(min=1e-12)
    if float(difference) > _TOLERANCE[target.dtype]:
        raise UserError(
            f"target {target.shape.name}: states of a packed document differ from those of the document alone by "
            f"{float(difference):.2g} of their size",
            "documents of a row see each other in this kind of model: choose another target, and report it",
        )


def _check_embedding(target: TransformersTarget, batch: TokenBatch) -> None:
    """The first layer must receive what `FrozenEnds.embed` gives a drafter."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[typing.Any, ...], keywords: dict[str, typing.Any]) -> None:
        seen.append(inputs[0] if inputs else keywords["hidden_states"])

    hook = target.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        target.hidden(batch)
    finally:
        hook.remove()
    expected = target.ends.embed(batch.ids_S.to(target.device))
    if not torch.allclose(seen[0][0].float(), expected.float(), rtol=1e-2, atol=1e-5):
        raise UserError(
            f"target {target.shape.name} changes its token embeddings before the first layer in a way that is not "
            "known here",
            "this kind of model needs its embedding scale: report it with its configuration",
        )


def _float8(target: TransformersTarget) -> bool:
    """Whether weights were rounded to float8, which moves some of the model's own next tokens."""
    return any(type(module).__name__ == "Float8Linear" for module in target.layers.modules())
