"""Words that lead nowhere: one line that says which, and a help page that names the whole command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "did you mean 'train'"),
        (["data"], "after `paceline data` comes show"),
        (["data", "shwo", "run.toml"], "comes show, not 'shwo'"),
        (["data", "show", "missing.toml"], "missing.toml"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["SCRIPT", "--", "--steps", "3"], ["--steps", "3"]),
        (["SCRIPT", "a", "--timeout", "60", "--", "--timeout", "5", "--help"], ["a", "--timeout", "5", "--help"]),
        (["--timeout", "60", "SCRIPT", "a", "--", "two words", "--"], ["a", "two words", "--"]),
        (["--timeout", "60", "--", "SCRIPT", "--steps"], ["--steps"]),
        (["SCRIPT", "a", "-1"], ["a", "-1"]),
    ],
)
def test_what_stands_after_two_dashes_goes_to_the_script(
    words: list[str], given: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    assert cli.main(["run-there", *(str(script) if word == "SCRIPT" else word for word in words)]) == 0
    assert capfd.readouterr().out == f"{given}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check.py", "--steps", "3"], "paceline run-there … -- --steps 3"),
        ([], "no script was named"),
        (["--timeout", "3", "--"], "no script was named"),
    ],
)
def test_an_option_of_the_script_that_has_no_dashes_before_it(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run-there", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_help_of_run_there_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run-there", "--help"])
    assert "-- --steps 3" in capsys.readouterr().out


BOTH_STREAMS = """
import sys
from paceline import cli

def speak() -> int:
    for number in range(3):
        print("out", number)
        print("err", number, file=sys.stderr)
    raise cli.UserError("at the end")

cli.VERBS["speak"] = cli.Verb("both streams", speak)
sys.exit(cli.main(["speak"]))
"""


def test_both_streams_in_one_file_keep_their_order(tmp_path: Path) -> None:
    both = tmp_path / "both"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(both, "wb") as file:
        subprocess.run([sys.executable, "-c", BOTH_STREAMS], stdout=file, stderr=file, check=False, env=environment)
    said = [f"{name} {number}" for number in range(3) for name in ("out", "err")]
    assert both.read_text().splitlines() == [*said, "error: at the end"]


@pytest.mark.parametrize("words", [["data", "--help"], ["data", "show", "--help"]])
def test_help_names_the_whole_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: paceline data show [-h] PATH")
