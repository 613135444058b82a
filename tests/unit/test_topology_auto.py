"""The choice of a topology: arithmetic that can be checked by hand, and against a simulated pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UserError
from paceline.pipeline.auto import Rates, choose, predict
from paceline.pipeline.topology import Schedule, Topology

RATES = Rates(
    target_seconds=0.2,
    drafter_seconds=0.3,
    optimizer_seconds=0.0,
    colocated_seconds=0.5,
    all_reduce_seconds=0.0,
    transfer_seconds=0.0,
    target_bytes=60,
    drafter_bytes=40,
    colocated_bytes=100,
    device_bytes=120,
)


def test_colocated_wins_where_it_fits() -> None:
    choice = choose(8, RATES, 840)
    assert str(choice.best.topology) == "colocated × 8"
    assert choice.best.batches_per_second == pytest.approx(8 / 0.5, rel=1e-3)


def test_a_split_wins_where_both_parts_do_not_fit_or_get_in_each_others_way() -> None:
    small = choose(8, replace(RATES, device_bytes=80), 840)
    # min(T/0.2, D/0.3) over T + D = 8 is largest at 3 + 5.
    assert (small.best.topology.targets, small.best.topology.drafters) == (3, 5)
    assert small.best.batches_per_second == pytest.approx(15, rel=1e-2)
    assert small.best.limit == "targets"
    assert "does not fit: 0.0 GiB short" in small.render(8192)
    disturbed = choose(8, replace(RATES, colocated_seconds=0.62), 840)
    assert disturbed.best.topology.kind == "split"


def test_nothing_fits() -> None:
    with pytest.raises(UserError, match=r"no topology fits: .* is 2\.0 GiB short"):
        choose(4, replace(RATES, target_bytes=3 * 2**30, colocated_bytes=4 * 2**30, device_bytes=2**30), 4)
    with pytest.raises(UserError, match="too few"):
        choose(4, RATES, 4, tensor_parallel=4)


def test_a_shared_optimiser_state_fits_where_a_whole_one_does_not() -> None:
    """60 of 100 bytes can be shared: a rank of D keeps 40 + 60/D."""
    rates = replace(RATES, optimizer_bytes=60, device_bytes=60)
    assert predict(Topology("colocated", 3, 3), rates, 3).short_bytes == 40
    assert predict(Topology("colocated", 3, 3), rates, 3, "auto").short_bytes == 0
    assert predict(Topology("colocated", 2, 2), rates, 2, "on").short_bytes == 10
    assert predict(Topology("colocated", 1, 1), rates, 1, "on").short_bytes == 40
    assert choose(8, rates, 840).best.topology.kind == "split"
    assert choose(8, rates, 840, sharding="auto").best.topology.kind == "colocated"


def test_a_global_batch_that_does_not_come_out_even_costs_a_whole_batch() -> None:
    even = predict(Topology("split", 9, 3), RATES, 6)
    uneven = predict(Topology("split", 9, 3), RATES, 7)
    assert even.step_seconds == pytest.approx(0.6)
    assert uneven.step_seconds == pytest.approx(0.9)


def test_the_table_names_the_choice() -> None:
    lines = choose(3, RATES, 6).render(1000).splitlines()
    assert len(lines) == 4
    assert [("<- chosen" in line) for line in lines] == [False, True, False, False]


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 60]),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_the_steady_state_is_that_of_a_pipeline_played_event_by_event(
    targets: int, drafters: int, global_batch: int, target_seconds: float, drafter_seconds: float
) -> None:
    """An event simulation with unlimited buffers; bounded ones only matter where parts take turns being slow."""
    topology = Topology("split", targets, drafters)
    steps = 480
    schedule = Schedule(topology, global_batch, 0, steps)
    made = [0.0] * targets
    free = [0.0] * drafters
    at = []
    for step in range(steps):
        for item in schedule.step_items(step):
            maker, user = schedule.maker(item), schedule.user(item)
            made[maker] += target_seconds
            free[user] = max(free[user], made[maker]) + drafter_seconds
        free = [max(free)] * drafters
        at.append(free[0])
    # A whole number of every target's and every drafter's turns: 240 is a multiple of 1 … 5.
    window = 240
    played = (at[-1] - at[-1 - window]) / window
    rates = replace(RATES, target_seconds=target_seconds, drafter_seconds=drafter_seconds)
    predicted = predict(topology, rates, global_batch).step_seconds
    assert played >= predicted * 0.99
    # Where batches come out even in each step, the prediction is what happens; elsewhere parts take turns waiting.
    if global_batch % targets == 0 and global_batch % drafters == 0:
        assert played <= predicted * 1.02
