"""The page of a run: its numbers stand there, and text of others cannot break it."""

import json
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.report import write_report


def step(number: int, loss: float) -> dict:
    return {"event": "step", "step": number, "loss": loss, "seconds": 30.0, "tokens": 600}


def evaluation(number: int, tau: float) -> dict:
    return {"event": "evaluation", "step": number, "tau": tau, "by_slot": [0.5, 0.25], "by_kind": {"<b>": tau}}


def run_folder(tmp_path: Path, records: list[dict]) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_numbers_of_a_run_stand_on_its_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [evaluation(0, 1.0), step(1, 9.0), step(2, 8.0), evaluation(2, 1.75)])
    (folder / "config.toml").write_text('[run]\nname = "<script>alert(1)</script>"\n')
    page = write_report(folder).read_text()
    for words in ("1.75", "best, at step 2", "1.0 min", "20</b>", "held-out τ at step 0"):
        assert words in page
    assert "<script>alert(1)" not in page
    assert "<td><b></td>" not in page
    assert "https://" not in page.split("<main>")[1].split("</main>")[0].replace("https://plotly.com", "")


def test_a_run_without_evaluation_has_a_page_and_no_run_has_none(tmp_path: Path) -> None:
    assert "1 </b>" not in write_report(run_folder(tmp_path, [step(1, 9.0)])).read_text()
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        write_report(tmp_path / "elsewhere")
