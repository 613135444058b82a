"""What a run says while it trains and when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.training import progress
from paceline.training.progress import PlainView, closing_words, evaluation_words
from paceline.training.scores import origin_notes

FOLDER = Path("runs/a")


def evaluation(step: int, tau: float) -> dict[str, Any]:
    return {"event": "evaluation", "step": step, "tau": tau}


def step_record(step: int, seconds: float) -> dict[str, Any]:
    numbers = {"loss": 1.0, "accuracy": [0.5], "learning_rate": 1e-4, "tokens_per_second": 10.0}
    return {"event": "step", "step": step, "seconds": seconds, **numbers}


def test_the_last_line_names_step_and_tau_of_best_and_last() -> None:
    (line,) = closing_words(FOLDER, [evaluation(0, 1.1), evaluation(5, 2.1), evaluation(9, 1.9)])
    assert "runs/a/best (best held-out τ 2.100, step 5)" in line
    assert "runs/a/last (τ 1.900, step 9)" in line


def test_a_warm_start_that_training_did_not_improve_is_said() -> None:
    line, warning = closing_words(FOLDER, [evaluation(0, 2.0), step_record(1, 1.0), evaluation(3, 2.0)])
    assert "step 0" in line
    assert "did not improve on what it started from" in warning
    assert "training.learning_rate" in warning


def test_a_run_without_held_out_data_names_no_best() -> None:
    (line,) = closing_words(FOLDER, [step_record(1, 1.0)])
    assert "best" not in line
    assert "runs/a/last" in line


@pytest.mark.parametrize("init", ["random", "target", "drafters/old"])
def test_a_card_of_step_0_says_that_nothing_was_trained(init: str) -> None:
    (note,) = origin_notes(init, 0)
    assert "untrained" in note if init in ("random", "target") else "no step of training" in note
    assert ("drafters/old" in note) == (init == "drafters/old")


def test_a_card_of_a_continued_drafter_names_its_start() -> None:
    assert origin_notes("drafters/old", 5) == ("continued from `drafters/old`",)
    assert origin_notes("target", 5) == ()


def test_the_time_left_is_counted_from_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    view = PlainView(total=11)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 500.0)  # the first evaluation took long
    view.step(step_record(1, 2.0))
    assert "0:20 left" in capsys.readouterr().err


def test_agreement_is_called_agreement() -> None:
    words = evaluation_words({"by_slot": [0.5], "tau": 2.0, "accepted": 1.0, "agreement": 0.98})
    assert words.endswith("agreement 98%")
