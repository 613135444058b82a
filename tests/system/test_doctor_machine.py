"""The doctor on this machine: the probe whole, the races that this torch has, a compilation that cannot work."""

from __future__ import annotations

import json
import os

import pytest

from paceline.doctor import trials
from paceline.doctor.command import DoctorOptions, run_doctor
from paceline.doctor.findings import Level
from paceline.doctor.travel import luggage


def test_the_whole_report_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    code = run_doctor(DoctorOptions(json=True))
    text = capsys.readouterr().out
    body = json.loads(text)
    assert code == {"ok": 0, "info": 0, "warning": 1, "error": 2}[body["worst"]]
    assert "hunter2" not in text
    subjects = {finding["subject"] for finding in body["findings"]}
    assert {"python", "versions", "GPUs", "FX tracing", "settings", "compile cache", "host"} <= subjects
    machine = body["facts"]["machine"]
    import torch

    assert machine["torch"]["version"] == torch.__version__
    assert "TORCHINDUCTOR_CACHE_DIR" not in machine["environment"], "taken before Inductor wrote into it"
    holds = machine["torch"]["dynamo"]["holds_in_threads"]
    assert holds == (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)), (
        "settings are per thread from 2.12 on"
    )


def test_the_races_that_this_torch_has() -> None:
    """Up to 2.13 the flag is the process's: each of the four reproductions hits, every time."""
    facts = luggage.run_child("race_check", {}, 120, {**os.environ, "OMP_NUM_THREADS": "1"})
    import torch.fx._symbolic_trace as installed

    per_thread = "_get_is_fx_tracing" in vars(installed)
    assert {name: seen.get("hit") for name, seen in facts["hazards"].items()} == {
        "call during a trace": not per_thread,
        "overlapping traces": not per_thread,
        "trace over an eager operator": not per_thread,
        "fork during a trace": not per_thread,
    }
    levels = {finding.level for finding in trials.race_findings(facts)}
    assert (Level.WARNING in levels) == (not per_thread)


def test_a_compilation_that_does_not_end_is_ended_and_said() -> None:
    facts = luggage.run_child("compile_check", {"timeout": 0.3}, 60)
    assert facts == {"cold": {"fault": "timed out"}, "warm": {"fault": "timed out"}}
    assert [finding.level for finding in trials.compile_findings(facts)] == [Level.ERROR, Level.ERROR]


@pytest.mark.skipif("PACELINE_SLOW_TESTS" not in os.environ, reason="compiles for a minute; PACELINE_SLOW_TESTS=1")
def test_the_compile_check_is_cold_and_then_warm() -> None:
    facts = luggage.run_child("compile_check", {"timeout": 200}, 400)
    assert [finding.level for finding in trials.compile_findings(facts)] == [Level.OK, Level.OK]
    assert (facts["cold"]["hits"], facts["cold"]["misses"]) == (0, 1)
    assert (facts["warm"]["hits"], facts["warm"]["misses"], facts["warm"]["traces"]) == (1, 0, 0)
