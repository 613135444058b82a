"""What `paceline eval` and `paceline verify` say and refuse before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from paceline import export
from paceline.errors import UserError
from paceline.evaluation.acceptance import Walk, summarise
from paceline.evaluation.command import EvalOptions, VerifyOptions, prepare, run_eval, run_verify
from paceline.evaluation.predict import Prediction
from paceline.evaluation.report import ENOUGH_STEPS, Evaluation, Speed, lines
from paceline.evaluation.sampling import Sampling
from paceline.evaluation.verify import Check, summary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "--drafter is missing"),
        *(({"tokens": number}, f"--tokens = {number} leaves nothing to draft") for number in (1, 0, -1)),
        ({"seed": -1}, "--seed = -1"),
        ({"seed": 1 << 70}, "--seed = "),
        ({"compare": -2.0}, "--compare = -2.0"),
        ({"compare": float("nan")}, "--compare = nan"),
        ({"temperature": float("nan")}, "--temperature = nan"),
        ({"temperature": 1e-40}, "--temperature = 1e-40 is below"),
        ({"compare": 3.0}, "--compare = 3.0 has nothing to compare with"),
        ({"temperature": float("inf")}, "--temperature = inf"),
        ({"out": "/proc/none/result.json"}, "--out = '/proc/none/result.json' cannot be written"),
        ({"out": "."}, "--out = '.' cannot be written"),
        ({"count": -1}, "--count = -1"),
        ({"batches": (4, 0)}, "--batches = 4 0"),
        ({"thinking": "maybe"}, "--thinking = 'maybe'"),
        ({"temperature": -1.0}, "--temperature = -1.0"),
        ({"top_k": -1}, "--top-k = -1"),
        ({"drafter": "nowhere"}, "nowhere holds no exported drafter"),
    ],
)
def test_eval_refuses_by_name_before_it_loads(change: dict, message: str, monkeypatch: pytest.MonkeyPatch):
    def load(*_args: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr("paceline.evaluation.command.prepare", load)
    with pytest.raises(UserError, match=message):
        run_eval(dataclasses.replace(EvalOptions(), **change))


def test_graphs_on_a_cpu_name_the_flag(tmp_path: Path):
    options = EvalOptions(drafter=str(tmp_path), device="cpu", graphs="on")
    with pytest.raises(UserError, match="--graphs off"):
        prepare(options, Sampling())
    with pytest.raises(UserError, match="not one of auto, on, off"):
        prepare(dataclasses.replace(options, graphs="yes"), Sampling())


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "cuda:x", ""])
@pytest.mark.parametrize("target", ["", "acme/tiny"])
def test_verify_refuses_a_device_that_is_not_there(device: str, target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device = "):
        run_verify(VerifyOptions("nowhere", target, device=device))


def test_what_was_not_checked_has_not_passed():
    checks = [Check("a", "ok"), Check("b", "ok"), Check("c", "skip")]
    assert summary(checks) == "2 checks passed, 1 not made"
    assert summary([Check("a", "ok")]) == "1 check passed"
    more = [*checks, Check("d", "note"), Check("e", "fail")]
    assert summary(more) == "2 checks passed, 1 with a note, 1 failed, 1 not made"


def evaluation(steps: int, block: int) -> Evaluation:
    found = summarise([Walk((2,) * steps, (1,) * steps)], 8)
    return Evaluation(found, {}, [Speed(1, 2.0, 1.0, 0.5)], [Prediction(1, block, 2.0, 1.5)], 1.5, None, 0)


def test_few_steps_recommend_nothing():
    told = "\n".join(lines(evaluation(ENOUGH_STEPS - 1, 4)))
    assert "serve blocks of" not in told
    assert "too few to recommend" in told
    assert "nan" not in told


def test_another_block_than_the_trained_one_comes_with_how_to_serve_it():
    told = "\n".join(lines(evaluation(ENOUGH_STEPS, 4)))
    assert "serve blocks of 4 instead of 8" in told
    assert "num_speculative_tokens 3," in told
    assert "--speculative-num-draft-tokens 4" in told
    same = "\n".join(lines(evaluation(ENOUGH_STEPS, 8)))
    assert "serve blocks of 8, as trained" in same
    assert "num_speculative_tokens" not in same


def test_sampled_output_is_not_called_compared():
    assert "output: sampled, so not compared" in lines(evaluation(300, 4))


def test_a_folder_of_two_files_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from test_export_layout import SHAPE, state, target

    small = export.write(tmp_path / "drafter", state(), SHAPE, target(), dtype="float32")
    for path in small.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    assert run_verify(VerifyOptions(str(small))) == 0
    told = capsys.readouterr()
    assert "7 not made" in told.err
    assert sum(line.startswith("skip ") for line in told.out.splitlines()) == 7
    assert not any(line.startswith("note ") for line in told.out.splitlines())
