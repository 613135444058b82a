"""What drafters receive is what targets made: wire forms, and whole splits played by threads of one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batches import EvaluationBatch, TokenBatch
from paceline.pipeline.heartbeat import Heartbeat, read_beats
from paceline.pipeline.process import World
from paceline.pipeline.source import InProcessSource
from paceline.pipeline.split import Link, SplitSource, serve_batches
from paceline.pipeline.topology import Schedule, Topology
from paceline.pipeline.transport import Exchange, InProcessTransport
from paceline.pipeline.wire import Wire
from paceline.pipeline.world import Connection, Groups

TOKENS, LAYERS, HIDDEN = 6, 2, 3
WIRE = Wire(TOKENS, LAYERS, HIDDEN, torch.float32)


def _batch(index: int, weight: float = 1.0) -> TokenBatch:
    ids = torch.arange(TOKENS) + 100 * index
    return TokenBatch(
        index=index,
        ids_S=ids,
        positions_S=torch.arange(TOKENS),
        documents_S=torch.zeros(TOKENS, dtype=torch.int32),
        supervised_S=torch.ones(TOKENS, dtype=torch.bool),
        anchors_A=torch.tensor([0]),
        starts_A=torch.tensor([0]),
        labels_AB=torch.zeros(1, 2, dtype=torch.int64),
        weights_AB=torch.full((1, 2), weight),
    )


class FakeStream:
    def __init__(self, held_out: int) -> None:
        self._held_out = [EvaluationBatch(_batch(-1 - number), torch.tensor([0])) for number in range(held_out)]

    def batch(self, index: int) -> TokenBatch:
        return _batch(index)

    def empty(self, index: int) -> TokenBatch:
        return _batch(index, weight=0.0)

    def evaluation_batches(self) -> list[EvaluationBatch]:
        return self._held_out


class FakeTarget:
    """Features are a plain function of the ids, so that any mix-up of batches or buffers shows."""

    device = torch.device("cpu")
    dtype = torch.float32
    layer_ids = tuple(range(LAYERS))

    class shape:
        hidden_size = HIDDEN

    def features(self, batch: TokenBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        made = expected(batch)
        return made if out is None else out.copy_(made)

    def next_tokens(self, batch: TokenBatch) -> torch.Tensor:
        return batch.ids_S + 7


def expected(batch: TokenBatch) -> torch.Tensor:
    return torch.outer(batch.ids_S.float(), torch.arange(1.0, 1 + LAYERS * HIDDEN))


def _any(value: object) -> Any:
    return value


schedules = st.builds(
    Schedule,
    st.builds(Topology, st.just("split"), st.integers(1, 4), st.integers(1, 4)),
    global_batch=st.integers(1, 7),
    start=st.integers(0, 2),
    stop=st.integers(0, 6),
    evaluate_every=st.integers(0, 3),
    held_out=st.integers(0, 5),
)


def _play(schedule: Schedule, folder: Path) -> list[list[tuple[str, int, float, bool]]]:
    """All ranks as threads; returns what each drafter saw: kind, batch number, weight, whether features were right."""
    exchange = Exchange(seconds=20)
    seen: list[list[tuple[str, int, float, bool]]] = [[] for _ in range(schedule.topology.drafters)]
    faults: list[BaseException] = []

    def work(rank: int) -> None:
        connection = Connection(World(rank=rank, size=schedule.topology.world), None, 20.0)
        beat = Heartbeat(folder, rank, schedule.topology.role(rank).name)
        link = Link(connection, Groups(), schedule, WIRE, InProcessTransport(exchange, rank), beat)
        stream = _any(FakeStream(schedule.held_out))
        try:
            if link.role.drafter is None:
                serve_batches(link, stream, _any(FakeTarget()), tuple(stream.evaluation_batches()))
            else:
                seen[link.role.drafter] = _train(SplitSource(link, stream))
        except BaseException as fault:  # noqa: BLE001 - reported by the test
            faults.append(fault)
        finally:
            beat.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(schedule.topology.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    return seen


def _train(source: Any) -> list[tuple[str, int, float, bool]]:
    """The loop's order of calls, without training."""
    schedule: Schedule = source.schedule
    seen = []
    steps = range(schedule.start, schedule.stop)
    if schedule.evaluates_first:
        seen += _evaluate(source)
    for step in steps:
        for batch in source.global_batch(step):
            weight = float(batch.tokens.weights_AB.sum())
            right = batch.features_SF.equal(expected(batch.tokens) if weight else torch.zeros(TOKENS, LAYERS * HIDDEN))
            seen.append(("train", batch.tokens.index, weight, right))
        if schedule.evaluates_after(step + 1):
            seen += _evaluate(source)
    source.close()
    return seen


