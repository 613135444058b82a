"""Batches against a slow oracle written from the rules: anchors, labels, weights, packing, evaluation, purity."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batches import BatchShape, TokenBatch
from paceline.data.documents import Documents
from paceline.data.stream import Stream, batch_bytes, eligible_counts, supervised_counts
from paceline.errors import UserError

SHAPE = BatchShape(tokens=48, anchors=12, block_size=5, gamma=2.5)

masks = st.lists(st.booleans(), min_size=1, max_size=60)


def documents_of(mask_lists: list[list[bool]]) -> Documents:
    """Every token of every document has an id of its own, so that a label says where it came from."""
    ids = iter(range(1, 100_000))
    return Documents.of([([next(ids) for _ in mask], mask) for mask in mask_lists])


def random_documents(count: int = 80, seed: int = 3, longest: int = 60) -> Documents:
    rng = np.random.default_rng(seed)
    lists = []
    for _ in range(count):
        length = int(rng.integers(1, longest))
        lists.append(np.repeat(rng.random(length) < 0.6, rng.integers(1, 4, length))[:length].tolist())
    return documents_of(lists)


def eligible_of(mask: list[bool], limit: int) -> set[int]:
    kept = mask[:limit]
    return {place for place in range(len(kept) - 1) if kept[place] and kept[place + 1]}


def check_batch(batch: TokenBatch, source: Documents, shape: BatchShape) -> list[tuple[int, int]]:
    """Check a batch token by token; give back (document, position) of its anchors."""
    S, A, B = shape.tokens, shape.anchors, shape.block_size
    row = []
    for number, named in enumerate(batch.documents):
        document = named if named >= 0 else -1 - named  # held-out documents are numbered -1, -2, …
        ids, mask = source.document(document)
        row += [(int(t), p, number, bool(m), document) for p, (t, m) in enumerate(zip(ids[:S], mask[:S], strict=True))]
        assert batch.bounds[number + 1] == len(row)
    assert batch.bounds[0] == 0
    assert len(row) <= S
    padded = row + [(0, 0, -1, False, -1)] * (S - len(row))
    assert batch.ids_S.tolist() == [item[0] for item in padded]
    assert batch.positions_S.tolist() == [item[1] for item in padded]
    assert batch.documents_S.tolist() == [item[2] for item in padded]
    assert batch.supervised_S.tolist() == [item[3] for item in padded]
    drawn = []
    for n in range(A):
        anchor, start = int(batch.anchors_A[n]), int(batch.starts_A[n])
        labels, weights = batch.labels_AB[n].tolist(), batch.weights_AB[n].tolist()
        if not any(weights):
            assert (anchor, start, any(labels)) == (0, 0, False)
            continue
        assert len(drawn) == n, "padding blocks come last"
        _, position, _, _, document = padded[anchor]
        assert start == anchor - position
        alive = True
        assert weights[0] == 0.0
        for slot in range(B):
            place = anchor + slot
            same = place < len(row) and row[place][4] == document and row[place][2] == row[anchor][2]
            alive = alive and same and row[place][3]
            assert labels[slot] == (row[place][0] if same else 0)
            if slot:
                expected = math.exp(-(slot - 1) / shape.gamma) if alive else 0.0
                assert weights[slot] == pytest.approx(expected, rel=1e-6, abs=0)
        drawn.append((document, position))
    anchors = batch.anchors_A[: len(drawn)].tolist()
    assert anchors == sorted(set(anchors))
    return drawn


@given(st.lists(masks, min_size=1, max_size=8), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_batches_follow_the_rules(lists: list[list[bool]], seed: int) -> None:
    documents = documents_of(lists)
    usable = {item for item, mask in enumerate(lists) if eligible_of(mask, SHAPE.tokens)}
    if not usable:
        with pytest.raises(UserError, match="two supervised tokens"):
            Stream(documents, SHAPE, seed)
        return
    stream = Stream(documents, SHAPE, seed)
    seen: list[int] = []
    for index in range(stream.batches_per_epoch):
        batch = stream.batch(index)
        drawn = check_batch(batch, documents, SHAPE)
        seen += batch.documents
        possible = [(d, p) for d in batch.documents for p in sorted(eligible_of(lists[d], SHAPE.tokens))]
        assert set(drawn) <= set(possible)
        assert len(drawn) == min(SHAPE.anchors, len(possible))
    assert sorted(seen) == sorted(usable)


def test_every_eligible_position_is_drawn_in_time_and_epochs_differ() -> None:
    documents = documents_of([[False] * 4 + [True] * 40])
    stream = Stream(documents, SHAPE, 11)
    drawn = [check_batch(stream.batch(epoch), documents, SHAPE) for epoch in range(40)]
    assert {position for epoch in drawn for _, position in epoch} == set(range(4, 43))
    assert len({tuple(epoch) for epoch in drawn}) == 40


@pytest.mark.parametrize(("length", "labels"), [(1, 0), (2, 1), (3, 2)])
def test_short_answers_have_one_label_less_than_tokens(length: int, labels: int) -> None:
    lists = [[False, False] + [True] * length + [False], [False, True, True, True]]
    documents = documents_of(lists)
    stream = Stream(documents, SHAPE, 0)
    (batch,) = (stream.batch(index) for index in range(stream.batches_per_epoch))
    own = set(documents.document(0)[0].tolist())
    labelled = {int(t) for t in batch.labels_AB[batch.weights_AB > 0].tolist()} & own
    assert len(labelled) == labels


@given(st.lists(masks, min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_labels_over_many_draws_are_all_supervised_tokens_but_each_answers_first(lists: list[list[bool]]) -> None:
    documents = documents_of(lists)
    expected = set()
    for item, mask in enumerate(lists):
        ids = documents.document(item)[0]
        expected |= {int(ids[p + 1]) for p in eligible_of(mask, SHAPE.tokens)}
    if not expected:
        return
    wide = BatchShape(SHAPE.tokens, SHAPE.tokens, SHAPE.block_size, SHAPE.gamma)
    stream = Stream(documents, wide, 5)
    found = set()
    for index in range(stream.batches_per_epoch):
        batch = stream.batch(index)
        found |= set(batch.labels_AB[batch.weights_AB > 0].tolist())
    assert found == expected


def test_a_block_never_labels_the_next_answer_or_document() -> None:
    # answer, two-token user turn, answer; then a wholly supervised document right behind.
    lists = [[True] * 3 + [False] * 2 + [True] * 3, [True] * 10]
    documents = documents_of(lists)
    stream = Stream(documents, BatchShape(32, 32, 8, 4.0), 0)
    batch = stream.batch(0)
    check_batch(batch, documents, BatchShape(32, 32, 8, 4.0))
    first = documents.document(0)[0].tolist()
    row = next(n for n in range(32) if int(batch.labels_AB[n, 0]) == first[0])
    counted = batch.labels_AB[row][batch.weights_AB[row] > 0].tolist()
    assert counted == first[1:3]


def test_anchors_are_shared_in_proportion_within_a_row() -> None:
    lists = [[True] * 21, [True] * 11]
    documents = documents_of(lists)
    shape = BatchShape(32, 15, 4, 4.0)
    drawn = check_batch(Stream(documents, shape, 1).batch(0), documents, shape)
    assert [sum(d == item for d, _ in drawn) for item in (0, 1)] == [10, 5]


def test_a_batch_depends_on_its_index_alone() -> None:
    documents = random_documents()
    reference = [batch_bytes(Stream(documents, SHAPE, 9).batch(index)) for index in range(70)]
    for workers in (1, 3, 8):
        stream = Stream(documents, SHAPE, 9)
        for rank in reversed(range(workers)):  # each worker asks for its own share, in any order
            for index in range(rank, 70, workers):
                assert batch_bytes(stream.batch(index)) == reference[index]
    stream = Stream(documents, SHAPE, 9)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: batch_bytes(stream.batch(index)), range(70)))
    assert found == reference
    resumed = Stream(documents, SHAPE, 9)
    assert [batch_bytes(resumed.batch(index)) for index in range(40, 70)] == reference[40:]


def test_the_recorded_digest_on_any_machine() -> None:
    """Changes only with the mathematics of packing, drawing or weighing: then say so and record it anew."""
    ids = [[(document * 31 + place * 7) % 997 + 1 for place in range(5 + document * 11 % 40)] for document in range(50)]
    lists = [(row, [place >= len(row) // 3 and place % 13 != 5 for place in range(len(row))]) for row in ids]
    stream = Stream(Documents.of(lists), BatchShape(64, 16, 8, 4.0), 20260206)
    assert stream.digest(2 * stream.batches_per_epoch) == RECORDED


RECORDED = "802a2625ffcafd4df5158cb93c19b68269717e2a854c439a5480f88dd7e63ee0"


def test_seeds_and_epochs_permute_rows() -> None:
    documents = random_documents()
    one, two = Stream(documents, SHAPE, 1), Stream(documents, SHAPE, 2)
    n = one.batches_per_epoch
    orders = [[stream.batch(e * n + i).documents for i in range(n)] for stream in (one, two) for e in range(2)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({tuple(sorted(order)) for order in orders}) == 1
    with pytest.raises(ValueError, match="negative"):
        one.batch(-1)


def test_empty_batches_have_the_shape_and_no_weight() -> None:
    documents = random_documents()
    stream = Stream(documents, SHAPE, 1)
    empty, full = stream.empty(3), stream.batch(3)
    assert check_batch(empty, documents, SHAPE) == []
    assert empty.index == 3
    for name in (
        "ids_S",
        "positions_S",
        "documents_S",
        "supervised_S",
        "anchors_A",
        "starts_A",
        "labels_AB",
        "weights_AB",
    ):
        one, other = empty.__dict__[name], full.__dict__[name]
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_repeated_documents_are_placed_as_often_with_other_anchors() -> None:
    given = documents_of([[True] * 40, [True] * 5])
    documents = Documents(**{**given.__dict__, "repeats": np.asarray([3, 0], np.uint16)})
    stream = Stream(documents, SHAPE, 1)
    batches = [stream.batch(index) for index in range(stream.batches_per_epoch)]
    assert [batch.documents for batch in batches] == [(0,)] * 3
    assert len({tuple(batch.anchors_A.tolist()) for batch in batches}) == 3


def test_packing_says_what_batches_hold() -> None:
    documents = random_documents()
    stream = Stream(documents, SHAPE, 4)
    batches = [stream.batch(index) for index in range(stream.batches_per_epoch)]
    packing = stream.packing()
    assert packing.rows == len(batches)
    assert packing.documents == sum(len(batch.documents) for batch in batches)
    assert packing.fill == pytest.approx(sum(int((b.documents_S >= 0).sum()) for b in batches) / (len(batches) * 48))
    assert packing.supervised == sum(int(b.supervised_S.sum()) for b in batches)
    assert packing.anchors == sum(int(b.weights_AB.any(1).sum()) for b in batches)
    assert packing.unused + packing.documents == len(documents)
    assert packing.cut == int((documents.lengths > 48).sum())
    first = batches[:32]
    used = sum(int((b.weights_AB > 0).sum()) for b in first)
    assert packing.padded_slots == pytest.approx(1 - used / (len(first) * 12 * 4))


@given(st.lists(masks, max_size=12), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_counts_of_documents_cut_to_a_limit(lists: list[list[bool]], limit: int) -> None:
    documents = documents_of(lists)
    assert eligible_counts(documents, limit).tolist() == [len(eligible_of(mask, limit)) for mask in lists]
    assert supervised_counts(documents, limit).tolist() == [sum(mask[:limit]) for mask in lists]


# -- evaluation


def answers_of(mask: list[bool], limit: int) -> list[list[int]]:
    runs: list[list[int]] = []
    for place, on in enumerate(mask[:limit]):
        if on and place and mask[place - 1] and runs:
            runs[-1].append(place)
        elif on:
            runs.append([place])
    return [run[:-1] for run in runs if len(run) > 1]


@given(st.lists(masks, min_size=1, max_size=10), st.integers(1, 120), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_evaluation_takes_whole_answers_with_every_position(lists: list[list[bool]], bound: int, anchors: int) -> None:
    held = documents_of(lists)
    shape = BatchShape(48, anchors, 5, 2.5)
    stream = Stream(documents_of([[True] * 5]), shape, 0, held_out=held, evaluation_anchors=bound)
    found: dict[int, list[tuple[int, int]]] = {}
    batches = stream.evaluation_batches()
    for index, batch in enumerate(batches):
        assert batch.tokens.index == index
        drawn = check_batch(batch.tokens, held, shape)
        numbers = batch.answer_A.tolist()
        assert numbers[len(drawn) :] == [-1] * (anchors - len(drawn))
        for number, place in zip(numbers, drawn, strict=False):
            found.setdefault(number, []).append(place)
    wanted = [[(item, place) for place in answer] for item, mask in enumerate(lists) for answer in answers_of(mask, 48)]
    chosen = [found[number] for number in sorted(found)]
    assert sorted(found) == list(range(len(found)))
    total = sum(map(len, chosen))
    if not wanted:
        assert chosen == []
    elif len(chosen) == 1 and total > bound:
        assert total == min(map(len, wanted[: wanted.index(chosen[0]) + 1]))
    else:
        assert chosen == wanted[: len(chosen)]  # in hash order, which is document order here
        assert total <= bound
        if len(chosen) < len(wanted):
            assert total + len(wanted[len(chosen)]) > bound


def test_evaluation_is_the_same_for_any_seed_and_carries_kinds() -> None:
    lists = [[False, True, True, True], [False, True, True]]
    given = Documents.of([(range(1, len(mask) + 1), mask) for mask in lists], kinds=["code", "list"])
    train = documents_of([[True] * 5])
    one, two = (Stream(train, SHAPE, seed, held_out=given).evaluation_batches() for seed in (1, 2))
    assert [batch_bytes(a.tokens) for a in one] == [batch_bytes(b.tokens) for b in two]
    assert one[0].kinds == ("code", "list")
    assert one[0].answer_A.tolist()[:4] == [0, 0, 1, -1]
    assert Stream(train, SHAPE, 1).evaluation_batches() == []
    assert Stream(train, SHAPE, 1, held_out=train).evaluation_batches()[0].kinds == ()


def test_a_steep_gamma_takes_no_label_away() -> None:
    """A weight that underflows to 0 would say that the slot has no label, and end every walk of an evaluation there."""
    document = documents_of([[True] * 8])
    steep = Stream(document, BatchShape(8, 1, 8, gamma=0.01), 0, held_out=document)
    plain = Stream(document, BatchShape(8, 1, 8, gamma=4.0), 0, held_out=document)
    for found, expected in (
        (steep.batch(0), plain.batch(0)),
        (steep.evaluation_batches()[0].tokens, plain.evaluation_batches()[0].tokens),
    ):
        assert torch.equal(found.weights_AB > 0, expected.weights_AB > 0)
        assert float(found.weights_AB[0, 2:].max()) < 1e-30


def test_moving_a_batch_keeps_its_facts() -> None:
    batch = Stream(random_documents(), SHAPE, 1).batch(0)
    moved = batch.to(torch.device("cpu"))
    assert moved.documents == batch.documents
    assert batch_bytes(moved) == batch_bytes(batch)
