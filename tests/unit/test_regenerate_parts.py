"""The parts of a regeneration that need neither a model nor a server."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import TargetConfig
from paceline.data.conversations import convert
from paceline.data.rows import Conversation
from paceline.data.sources import read
from paceline.errors import UserError
from paceline.regenerate.draft import Answer, Draft, prompt_key
from paceline.regenerate.endpoint import read_answer
from paceline.regenerate.journal import Journal
from paceline.regenerate.judge import is_looping, split_reasoning
from paceline.regenerate.options import RegenerateOptions
from paceline.regenerate.output import flagged_path, write_outputs
from paceline.regenerate.progress import Progress


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


# -- looping


@pytest.mark.parametrize(
    "text",
    ["no " * 60, "a" * 200, "One two three. " * 9, "intro\n" + "- the same line again\n" * 12, "答案是四。" * 40],
)
def test_loops_are_seen(text: str) -> None:
    assert is_looping(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ha ha ha ha!",
        "The sum of 2 and 2 is 4.",
        " ".join(str(number * number) for number in range(300)),
        "| a | b |\n" + "\n".join(f"| {n} | {n * 7} |" for n in range(60)),
        "def f(x):\n" + "\n".join(f"    x = g{n}(x, {n})" for n in range(30)),
    ],
)
def test_ordinary_answers_are_not_loops(text: str) -> None:
    assert not is_looping(text)


def test_a_loop_that_was_left_again_is_seen() -> None:
    assert is_looping("we go round and round and round in the garden today " * 20 + "and then, at last, it ended well.")


@given(st.text(min_size=1, max_size=12), st.integers(0, 30))
def test_any_period_of_enough_length_is_a_loop(period: str, cut: int) -> None:
    text = period * 200
    assert is_looping(text[: len(text) - min(cut, len(text) // 4)]) or not text.strip() or len(text.rstrip()) < 120


# -- drafts


def write_all(draft: Draft, *answers: Answer) -> list[list[str]]:
    """Answer a draft; what it asked, as contents."""
    asked = []
    for answer in answers:
        messages = draft.prompt()
        assert messages is not None
        asked.append([item["content"] for item in messages])
        draft.add(answer)
    assert draft.prompt() is None
    return asked


def test_each_turn_is_asked_after_the_new_ones() -> None:
    draft = Draft("k", Conversation((user("a"), said("old"), user("b"), said("old"), user("c"))))
    asked = write_all(draft, *(Answer(said(f"new {place}"), 3) for place in range(3)))
    assert asked == [["a"], ["a", "new 0", "b"], ["a", "new 0", "b", "new 1", "c"]]
    assert [item["content"] for item in draft.record()["messages"]] == ["a", "new 0", "b", "new 1", "c", "new 2"]
    assert draft.record()["tokens"] == 9


def test_nothing_is_asked_after_a_broken_answer() -> None:
    draft = Draft("k", Conversation((user("a"), said("old"), user("b"))))
    write_all(draft, Answer(said("half an"), 9, ("truncated",)))
    assert draft.record()["flags"] == ["truncated"]
    failed = Draft("k", Conversation((user("a"),)))
    write_all(failed, Answer({}, 0, ("failed",), "500 no"))
    assert failed.record()["error"] == "500 no"


def test_a_call_keeps_the_result_that_belongs_to_it() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "content": "42"}
    draft = Draft("k", Conversation((user("a"), call, result, said("old"))))
    write_all(draft, Answer(said("it is 42"), 3))
    assert draft.record()["messages"] == [user("a"), call, result, said("it is 42")]


def test_a_prompt_is_one_row_whoever_answered_it() -> None:
    bare = prompt_key(Conversation((user("a"),)))
    assert bare == prompt_key(Conversation((user("a"), said("x")))) == prompt_key(Conversation((user("a"),), kind="k"))
    two = prompt_key(Conversation((user("a"), said("x"), user("b"))))
    assert two == prompt_key(Conversation((user("a"), said("y"), user("b"), said("z"))))
    others = [(user("b"),), (user("a"), said("x"), user("c")), ({"role": "system", "content": "s"}, user("a"))]
    assert len({bare, two, *(prompt_key(Conversation(item)) for item in others)}) == 5
    assert prompt_key(Conversation((user("a"),), tools=({"name": "f"},))) != bare


@pytest.mark.parametrize(
    ("text", "tail", "content", "reasoning"),
    [
        ("<think>\nhm\n</think>\n\nyes", "", "yes", "hm"),
        ("hm\n</think>\n\nyes", "assistant\n<think>\n", "yes", "hm"),
        ("<think>\n\n</think>\n\nyes", "", "yes", None),
        ("a </think> b", "", "a </think> b", None),
        ("<think> never ends", "", "<think> never ends", None),
    ],
)
def test_reasoning_is_taken_out(text: str, tail: str, content: str, reasoning: str | None) -> None:
    message = split_reasoning(text, tail)
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


def test_answers_of_an_endpoint() -> None:
    def reply(message: dict, reason: str = "stop") -> dict:
        return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": 5}}

    good = read_answer(reply({"role": "assistant", "content": "yes", "reasoning_content": "hm"}))
    assert (good.message["content"], good.message["reasoning_content"], good.tokens, good.flags) == ("yes", "hm", 5, ())
    assert read_answer(reply({"content": "half"}, "length")).flags == ("truncated",)
    assert read_answer(reply({"content": None})).flags == ("empty",)
    assert read_answer(reply({"content": None, "tool_calls": [{"function": {"name": "f"}}]})).flags == ()
    assert read_answer(reply({"content": "no " * 60})).flags == ("looping",)
    odd = [[], "x", {"choices": [{"message": None}]}, {"choices": [{"message": {"content": "a"}}], "usage": [1]}]
    for broken in ({}, {"choices": []}, {"choices": [{}]}, reply({"content": 3}), *odd):
        with pytest.raises((KeyError, IndexError, TypeError)):
            read_answer(broken)


# -- the journal


def row(key: str, *flags: str) -> dict:
    return {"key": key, "messages": [user(key), said("答 " + key)], "flags": list(flags), "tokens": 2}


def test_rows_are_there_when_it_is_opened_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "s") as journal:
        journal.append([row("a"), row("b", "failed")])
        journal.append([row("c", "truncated")])
    with Journal(tmp_path / "j", "s") as journal:
        assert [journal.is_done(key) for key in "abcd"] == [True, False, True, False]
        assert journal.record("a") == row("a")
        journal.append([row("b")])
        assert journal.is_done("b")
        assert journal.record("b") == row("b")
        assert journal.record("c") == row("c", "truncated")


def test_a_journal_cut_anywhere_loses_at_most_its_last_line(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "s") as journal:
        for key in "abc":
            journal.append([row(key)])
    whole = (tmp_path / "j").read_bytes()
    for length in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        kept = whole[:length].count(b"\n") - 1
        with Journal(tmp_path / "cut", "s") as journal:
            assert sorted(journal.entries) == list("abc"[: max(0, kept)])
            journal.append([row("z")])
        with Journal(tmp_path / "cut", "s") as journal:
            assert journal.record("z") == row("z")
            assert journal.broken == 0


def test_damaged_lines_are_ignored_and_counted(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "s") as journal:
        journal.append([row("a"), row("b")])
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    (tmp_path / "j").write_bytes(lines[0] + b"\x00\xff{{{\n" + lines[2])
    with Journal(tmp_path / "j", "s") as journal:
        assert list(journal.entries) == ["b"]
        assert journal.broken == 1


def test_other_settings_and_a_second_writer_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "s"), pytest.raises(UserError, match="another process"):
        Journal(tmp_path / "j", "s")
    with pytest.raises(UserError, match="another model, template or sampling"):
        Journal(tmp_path / "j", "t")
    Journal(tmp_path / "j", "s").close()


# -- outputs


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_what_is_written_is_what_the_data_room_reads(tmp_path: Path, name: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = {
        "a": {"messages": [user("a"), said("b") | {"reasoning_content": "hm"}], "kind": "qa"},
        "b": {
            "messages": [user("q"), said("") | {"tool_calls": [call]}, {"role": "tool", "content": "1"}, said("one")],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    }
    with Journal(tmp_path / "j", "s") as journal:
        journal.append([{"key": key, "flags": [], "tokens": 1, **value} for key, value in rows.items()])
        journal.append([row("c", "truncated"), row("d", "looping"), row("e", "other-ids")])
        assert write_outputs(journal, list("baecdx"), tmp_path / name, ("looping",)) == (4, 1)
    found = [item.conversation for item in read((str(tmp_path / name),))]
    expected = [convert({key: value for key, value in rows[key].items()})[1] for key in "ba"]
    assert found[:2] == expected
    flagged = flagged_path(tmp_path / name)
    assert [json.loads(line)["messages"][0]["content"] for line in flagged.read_text().splitlines()] == ["c"]
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(["j", name, "out.flagged.jsonl"])
    if name.endswith("parquet"):
        assert pq.read_table(tmp_path / name).column("flags").to_pylist() == [[], [], ["other-ids"], ["looping"]]


def test_progress_says_what_is_left() -> None:
    said_lines: list[str] = []
    progress = Progress(2, said_lines.append, every=1e9)
    progress.add(100, ())
    progress.add(50, ("truncated",))
    assert "2 of 2 rows" in said_lines[-1]
    assert "0:00 left, 1 truncated" in said_lines[-1]
    assert "1:00:00 left" in Progress(2, said_lines.append, done=1).line(3600)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sources": ()}, "no prompts"),
        ({"output": "x.csv"}, "x.csv"),
        ({"keep": ("bad",)}, "bad"),
        ({"temperature": -1.0}, "temperature"),
        ({"in_flight": 0}, "in_flight"),
        ({"top_p": float("nan")}, "top_p"),
    ],
)
def test_options_that_cannot_work(changes: dict, what: str) -> None:
    options = {"sources": ("a",), "output": "o.jsonl", "target": TargetConfig(model="m")} | changes
    with pytest.raises(UserError, match=what):
        RegenerateOptions(**options).check()
