"""The decoding loop against an oracle that recomputes everything for each token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decode_world import (
    END,
    FAMILIES,
    MASK,
    VOCABULARY,
    Oracle,
    cut,
    drafter_shape,
    ends_of,
    grouped_prompts,
    make_drafter,
    make_target,
    one_hot_ends,
    slow_answers,
    slow_greedy,
)
from transformers import Qwen3NextConfig

from paceline.errors import UserError
from paceline.evaluation.acceptance import summarise
from paceline.evaluation.cache import attention_windows
from paceline.evaluation.decode import Decoded, Engine, decode, plain, speculate
from paceline.evaluation.sampling import Sampling

BLOCK = 6


@pytest.fixture(scope="module")
def world():
    model = make_target("llama")
    shape = drafter_shape(model, BLOCK)
    prompts = grouped_prompts()
    truth = slow_answers(model, prompts, 128)
    return model, shape, prompts, truth


def oracle_engine(world, mistakes=()) -> Engine:
    model, shape, prompts, truth = world
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, truth, strict=True)]
    return Engine(model, one_hot_ends(), Oracle(whole, mistakes), shape)


def test_twenty_prompts_of_128_tokens_are_lossless(world):
    model, shape, prompts, truth = world
    engine = Engine(model, ends_of(model), make_drafter(shape), shape)
    timed = decode(engine, prompts, 128, ())
    assert [answer.tokens for answer in timed.answers] == truth
    assert all(sum(answer.committed) == 127 for answer in timed.answers)
    assert 1.0 <= summarise([answer.walk() for answer in timed.answers], BLOCK).tau_micro < 1.2


def test_batched_alone_and_static_are_the_same(world):
    model, shape, prompts, _ = world
    engine = Engine(model, ends_of(model), make_drafter(shape), shape)
    together = decode(engine, prompts[::3], 40, (END,)).answers
    assert [decode(engine, [prompt], 40, (END,)).answers[0] for prompt in prompts[::3]] == together
    assert decode(dataclasses.replace(engine, static=True), prompts[::3], 40, (END,)).answers == together


def test_plain_decoding_is_the_oracles(world):
    model, _, prompts, truth = world
    assert plain(model, ends_of(model), prompts[7], 50).tokens == truth[7][:50]


def test_an_oracle_drafter_reaches_the_maximum(world):
    *_, truth = world
    timed = decode(oracle_engine(world), world[2], 128, ())
    assert [answer.tokens for answer in timed.answers] == truth
    # 127 tokens after the prefill's: 21 whole blocks of 6 and one step that the limit cuts to 1.
    assert all(answer.committed == [BLOCK] * 21 + [1] for answer in timed.answers)
    assert all(answer.accepted == [BLOCK - 1] * 21 + [1] for answer in timed.answers)


def test_a_mistake_costs_the_rest_of_its_block(world):
    model, shape, prompts, truth = world
    at = len(prompts[0]) + 3  # slot 3 of the first block, whose anchor is the prefill's token
    whole = [[*prompts[0], *truth[0]]]
    engine = Engine(model, one_hot_ends(), Oracle(whole, [at]), shape)
    answer = decode(engine, [prompts[0]], 20, ()).answers[0]
    assert answer.tokens == truth[0][:20]
    assert answer.committed[:2] == [3, BLOCK]
    assert answer.accepted[:2] == [2, BLOCK - 1]


@pytest.mark.parametrize("slot", range(1, BLOCK + 2))
def test_nothing_after_an_end_token_counts(world, slot: int):
    """An end at every slot of a block, as the bonus and as the first token of the next block."""
    model, shape, prompts, truth = world
    row = next(r for r in range(len(truth)) if truth[r][slot] not in truth[r][:slot])
    end = truth[row][slot]
    whole = [[*prompts[row], *truth[row]]]
    answer = decode(Engine(model, one_hot_ends(), Oracle(whole), shape), [prompts[row]], 60, (end,)).answers[0]
    assert answer.tokens == truth[row][: slot + 1]
    assert answer.committed == ([slot] if slot <= BLOCK else [BLOCK, slot - BLOCK])
    # The bonus of a whole block is the one committed token that was not drafted.
    assert sum(answer.accepted) == slot - (1 if slot >= BLOCK else 0)


def test_any_of_several_end_tokens_ends(world):
    model, shape, prompts, truth = world
    ends = (truth[2][9], truth[2][4])
    engine = Engine(model, ends_of(model), make_drafter(shape), shape)
    assert decode(engine, [prompts[2]], 60, ends).answers[0].tokens == cut(truth[2], ends)


def test_a_prompt_whose_first_token_ends_takes_no_step(world):
    model, shape, prompts, truth = world
    answer = speculate(model, make_drafter(shape), ends_of(model), shape, prompts[0], 60, end_ids=[truth[0][0]])
    assert answer == Decoded([truth[0][0]], [], [])
    assert speculate(model, make_drafter(shape), ends_of(model), shape, prompts[0], 1, end_ids=[]).steps == 0


def test_end_ids_default_to_the_drafters_own(world):
    model, shape, prompts, truth = world
    shape = dataclasses.replace(shape, eos_token_ids=(truth[1][5],))
    answer = speculate(model, make_drafter(shape), ends_of(model), shape, prompts[1], 60)
    assert answer.tokens == cut(truth[1], shape.eos_token_ids)


def test_the_drafter_sees_what_training_showed_it(world):
    """Proposals of the loop's first step equal a forward by hand: features strictly before the anchor, positions from
    the anchor on. Then again after some steps, when the context cache has grown piece by piece."""
    model, shape, prompts, truth = world
    drafter, ends, prompt = make_drafter(shape), ends_of(model), prompts[11]
    seen: list[tuple[int, torch.Tensor]] = []

    class Spy:
        dtype = torch.float32

        def context_kv(self, features, positions):
            return drafter.context_kv(features, positions)

        def blocks(self, block, positions, context, attend):
            hidden = drafter.blocks(block, positions, context, attend)
            seen.append((int(positions[0, 0]), hidden[0]))
            return hidden

    decode(Engine(model, ends, Spy(), shape), [prompt], 12, ())
    whole = [*prompt, *truth[11]]
    for anchor, hidden in seen:
        states = model(torch.tensor([whole[:anchor]]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer + 1] for layer in shape.layer_ids], dim=-1)
        context = drafter.context_kv(features, torch.arange(anchor)[None])
        block = ends.embed(torch.tensor([[whole[anchor], *[MASK] * (BLOCK - 1)]]))

        def everything(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        wanted = drafter.blocks(block, torch.arange(anchor, anchor + BLOCK)[None], context, everything)
        assert torch.allclose(hidden, wanted[0], atol=1e-5)
    assert len(seen) > 3


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt-oss"])
def test_windows_hold_after_going_back(family: str):
    """Long past the sliding window, with drafts rejected all the way and with drafts accepted all the way."""
    model = make_target(family)
    shape = drafter_shape(model, BLOCK)
    prompt = grouped_prompts()[15]
    truth = slow_greedy(model, prompt, 60)
    whole = [[*prompt, *truth]]
    for mistakes in ((), range(0, 200, 4), range(200)):
        engine = Engine(model, one_hot_ends(), Oracle(whole, tuple(mistakes)), shape)
        assert decode(engine, [prompt], 60, ()).answers[0].tokens == truth


def test_sampling_without_a_drafter_is_repeatable(world):
    model, _, prompts, _ = world
    runs = [
        plain(
            model, ends_of(model), prompts[0], 20, Sampling(1.0), generator=torch.Generator().manual_seed(seed)
        ).tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_targets_whose_state_cannot_go_back_are_refused():
    config = Qwen3NextConfig(num_hidden_layers=4).to_dict()
    with pytest.raises(UserError, match="linear_attention"):
        attention_windows(config)
    assert attention_windows(FAMILIES["mistral"].to_dict()) == {"sliding_attention": 12}
    assert attention_windows(FAMILIES["qwen2"].to_dict()) == {"full_attention": 0}
    assert attention_windows(FAMILIES["gemma3"].to_dict()) == {"full_attention": 0, "sliding_attention": 12}


def test_empty_prompts_and_limits_are_refused(world):
    model, *_ = world
    engine = Engine(model, ends_of(model))
    with pytest.raises(UserError, match="without tokens"):
        decode(engine, [[]], 4, ())
    with pytest.raises(UserError, match="limit of 0"):
        decode(engine, [[1]], 0, ())
    assert model.config.vocab_size == VOCABULARY
