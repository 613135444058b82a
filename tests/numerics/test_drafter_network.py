"""Network, mask and loss against an oracle that runs one block at a time through transformers' Qwen3 layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drafter_world import SHAPE, World, gradients, relative, world
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from paceline.config import TrainingConfig
from paceline.drafter.model import Drafter
from paceline.drafter.objective import Objective
from paceline.shapes import DrafterShape

CONFIG = TrainingConfig()


class Oracle(torch.nn.Module):
    """Qwen3's own attention, MLP, norms and rotary embedding; no mask: a block is given only what it may see."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        shape = drafter.shape
        config = Qwen3Config(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_eps,
            max_position_embeddings=shape.max_positions,
            rope_parameters=dict(shape.rope),
            attn_implementation="eager",
        )
        self.fc = torch.nn.Linear(shape.features, shape.hidden_size, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(shape.hidden_size, shape.rms_eps)
        self.norm = qwen3.Qwen3RMSNorm(shape.hidden_size, shape.rms_eps)
        self.layers = torch.nn.ModuleList(qwen3.Qwen3DecoderLayer(config, i) for i in range(shape.layers))
        self.load_state_dict(drafter.state_dict())
        self.rotary = qwen3.Qwen3RotaryEmbedding(config)

    def block(self, features: Tensor, embeddings: Tensor, anchor: int) -> Tensor:
        """One block at position `anchor` of its own document, whose first `anchor` features it may see: [B, H]."""
        context = self.hidden_norm(self.fc(features[:anchor]))
        positions = torch.arange(anchor + len(embeddings))[None]
        cos_sin = self.rotary(context, positions)
        x = embeddings
        for layer in self.layers:
            everything = torch.cat((context, layer.input_layernorm(x)))[None]
            attended, _ = layer.self_attn(everything, position_embeddings=cos_sin, attention_mask=None)
            x = x + attended[0, anchor:]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def oracle_sums(oracle: Oracle, it: World) -> tuple[Tensor, float, list[float], Tensor]:
    """Loss sum, weight sum, correct labels a slot, and every block's states."""
    tokens, features = it.batch.tokens, it.batch.features_SF
    loss, weight, states = torch.zeros(()), 0.0, []
    correct = [0.0] * it.shape.block_size
    for number, anchor in enumerate(tokens.anchors_A.tolist()):
        start = int(tokens.starts_A[number])
        ids = [int(tokens.ids_S[anchor])] + [oracle_mask_id(it)] * (it.shape.block_size - 1)
        hidden = oracle.block(features[start:], it.ends.embedding_VH[ids], anchor - start)
        states.append(hidden)
        logits = hidden @ it.ends.head_VH.T
        for slot in range(it.shape.block_size):
            slot_weight = float(tokens.weights_AB[number, slot])
            if slot_weight > 0:
                label = tokens.labels_AB[number, slot]
                loss = loss + slot_weight * functional.cross_entropy(logits[slot], label)
                weight += slot_weight
                correct[slot] += float(logits[slot].argmax() == label)
    return loss, weight, correct, torch.stack(states)


def oracle_mask_id(it: World) -> int:
    return it.drafter.shape.mask_token_id


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        dataclasses.replace(SHAPE, heads=3, kv_heads=3, layers=1),
        dataclasses.replace(SHAPE, layer_ids=(2,), kv_heads=1),
        dataclasses.replace(
            SHAPE,
            rope={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        dataclasses.replace(
            SHAPE,
            rope={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ],
    ids=["grouped heads", "one layer", "one feature", "llama3 rope", "yarn rope"],
)
def test_loss_states_and_gradients_equal_the_oracle(shape: DrafterShape) -> None:
    it = world(shape=shape)
    oracle = Oracle(it.drafter)
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense")
    loss, weight, correct, states = oracle_sums(oracle, it)
    loss.backward()
    sums = objective.sums(it.batch)
    sums.loss.backward()
    assert relative(objective.hidden(it.batch).detach(), states[:, 1:].detach()) < 1e-5
    assert float(sums.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight, rel=1e-6)
    assert sums.correct_B.tolist() == correct
    expected = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    for name, found in gradients(it.drafter).items():
        assert relative(found, expected[name]) < 1e-4, name


def test_padding_blocks_add_nothing() -> None:
    with_padding, without = world(padding_blocks=3), world(padding_blocks=0)
    sums = [Objective(it.drafter, it.ends, it.shape, CONFIG, "dense").sums(it.batch) for it in (with_padding, without)]
    assert float(sums[0].loss.detach()) == pytest.approx(float(sums[1].loss.detach()), rel=1e-6)
    assert float(sums[0].weight) == float(sums[1].weight)


def test_a_batch_without_labels_is_finite_and_moves_nothing() -> None:
    it = world(anchors=(), padding_blocks=4)
    sums = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense").sums(it.batch)
    sums.loss.backward()
    assert float(sums.loss.detach()) == 0.0
    assert float(sums.weight) == 0.0
    assert all(float(found.abs().max()) == 0.0 for found in gradients(it.drafter).values())


@pytest.mark.parametrize("anchors", [(10, 13), (0, 1), (9, 9), (12, 11, 5)])
def test_nothing_at_or_after_an_anchor_can_be_seen(anchors: tuple[int, ...]) -> None:
    """Change every feature from the anchor on and every token after it: the block's states are bit-identical."""
    it = world(lengths=(20,), tokens=24, anchors=anchors, padding_blocks=0)
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense")
    before = objective.hidden(it.batch)
    for number, anchor in enumerate(anchors):
        features, ids = it.batch.features_SF.clone(), it.batch.tokens.ids_S.clone()
        features[anchor:] = torch.randn_like(features[anchor:]) * 100
        ids[anchor + 1 :] = (ids[anchor + 1 :] + 1) % 90
        tokens = dataclasses.replace(it.batch.tokens, ids_S=ids)
        after = objective.hidden(dataclasses.replace(it.batch, tokens=tokens, features_SF=features))
        assert torch.equal(before[number], after[number])
        features = it.batch.features_SF.clone()
        features[max(0, anchor - 1)] += 1.0
        after = objective.hidden(dataclasses.replace(it.batch, features_SF=features))
        assert torch.equal(before[number], after[number]) == (anchor == 0)


def test_other_documents_cannot_be_seen() -> None:
    it = world()
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense")
    before = objective.hidden(it.batch)
    inside = [n for n, start in enumerate(it.batch.tokens.starts_A.tolist()) if start == 13]
    assert inside
    features = it.batch.features_SF.clone()
    features[:13] *= -3.0
    features[20:] *= -3.0
    after = objective.hidden(dataclasses.replace(it.batch, features_SF=features))
    assert torch.equal(before[inside], after[inside])


def test_packed_equals_alone() -> None:
    lengths, anchors = (13, 7, 20), (0, 1, 5, 6, 11, 14, 18, 25, 37, 38)
    packed = world(lengths, 48, anchors, padding_blocks=0)
    objective = Objective(packed.drafter, packed.ends, packed.shape, CONFIG, "dense")
    sums = objective.sums(packed.batch)
    sums.loss.backward()
    together = gradients(packed.drafter)
    alone_loss, alone_weight, start = 0.0, 0.0, 0
    for length in lengths:
        mine = [n for n, anchor in enumerate(anchors) if start <= anchor < start + length]
        tokens = packed.batch.tokens
        piece = dataclasses.replace(
            tokens,
            ids_S=tokens.ids_S[start : start + length],
            positions_S=torch.arange(length),
            anchors_A=tokens.anchors_A[mine] - start,
            starts_A=torch.zeros(len(mine), dtype=torch.int64),
            labels_AB=tokens.labels_AB[mine],
            weights_AB=tokens.weights_AB[mine],
        )
        batch = dataclasses.replace(
            packed.batch, tokens=piece, features_SF=packed.batch.features_SF[start : start + length]
        )
        shape = dataclasses.replace(packed.shape, tokens=length, anchors=len(mine))
        part = Objective(packed.drafter, packed.ends, shape, CONFIG, "dense").sums(batch)
        part.loss.backward()
        alone_loss, alone_weight = alone_loss + float(part.loss.detach()), alone_weight + float(part.weight)
        start += length
    assert float(sums.loss.detach()) == pytest.approx(alone_loss, rel=1e-5)
    assert float(sums.weight) == pytest.approx(alone_weight, rel=1e-6)
    for name, found in gradients(packed.drafter).items():
        assert relative(found, together[name]) < 1e-5, name


def test_slots_of_a_block_see_each_other_both_ways() -> None:
    it = world(lengths=(20,), tokens=20, anchors=(8, 12), padding_blocks=0)
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense")
    block = torch.randn(1, 8, SHAPE.hidden_size)
    positions = torch.arange(8, 16)[None]
    context = it.drafter.context_kv(it.batch.features_SF[None], torch.arange(20)[None])
    attend = objective._attend(it.batch.tokens.starts_A, it.batch.tokens.anchors_A)
    before = it.drafter.blocks(block, positions, context, attend)[0]
    for slot in range(4):
        changed = block.clone()
        changed[0, slot] += 1.0
        after = it.drafter.blocks(changed, positions, context, attend)[0]
        moved = (after != before).any(dim=1)
        assert moved[:4].all()
        assert not moved[4:].any()


def test_recomputation_changes_nothing() -> None:
    found = []
    for recompute in (False, True):
        it = world()
        config = dataclasses.replace(CONFIG, recompute=recompute)
        Objective(it.drafter, it.ends, it.shape, config, "dense").sums(it.batch).loss.backward()
        found.append(gradients(it.drafter))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_accepts_is_where_the_argmax_is_the_label() -> None:
    it = world()
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense")
    # Labels that the drafter gets right about half of the time.
    proposals = functional.pad(it.ends.logits(objective.hidden(it.batch)).argmax(dim=-1), (1, 0))
    right = torch.rand(proposals.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    labels = torch.where(right, proposals, it.batch.tokens.labels_AB)
    batch = dataclasses.replace(it.batch, tokens=dataclasses.replace(it.batch.tokens, labels_AB=labels))
    expected = (proposals == labels) & (it.batch.tokens.weights_AB > 0)
    accepts = objective.accepts(batch)
    assert torch.equal(accepts, expected)
    assert not accepts[:, 0].any()
    assert accepts.any()
    prefixes = objective.accepts(batch, prefix_only=True)
    assert torch.equal(prefixes[:, 1:], accepts[:, 1:].long().cumprod(dim=1).bool())


def test_names_and_shapes_are_the_checkpoints() -> None:
    state = world().drafter.state_dict()
    assert len(state) == 3 + 11 * SHAPE.layers
    assert state["fc.weight"].shape == (32, 96)
    assert state["layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert not [name for name in state if "embed" in name or "inv_freq" in name or "head" in name]
