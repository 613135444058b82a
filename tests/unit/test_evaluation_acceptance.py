"""The walk that gives τ, on tables small enough to walk by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.batches import EvaluationBatch, TokenBatch
from paceline.evaluation.acceptance import Walk, agreement_of, exact_tau, summarise


def evaluation_batch(answers: list[tuple[int, int]], block: int, kinds: tuple[str, ...] = ()) -> EvaluationBatch:
    """Answers as (first, last) places of one document after another in a row; every place but the last an anchor."""
    tokens = max(last for _, last in answers) + 1
    anchors = [place for first, last in answers for place in range(first, last)]
    numbers = [number for number, (first, last) in enumerate(answers) for _ in range(first, last)]
    count = len(anchors) + 2
    padded = torch.tensor([*anchors, 0, 0])
    row = TokenBatch(
        index=0,
        ids_S=torch.arange(tokens),
        positions_S=torch.arange(tokens),
        documents_S=torch.zeros(tokens, dtype=torch.int32),
        supervised_S=torch.ones(tokens, dtype=torch.bool),
        anchors_A=padded,
        starts_A=torch.zeros(count, dtype=torch.long),
        labels_AB=torch.zeros(count, block, dtype=torch.long),
        weights_AB=torch.ones(count, block),
    )
    return EvaluationBatch(row, torch.tensor([*numbers, -1, -1]), kinds)


def rights(runs: list[int], block: int) -> Tensor:
    table = torch.zeros(len(runs) + 2, block, dtype=torch.bool)
    for row, run in enumerate(runs):
        table[row, 1 : run + 1] = True
    return table


def test_walk_by_hand():
    # Places 4 … 12: anchors 4 … 11. Runs of right slots:      4  5  6  7  8  9 10 11
    batch, accepts = evaluation_batch([(4, 12)], 4), rights([2, 0, 3, 1, 0, 3, 0, 0], 4)
    found = exact_tau([accepts], [batch])
    # 4 accepts 2 and takes a bonus (-> 7); 7 accepts 1 (-> 9); 9 accepts 3, the last being the answer's end (-> 12).
    assert found.steps == 3
    assert found.committed == 8
    assert found.tau_micro == 8 / 3
    assert found.accepted_only == 6 / 3
    assert found.by_slot == (1.0, 2 / 3, 1 / 3)


def test_right_slots_beyond_the_end_do_not_count():
    found = exact_tau([rights([3, 3, 3], 4)], [evaluation_batch([(0, 3)], 4)])
    assert (found.steps, found.committed, found.accepted_only) == (1, 3, 3.0)
    found = exact_tau([rights([3, 3], 4)], [evaluation_batch([(0, 2)], 4)])
    assert (found.steps, found.committed, found.accepted_only) == (1, 2, 2.0)


def test_a_gap_in_the_slots_ends_the_run():
    accepts = torch.zeros(6, 4, dtype=torch.bool)
    accepts[0, 1] = accepts[0, 3] = True
    found = exact_tau([accepts], [evaluation_batch([(0, 4)], 4)])
    assert found.steps == 3  # 0 -> 2 -> 3 -> 4


def test_answers_spread_over_batches_are_put_together():
    whole, accepts = evaluation_batch([(4, 12)], 4), rights([2, 0, 3, 1, 0, 3, 0, 0], 4)
    first = EvaluationBatch(whole.tokens, whole.answer_A.clone())
    second = EvaluationBatch(whole.tokens, whole.answer_A.clone())
    first.answer_A[3:] = -1
    second.answer_A[:3] = -1
    assert exact_tau([accepts, accepts], [first, second]) == exact_tau([accepts], [whole])


def test_an_answer_without_all_its_anchors_is_refused():
    batch = evaluation_batch([(0, 5)], 4)
    batch.answer_A[2] = -1
    with pytest.raises(ValueError, match="lacks anchors"):
        exact_tau([rights([0] * 5, 4)], [batch])


def test_walks_end_before_the_first_disagreement():
    batch, accepts = evaluation_batch([(0, 8)], 4), rights([3, 3, 3, 3, 3, 3, 3, 3], 4)
    agreement = torch.ones(9, dtype=torch.bool)
    agreement[6] = False
    found = exact_tau([accepts], [batch], [agreement])
    # As if the answer ended at place 5: 0 -> 4 -> 5.
    assert (found.steps, found.committed) == (2, 5)
    assert found.agreement == 7 / 8


def test_disagreement_at_the_first_token_after_the_prefill_leaves_nothing():
    batch = evaluation_batch([(0, 4)], 4)
    agreement = torch.tensor([True, False, True, True, True])
    found = exact_tau([rights([0] * 4, 4)], [batch], [agreement])
    assert found.steps == 0
    assert math.isnan(found.tau_micro)


def test_agreement_compares_each_token_with_the_choice_before_it():
    row = evaluation_batch([(0, 4)], 4).tokens
    choices = torch.tensor([1, 2, 0, 4, 9])  # ids are 0 1 2 3 4: the choice at place 2 is not 3
    assert agreement_of(choices, row).tolist() == [True, True, True, False, True]


def test_micro_macro_and_kinds():
    found = summarise([Walk((4, 4), (3, 3), "code"), Walk((1, 1, 1, 1), (0,) * 4, "prose")], 4)
    assert found.tau_micro == 12 / 6
    assert found.tau_macro == (4 + 1) / 2
    assert found.by_kind["code"].tau == 4
    assert found.by_kind["prose"].tau == 1
    assert found.low < found.tau_micro < found.high


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        walks = []
        for length in torch.randint(3, 20, (40,), generator=generator).tolist():
            steps = torch.randint(1, 6, (length,), generator=generator).tolist()
            walks.append(Walk(tuple(steps), tuple(step - 1 for step in steps)))
        found = summarise(walks, 8)
        covered += found.low <= 3.0 <= found.high
    assert 0.91 < covered / 400 < 0.98


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=40), st.integers(2, 8))
def test_walk_commits_every_token_once(runs: list[int], block: int):
    runs = [min(run, block - 1) for run in runs]
    found = exact_tau([rights(runs, block)], [evaluation_batch([(0, len(runs))], block)])
    assert found.committed == len(runs)
    assert 1 <= found.tau_micro <= block
    assert math.isclose(sum(found.by_slot), found.accepted_only)
