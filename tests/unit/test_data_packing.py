"""Best fit and the sharing out of anchors, against their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.packing import allot, best_fit


@given(st.lists(st.integers(1, 50), max_size=60))
def test_rows_hold_every_item_once_and_never_too_much(lengths: list[int]) -> None:
    rows = best_fit(lengths, 50)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in row) <= 50 for row in rows)


@given(st.lists(st.integers(1, 30), max_size=40))
def test_each_item_goes_to_the_fullest_row_that_takes_it(lengths: list[int]) -> None:
    rows: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        room = [30 - sum(lengths[other] for other in row) for row in rows]
        fitting = [left for left in room if left >= lengths[item]]
        if fitting:
            # Of equally full rows any will do; which, shows in the room that is left only.
            rows[room.index(min(fitting))].append(item)
        else:
            rows.append([item])
    found = best_fit(lengths, 30)
    assert sorted(sum(lengths[i] for i in row) for row in found) == sorted(sum(lengths[i] for i in row) for row in rows)


@pytest.mark.parametrize("lengths", [[0], [51], [3, -1]])
def test_lengths_outside_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        best_fit(lengths, 50)


def test_a_hundred_thousand_rows_fill_well() -> None:
    lengths = [(item * 7919) % 1500 + 20 for item in range(100_000)]
    rows = best_fit(lengths, 4096)
    assert sum(lengths) / (len(rows) * 4096) > 0.99


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(0, 200))
def test_anchors_are_shared_in_proportion(eligible: list[int], places: int) -> None:
    shares = allot(eligible, places)
    total = sum(eligible)
    assert sum(shares) == min(total, places)
    for share, count in zip(shares, eligible, strict=True):
        assert 0 <= share <= count
        if total > places:
            assert abs(share - places * count / total) < 1