def _evaluate(source: Any) -> list[tuple[str, int, float, bool]]:
    return [
        ("held_out", features.tokens.index, 0.0, features.features_SF.equal(expected(batch.tokens)))
        for batch, features in source.evaluation()
    ]


@given(schedules)
@settings(max_examples=40, deadline=None)
def test_a_split_gives_each_drafter_its_batches(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    folder = tmp_path_factory.mktemp("run")
    for drafter, seen in enumerate(_play(schedule, folder)):
        assert all(right for *_, right in seen)
        real = [(kind, index) for kind, index, weight, _ in seen if weight or kind == "held_out"]
        wanted = [
            (item.kind, item.index if item.kind == "train" else -1 - item.index)
            for item in schedule.for_drafter(drafter)
        ]
        assert real == wanted
        steps = max(0, schedule.stop - schedule.start)
        assert sum(kind == "train" for kind, *_ in seen) == steps * schedule.micro_batches
    assert set(read_beats(folder)) == set(range(schedule.topology.world))


@given(schedules)
@settings(max_examples=40, deadline=None)
def test_colocated_drafters_see_what_one_process_sees(schedule: Schedule) -> None:
    world = schedule.topology.drafters
    schedule = Schedule(
        Topology("colocated", world, world),
        schedule.global_batch,
        schedule.start,
        schedule.stop,
        schedule.evaluate_every,
        schedule.held_out,
    )
    everything = []
    for drafter in range(world):
        source = InProcessSource(_any(FakeStream(schedule.held_out)), _any(FakeTarget()), schedule, drafter)
        seen = _train(source)
        assert all(right for *_, right in seen)
        everything += [(kind, index) for kind, index, weight, _ in seen if weight or kind == "held_out"]
    wanted = [(item.kind, item.index if item.kind == "train" else -1 - item.index) for item in schedule.items()]
    assert sorted(everything) == sorted(wanted)


def test_next_tokens_of_one_process() -> None:
    schedule = Schedule(Topology("colocated", 1, 1), 1, 0, 1, 0, held_out=2)
    source = InProcessSource(_any(FakeStream(2)), _any(FakeTarget()), schedule)
    assert [tokens.tolist() for tokens in source.next_tokens()] == [
        (_batch(-1).ids_S + 7).tolist(),
        (_batch(-2).ids_S + 7).tolist(),
    ]
    source.close()


def test_batches_out_of_order_are_refused() -> None:
    schedule = Schedule(Topology("colocated", 1, 1), 1, 0, 3, 0, held_out=0)
    source = InProcessSource(_any(FakeStream(0)), _any(FakeTarget()), schedule)
    list(source.global_batch(0))
    with pytest.raises(AssertionError, match="where the schedule has"):
        list(source.global_batch(2))
    source.close()


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["same", "bfloat16", "float8"]),
    st.integers(0, 1000),
)
@settings(deadline=None)
def test_wire_forms_lose_no_more_than_their_rounding(dtype: torch.dtype, form: Any, seed: int) -> None:
    wire = Wire(5, 3, 16, dtype, form)
    generator = torch.Generator().manual_seed(seed)
    # Layers whose sizes differ by five orders of magnitude, and one token of zeros.
    scale = torch.tensor([1e-2, 1.0, 1e3])[None, :, None]
    values = (torch.randn(5, 3, 16, generator=generator) * scale).to(dtype)
    values[2] = 0
    features = values.view(5, 48)
    buffer = wire.buffer(torch.device("cpu"))
    assert buffer.numel() == wire.bytes
    wire.write(features, buffer)
    back = wire.read(buffer)
    assert back.dtype == dtype
    assert back.shape == features.shape
    if wire.direct:
        assert back.equal(features)
        assert back.data_ptr() == buffer.data_ptr()
        return
    largest = values.float().abs().amax(-1, keepdim=True)
    error = (back.view(5, 3, 16).float() - values.float()).abs()
    # bfloat16 keeps 8 bits of each value; e4m3 keeps 4, and below 2^-6 of its 448 its spacing is constant.
    bound = values.float().abs() * 2**-8 if form == "bfloat16" else (values.float().abs() * 2**-4 + largest * 2**-17)
    assert (error <= bound * 1.05).all()


def test_bytes_of_the_wire() -> None:
    assert Wire(8192, 5, 4096, torch.bfloat16).bytes == 8192 * 5 * 4096 * 2
    assert Wire(8192, 5, 4096, torch.bfloat16, "float8").bytes == 8192 * 5 * (4096 + 4)
    assert Wire(8192, 5, 4096, torch.float32, "bfloat16").bytes == 8192 * 5 * 4096 * 2
