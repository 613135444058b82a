"""A whole run through the command line, and what it says of itself afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_world import config_of, make_world

from paceline import cli
from paceline import config as configuration

pytestmark = pytest.mark.timeout(120)


def test_a_warm_start_that_gained_nothing_says_so_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_world(tmp_path)
    (tmp_path / "run.toml").write_text(configuration.dump(config_of(tmp_path, "first", steps=3)))
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 0
    assert "note: " not in capfd.readouterr().err
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    words = ["run.name=second", f"drafter.init={first}/last", "training.learning_rate=1e-9"]
    capfd.readouterr()
    assert cli.main(["train", str(tmp_path / "run.toml"), *words]) == 0
    closing, advice = capfd.readouterr().err.splitlines()[-2:]
    assert closing.startswith(f"drafter: {second}/best (best held-out τ ")
    assert "step 0)" in closing
    assert "step 3)" in closing
    assert "did not improve on what it started from" in advice
    best, last = (second / "best" / "README.md").read_text(), (second / "last" / "README.md").read_text()
    assert "Training data" not in best
    assert "train.jsonl" not in best
    assert f"the weights of `{first}/last` as they were" in best
    assert "train.jsonl" in last
    assert f"continued from `{first}/last`" in last
    assert cli.main(["doctor", str(second)]) == 0
    said = capfd.readouterr().out
    assert "rank 0 | step 3" in said
    assert "finished: 3 of 3 steps, τ " in said
    assert "(best at step 0)" in said


def test_an_ordinary_token_as_the_mask_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_world(tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        path.write_text(path.read_text().replace("w9 ", "w8 ").replace('w9"', 'w8"'))
    (tmp_path / "run.toml").write_text(configuration.dump(config_of(tmp_path, steps=1)))
    assert cli.main(["train", str(tmp_path / "run.toml"), "target.mask_token_id=9"]) == 0
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert "target.mask_token_id = 9 is an ordinary token of the target, 'w9'" in note
    assert "to an id that never occurs in" in note
