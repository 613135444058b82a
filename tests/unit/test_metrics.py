"""metrics.jsonl: every step once, whatever was killed and resumed."""

import json
from pathlib import Path

import pytest
import torch

from paceline.training import metrics
from paceline.training.metrics import Clock, Delayed, MetricsFile, read_metrics


def test_a_resumed_run_drops_what_came_after_its_step(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path, 0)
    for step in range(1, 6):
        first.write({"event": "step", "step": step, "loss": 1.0})
    first.close()
    second = MetricsFile(tmp_path, 3)
    second.write({"event": "step", "step": 4, "loss": 2.0})
    second.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]


def test_a_finished_run_that_is_resumed_has_its_last_evaluation_once(tmp_path: Path) -> None:
    lines = [{"event": kind, "step": step} for step in (1, 2) for kind in ("step", "evaluation")]
    first = MetricsFile(tmp_path, 0)
    for line in lines:
        first.write(line)
    first.close()
    MetricsFile(tmp_path, 2).close()
    assert read_metrics(tmp_path) == lines
    again = MetricsFile(tmp_path, 2, looks_again=True)
    again.write(lines[-1])
    again.close()
    assert read_metrics(tmp_path) == lines


def test_a_line_cut_by_a_kill_is_left_out_and_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
    resumed = MetricsFile(tmp_path, 2)
    resumed.write({"step": 3})
    resumed.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


def test_each_step_is_delivered_once_and_one_later() -> None:
    seen: list[tuple[int, list[float]]] = []
    delayed = Delayed(lambda step, values, facts: seen.append((step, values)))
    values = torch.tensor([1.0])
    delayed.put(1, values, {})
    assert seen == []
    values.fill_(2.0)  # what was put is a copy
    delayed.put(2, values, {})
    assert seen == [(1, [1.0])]
    delayed.flush()
    delayed.flush()
    assert seen == [(1, [1.0]), (2, [2.0])]


def test_what_lies_between_steps_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 102.0, 103.5, 200.0, 201.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(times))
    clock = Clock()
    clock.start()  # 100: whatever came before it does not count
    assert clock.lap() == 2.0
    clock.start()  # the clock runs: the second step began when the first one ended
    assert clock.lap() == 1.5
    clock.stop()  # an evaluation
    clock.start()
    assert clock.lap() == 1.0
