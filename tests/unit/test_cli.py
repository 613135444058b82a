"""Words that lead nowhere: one line that says which, and a help page that names the whole command."""

from __future__ import annotations

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


@pytest.mark.parametrize("words", [["data", "--help"], ["data", "show", "--help"]])
def test_help_names_the_whole_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: paceline data show [-h] PATH")
