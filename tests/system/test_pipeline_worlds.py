"""Eight processes do what one did, with the same numbers: every topology, killed and resumed, and under torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_programs import TOPOLOGIES
from pipeline_world import config_of, half_done, make_world, records, same_numbers

from paceline import config as configuration
from paceline import launch
from paceline.config import LaunchConfig, TopologyConfig

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(autouse=True)
def _programs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run, done by one process: what the others are compared with."""
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        assert launch.run(config_of(folder, "alone")) == 0
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES") if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)
    return folder


def test_one_process_learns_and_evaluates(world: Path) -> None:
    """The reference is worth comparing with: losses fall, and held-out slots are reached."""
    steps = [record for record in records(world / "runs" / "alone") if record["event"] == "step"]
    looks = [record for record in records(world / "runs" / "alone") if record["event"] == "evaluation"]
    assert [record["step"] for record in steps] == list(range(1, 11))
    assert [record["step"] for record in looks] == [0, 5, 10]
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]  # type: ignore[operator]
    assert looks[-1]["walked_steps"] > 10  # type: ignore[operator]


def test_a_resumed_process_gives_the_same_losses_bit_for_bit(world: Path) -> None:
    half_done(world, "resumed")
    assert launch.run(config_of(world, "resumed"), resume=True) == 0
    assert records(world / "runs" / "resumed") == records(world / "runs" / "alone")


def test_every_topology_gives_the_numbers_of_one_process(world: Path) -> None:
    """Five targets and three drafters as eight processes, and the others in the same processes; one resumes."""
    half_done(world, "resumed-2-2")
    config = replace(config_of(world, "several"), launch=LaunchConfig(workers=8, threads=1, collective_seconds=120.0))
    assert launch.run(config, program="pipeline_programs:several") == 0
    for name, (*_, resumes) in TOPOLOGIES.items():
        same_numbers(world, name, first=5 if resumes else 0)


def test_the_automatic_topology_is_measured_and_gives_thesame_numbers(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, "auto")
    config = replace(config, topology=TopologyConfig(kind="auto"), launch=replace(config.launch, workers=2))
    assert launch.run(config) == 0
    table = [line for line in capfd.readouterr().err.splitlines() if "tokens/s" in line or "<- chosen" in line]
    assert len(table) == 2
    rates = json.loads((world / "runs" / "auto" / "rates.json").read_text())
    assert rates["target_seconds"] > 0
    assert rates["drafter_seconds"] > 0
    assert rates["all_reduce_seconds"] > 0
    assert rates["transfer_seconds"] > 0
    same_numbers(world, "auto")


def test_killed_workers_cost_the_steps_since_the_checkpoint_and_no_number(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        config_of(world, "killed"),
        topology=TopologyConfig(kind="split", targets=1, drafters=1),
        launch=LaunchConfig(threads=1, restarts=2, collective_seconds=90.0),
    )
    assert launch.run(config, program="pipeline_programs:killed_twice") == 0
    printed = capfd.readouterr().err
    assert "error: rank 0 (drafter 0): ended by SIGKILL" in printed
    assert "error: rank 1 (target 0): ended by SIGKILL" in printed
    assert printed.count("resuming from step 5") == 2
    same_numbers(world, "killed")


def test_drafters_wait_for_the_targets_feature_cache_however_long(world: Path, tmp_path: Path) -> None:
    """A fill that takes longer than any meeting between steps may: the limits here are below what it takes."""
    base = config_of(world, "cached")
    config = replace(
        base,
        target=replace(base.target, feature_cache="memory"),
        topology=TopologyConfig(kind="split", targets=1, drafters=1),
        launch=LaunchConfig(threads=1, collective_seconds=12.0, stall_seconds=12.0),
    )
    assert launch.run(config, program="pipeline_programs:slow_features") == 0
    same_numbers(world, "cached")


def test_two_torchrun_agents_resume_one_run(world: Path, tmp_path: Path) -> None:
    half_done(world, "nodes")
    config = replace(config_of(world, "nodes"), topology=TopologyConfig(kind="split", targets=1, drafters=1))
    path = tmp_path / "config.toml"
    path.write_text(configuration.dump(config))
    main = tmp_path / "main.py"
    main.write_text(
        "import sys\nfrom paceline import config, launch\nsys.exit(launch.run(config.load(sys.argv[1]), resume=True))\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port),
                *(str(main), str(path)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    printed = [agent.communicate(timeout=200)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert "resuming from step 5" in printed[0]
    same_numbers(world, "nodes", first=5)
