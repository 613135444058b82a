"""A whole run through the command line, and what it says of itself afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipeline_world import config_of, make_world

from paceline import cli
from paceline import config as configuration
from paceline.training.tally import Tally

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


@pytest.mark.parametrize(("every", "checkpoint"), [(2, 2), (4, 0)])
def test_an_interrupted_run_says_where_it_is_and_how_it_goes_on(
    every: int, checkpoint: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_world(tmp_path)
    (tmp_path / "run.toml").write_text(configuration.dump(config_of(tmp_path, "first", steps=5)))
    words = [str(tmp_path / "run.toml"), f"checkpoint.every={every}"]
    started = 0

    def start(tally: Tally) -> None:
        nonlocal started
        started += 1
        if started == 4:  # two steps are recorded: the third is while the fourth runs
            raise KeyboardInterrupt
        genuine(tally)

    genuine = Tally.start
    with monkeypatch.context() as inside:
        inside.setattr(Tally, "start", start)
        assert cli.main(["train", *words]) == 130
    kept = "the newest whole checkpoint is of step 2" if checkpoint else "there is no whole checkpoint yet"
    first, then = capfd.readouterr().err.splitlines()[-2:]
    assert first == f"interrupted at step 2 of 5; {kept}"
    assert then == f"  go on from step {checkpoint}: paceline train {words[0]} {words[1]} --resume"
    folder = tmp_path / "runs" / "first"
    assert cli.main(["doctor", str(folder), "--json"]) == 1
    (found,) = json.loads(capfd.readouterr().out)["findings"]
    assert (found["level"], found["what"]) == ("warning", "was interrupted")
    assert found["value"] == f"at step 2 of 5; {kept}"
    assert f"paceline train {folder}/config.toml --resume" in found["remedy"]
    assert cli.main(["train", *words, "--resume"]) == 0
    assert cli.main(["doctor", str(folder)]) == 0
    assert "finished: 5 of 5 steps" in capfd.readouterr().out
