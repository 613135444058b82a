"""Held-out by content: near-duplicates on one side, whatever the order."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.split import choose_held_out, groups, signature, touches

LONG = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle on the shore one winter morning and "
    "has to decide whether to answer it before the spring tides carry the last boat of the season away for good"
)


def grouped(texts: list[str]) -> list[int]:
    return groups(np.stack([signature(text) for text in texts])).tolist()


def test_small_changes_stay_together_and_other_texts_apart() -> None:
    other = "Explain how photosynthesis turns light into chemical energy in plants and why leaves look green to us"
    texts = [LONG, LONG.upper() + "!!", LONG.replace("winter", "cold"), other]
    found = grouped(texts)
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]


def test_short_texts_join_with_their_equals_alone() -> None:
    assert grouped(["hi there", "Hi, there!", "hi you", "", "12 + 3?", "12 + 4?", ""]) == [0, 0, 2, 3, 4, 5, 3]


def test_chance_to_be_joined_follows_similarity() -> None:
    rng = np.random.default_rng(5)
    words = [f"w{i}" for i in range(4000)]

    def joined(changes: int) -> float:
        hits = 0
        for _ in range(60):
            one = rng.choice(words, 120).tolist()
            other = list(one)
            for place in rng.choice(len(one), changes, replace=False):
                other[place] = "x" + other[place]
            hits += grouped([" ".join(one), " ".join(other)])[1] == 0
        return hits / 60

    assert joined(1) > 0.95  # similarity about 0.93
    assert joined(60) < 0.1  # about 0.03


def test_groups_are_connected_components_whatever_the_order() -> None:
    rng = np.random.default_rng(0)
    signatures = rng.integers(0, 40, (60, 8)).astype(np.uint64)
    first = groups(signatures)
    order = rng.permutation(60)
    again = groups(signatures[order])
    same = first[order][:, None] == first[order][None, :]
    assert (same == (again[:, None] == again[None, :])).all()
    for one in range(60):  # brute force: direct neighbours share a group
        for other in range(60):
            if (signatures[one] == signatures[other]).any():
                assert first[one] == first[other]


def test_groups_are_held_out_whole_and_about_the_share_asked_for() -> None:
    rng = np.random.default_rng(1)
    group = np.sort(rng.integers(0, 3000, 6000))
    group = np.searchsorted(group, group)  # the first row of each group names it
    hashes = rng.integers(0, 2**64, 6000, dtype=np.uint64)
    held = choose_held_out(group, hashes, 0.1)
    assert 0.07 < held.mean() < 0.13
    assert (touches(group, held) == held).all()


def test_adding_rows_moves_no_group_across() -> None:
    rng = np.random.default_rng(2)
    hashes = rng.integers(0, 2**64, 4000, dtype=np.uint64)
    part = choose_held_out(np.arange(2000), hashes[:2000], 0.1)
    whole = choose_held_out(np.arange(4000), hashes, 0.1)
    assert (whole[:2000] == part).all()


def test_few_rows_still_hold_one_out_and_large_families_stay_in_training() -> None:
    hashes = np.arange(10, 0, -1).astype(np.uint64) * np.uint64(2**60)
    assert choose_held_out(np.arange(10), hashes, 0.02).sum() == 1
    family = np.zeros(100, np.int64)
    family[90:] = np.arange(90, 100)
    held = choose_held_out(family, np.arange(100).astype(np.uint64), 0.05)
    assert not held[:90].any()
    assert held.any()
    assert not choose_held_out(np.arange(10), hashes, 0.0).any()


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_split(count: int) -> None:
    empty = np.zeros(count, np.int64)
    assert not choose_held_out(empty, empty.astype(np.uint64), 0.1).any()
    assert len(groups(np.zeros((count, 8), np.uint64))) == count
