"""The launcher's judgements, without processes: whose failure, who holds the others up, which cores and GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import Config, LaunchConfig, TargetConfig, TopologyConfig
from paceline.errors import UserError
from paceline.launch.failures import Failure, ended_by, failure_of, first_of, read_failures, write_failure
from paceline.launch.places import choose_device, cores_of, visible_gpus, workers_wanted
from paceline.launch.watch import STARTING_SECONDS, Limits, stalled
from paceline.launch.worker import Order
from paceline.pipeline.heartbeat import WAIT_FOR_FEATURES, Beat, Heartbeat, read_beats, say_last
from paceline.pipeline.process import World
from paceline.pipeline.world import LostPeer

LIMITS = Limits(stall=10.0, warm_up=1000.0)


def _beat(rank: int, said: float, waits_for: str | None = None, alive: float = 100.0, phase: str = "train") -> Beat:
    return Beat(rank, f"role {rank}", 1000 + rank, "here", 7, phase, waits_for, None, said, alive)


def test_nobody_is_stalled_while_everybody_talks() -> None:
    assert stalled([_beat(0, 95), _beat(1, 99, "rank 0")], LIMITS, 100) is None
    assert stalled([], LIMITS, 100) is None


def test_the_one_that_is_waited_for_is_named_and_not_those_that_wait() -> None:
    beats = [_beat(0, 80, "rank 1"), _beat(1, 85), _beat(2, 82, "rank 1")]
    assert stalled(beats, LIMITS, 100) == beats[1]


def test_a_process_that_does_not_run_comes_first() -> None:
    """A stopped drafter: the target, which works by itself, fell silent earlier, but runs."""
    beats = [_beat(0, 88, "features", alive=88), _beat(1, 85)]
    assert stalled(beats, LIMITS, 100) == beats[0]


def test_where_all_wait_the_first_to_fall_silent_is_named() -> None:
    beats = [_beat(0, 88, "rank 1"), _beat(1, 85, "rank 0")]
    assert stalled(beats, LIMITS, 100) == beats[1]


def test_waiting_for_the_feature_cache_has_no_limit_and_making_it_has() -> None:
    waiting = _beat(0, -1e6, "the other workers' features", phase=WAIT_FOR_FEATURES)
    assert stalled([waiting, _beat(1, 95, phase="features of the data")], LIMITS, 100) is None
    hung = _beat(1, 85, phase="features of the data")
    assert stalled([waiting, hung], LIMITS, 100) == hung


def test_starting_and_warming_up_may_take_longer() -> None:
    assert stalled([_beat(0, 50, phase="warm-up of training step")], LIMITS, 100) is None
    assert stalled([_beat(0, 50, phase="start")], LIMITS, 100) is None
    late = _beat(0, 100 - STARTING_SECONDS - 1, phase="start")
    assert stalled([late], LIMITS, 100) == late


def test_the_first_failure_that_is_no_consequence_wins() -> None:
    lost = Failure(0, "drafter 0", 1.0, "lost rank 2", consequence=True)
    later = Failure(2, "target 0", 1.2, "ended by SIGKILL")
    last = Failure(3, "target 1", 1.3, "ended by SIGSEGV")
    assert first_of([last, lost, later]) == later
    assert first_of([lost, replace(lost, rank=1, time=0.5)]).rank == 1


def test_failures_are_told_apart_by_their_errors() -> None:
    import torch.distributed as dist

    fault = failure_of(UserError("what", "hint"), 0, "r")
    assert (fault.what, fault.remedy, fault.user, fault.consequence) == ("what", "hint", True, False)
    assert failure_of(LostPeer("gone"), 0, "r").consequence
    assert not failure_of(LostPeer("gone"), 0, "r").user
    assert failure_of(dist.DistNetworkError("reset"), 0, "r").consequence
    assert failure_of(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), 0, "r").consequence
    assert not failure_of(RuntimeError("shape mismatch"), 0, "r").consequence


def test_failures_survive_the_disk(tmp_path: Path) -> None:
    failure = Failure(3, "target 1", 12.5, "what\nand more", "hint", user=True)
    write_failure(tmp_path, failure)
    assert read_failures(tmp_path) == [failure]


def test_ends_in_words() -> None:
    assert ended_by(-9).startswith("ended by SIGKILL: it was killed")
    assert ended_by(-11).startswith("ended by SIGSEGV")
    assert ended_by(3) == "ended with exit code 3 and no word"


@given(st.integers(1, 64), st.integers(1, 16))
def test_cores_are_shared_evenly_and_completely(count: int, workers: int) -> None:
    cores = list(range(3, 3 + count))
    shares = [cores_of(cores, rank, workers) for rank in range(workers)]
    if count < workers:
        assert all(share == cores for share in shares)
    else:
        assert [core for share in shares for core in share] == cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gpus_are_those_that_the_environment_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, names in (("", []), ("-1", []), ("2", ["2"]), ("GPU-1a, 3", ["GPU-1a", "3"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_gpus() == names
    assert choose_device(["GPU-1a", "3"], 1) == "cuda:0"
    assert visible_gpus() == ["3"]
    assert choose_device([], 5) == "cpu"
    with pytest.raises(UserError, match="local rank 2 has no GPU"):
        choose_device(["0", "1"], 2)


def test_workers_follow_the_topology() -> None:
    split = TopologyConfig(kind="split", targets=2, drafters=3)
    assert workers_wanted(Config(), []) == 1
    assert workers_wanted(Config(), ["0", "1"]) == 2
    assert workers_wanted(Config(topology=split), []) == 5
    assert workers_wanted(Config(topology=split, target=TargetConfig(tensor_parallel=2)), ["0"] * 8) == 7
    assert workers_wanted(Config(launch=LaunchConfig(workers=3)), ["0"] * 8) == 3
    with pytest.raises(UserError, match="5 workers are wanted"):
        workers_wanted(Config(topology=split), ["0", "1"])


def test_orders_travel_as_text() -> None:
    order = Order("a b.toml", "runs/ü", "m:f", True, 2, 77)
    assert Order.load(order.dump()) == order


def test_the_place_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.delenv("PACELINE_ATTEMPT", raising=False)
    world = World.from_environment("cpu")
    assert (world.rank, world.size, world.local_rank, world.nodes, world.attempt) == (9, 16, 1, 2, 2)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(UserError, match="WORLD_SIZE = 'many'"):
        World.from_environment("cpu")


def test_heartbeats_say_what_a_worker_does_and_waits_for(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, 4, "drafter 1")
    beat.beat("receive", 12, waits_for="features of batch 36 from rank 7", batch=36)
    status = beat.status()
    assert (status.role, status.step, status.waits_for, status.batch) == (
        "drafter 1",
        12,
        "features of batch 36 from rank 7",
        36,
    )
    beat.close()
    (tmp_path / "heartbeat" / "rank-5.json").write_text('{"rank": 5')
    found = read_beats(tmp_path)
    assert list(found) == [4]
    assert (found[4].phase, found[4].step, found[4].waits_for) == ("receive", 12, status.waits_for)
    written = json.loads((tmp_path / "heartbeat" / "rank-4.json").read_text())
    assert written.keys() == asdict(found[4]).keys()


def test_a_worker_knows_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("paceline.pipeline.heartbeat.time.time", lambda: now[0])
    beat = Heartbeat(tmp_path, 0, "worker", {"imports": 4.0})
    for phase, seconds in (("load", 3.0), ("warm-up", 20.0), ("load", 1.0), ("train", 0.5)):
        beat.beat(phase, 0)
        beat.beat(phase, 1)
        now[0] += seconds
    assert beat.spent() == {"imports": 4.0, "start": 0.0, "load": 4.0, "warm-up": 20.0, "train": 0.5}
    beat.close()


def test_a_good_end_keeps_role_and_last_step(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, 0, "drafter 0")
    beat.beat("save", 12)
    beat.close()
    say_last(tmp_path, 0, "end")
    (found,) = read_beats(tmp_path).values()
    assert (found.phase, found.step, found.role) == ("end", 12, "drafter 0")
