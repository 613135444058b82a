"""Building the tokenised data: counts that add up, limits, the cache, the split, mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_world import BY_NAME, token

from paceline.config import DataConfig
from paceline.data import corpus as corpus_room
from paceline.data.corpus import Corpus, build_corpus
from paceline.data.documents import Documents
from paceline.data.quarantine import write_set_aside
from paceline.errors import UserError

KIND = BY_NAME["smollm2"]


def talk(number: int, answer: str = "") -> dict[str, Any]:
    words = f"Question {number}: what is the meaning of item{number} in chapter{number * 7} of book{number * 13}?"
    turns = [{"role": "user", "content": words}, {"role": "assistant", "content": answer or f"It is answer {number}."}]
    return {"messages": turns}


def write(path: Path, rows: list[Any]) -> str:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return str(path)


def build(tmp_path: Path, said: list[str] | None = None, **settings: Any) -> Corpus:
    config = DataConfig(**{"cache_folder": str(tmp_path / "cache"), **settings})
    report = (said if said is not None else []).append
    return build_corpus(
        config, KIND.tokenizer(), mask_token_id=token("<|mask|>"), eos_ids=KIND.eos_ids, seed=0, report=report
    )


def texts(documents: Documents) -> list[str]:
    tokenizer = KIND.tokenizer()
    return [str(tokenizer.decode(documents.document(item)[0])) for item in range(len(documents))]


def answers(documents: Documents) -> list[str]:
    tokenizer = KIND.tokenizer()
    pairs = [documents.document(item) for item in range(len(documents))]
    return [str(tokenizer.decode(ids[mask])) for ids, mask in pairs]


def test_bad_rows_are_set_aside_by_name_and_the_good_one_trained(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl",
        [
            [],
            {"messages": [{"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            {"messages": [{"role": "user", "content": None}]},
            {"messages": [{"role": "user", "content": 5}]},
            b'{"messages": [',
            b'{"messages": "\xff"}',
            talk(1),
        ],
    )
    corpus = build(tmp_path, train=(source,), max_set_aside=0.9, held_out_fraction=0.0)
    assert answers(corpus.train) == ["It is answer 1.<|im_end|>"]
    assert {name: reason.places for name, reason in corpus.set_aside.reasons.items()} == {
        "no-messages": (f"{source}:1",),
        "starts-with-assistant": (f"{source}:2",),
        "roles-out-of-order": (f"{source}:3",),
        "null-content": (f"{source}:4",),
        "content-not-text": (f"{source}:5",),
        "not-json": (f"{source}:6",),
        "not-utf8": (f"{source}:7",),
    }
    assert (corpus.set_aside.rows, corpus.set_aside.kept, corpus.set_aside.count) == (8, 1, 7)
    facts = json.loads(write_set_aside(corpus.set_aside, tmp_path / "run").read_text())
    assert facts["set_aside"]["content-not-text"]["example"] == "5"
    assert facts["set_aside"]["no-messages"]["meaning"] == "the list of messages is empty"


def test_rows_without_labels_or_with_the_mask_token_or_cut_before_their_answer(tmp_path: Path) -> None:
    rows = [
        talk(1),
        talk(2, "x <|mask|> y"),
        {"messages": [*talk(3)["messages"][:1], {"role": "assistant", "content": ""}]},
    ]
    long = {"messages": [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "b"}]}
    source = write(tmp_path / "a.jsonl", [*rows, long])
    corpus = build(tmp_path, train=(source,), max_set_aside=0.9, held_out_fraction=0.0, max_tokens=300)
    found = {name: reason.places[0][-1] for name, reason in corpus.set_aside.reasons.items()}
    assert found == {"holds-mask-token": "2", "no-labels": "3", "cut-before-answer": "4"}
    assert len(corpus.train) == 1


@pytest.mark.parametrize("answer", ["a", "a b", "a b c"])
def test_long_documents_are_cut_counted_and_keep_their_mask(tmp_path: Path, answer: str) -> None:
    source = write(tmp_path / "a.jsonl", [talk(1, f"{answer} " * 400)])
    corpus = build(tmp_path, train=(source,), held_out_fraction=0.0, max_tokens=200)
    ids, mask = corpus.train.document(0)
    assert len(ids) == len(mask) == 200
    assert mask[-50:].all()
    assert corpus.set_aside.notes["cut"] == 1


def test_mostly_wrong_data_stops_with_the_commonest_reason(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [talk(1), {"id": 1}, {"id": 2}])
    with pytest.raises(UserError, match=r"2 of 3 rows are set aside \(66\.7%\).*'wrong-shape'") as caught:
        build(tmp_path, train=(source,))
    assert "data.max_set_aside" in caught.value.remedy
    with pytest.raises(UserError, match="has no rows"):
        build(tmp_path, train=(write(tmp_path / "b.jsonl", []),))


def test_preformatted_text_in_another_form_stops_and_shows_it(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": f"[INST] ask {item}[/INST] answer</s>"} for item in range(4)])
    with pytest.raises(UserError, match="no-answer-marker") as caught:
        build(tmp_path, train=(source,), max_set_aside=1.0)
    assert repr("<|im_start|>assistant\n") in caught.value.what
    assert "[INST] ask 0[/INST]" in caught.value.what


def test_what_was_built_is_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", [talk(item) for item in range(20)])
    first = build(tmp_path, train=(source,))

    def never(*_: Any) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_room, "_build", never)
        again = build(tmp_path, train=(source,))
    assert again.digest == first.digest
    assert again.folder == first.folder
    assert isinstance(again.train.ids, np.memmap)
    renamed = write(tmp_path / "b.jsonl", [talk(item) for item in range(20)])
    assert build(tmp_path, train=(renamed,)).digest == first.digest
    write(tmp_path / "a.jsonl", [talk(item) for item in range(19)])
    assert build(tmp_path, train=(source,)).folder != first.folder
    for changed in ({"max_tokens": 3000}, {"held_out_fraction": 0.3}, {"shape": "messages"}, {"thinking": "off"}):
        assert build(tmp_path, train=(renamed,), **changed).folder != first.folder


def test_a_build_that_died_is_built_again_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", [talk(item) for item in range(20)])

    def die(*_: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus_room, "_digest", die)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, train=(source,))
    assert [item.suffix for item in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(build(tmp_path, train=(source,)).train)


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [talk(1)])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the data cache"):
        build(tmp_path, train=(source,), cache_folder=str(tmp_path / "file" / "below"))


def test_held_out_rows_and_near_copies_are_never_trained_on(tmp_path: Path) -> None:
    train = [talk(item) for item in range(50)]
    shouted = json.loads(json.dumps(train[7]).replace("Question", "QUESTION").replace("answer", "other"))
    corpus = build(
        tmp_path,
        train=(write(tmp_path / "a.jsonl", train),),
        held_out=(write(tmp_path / "h.jsonl", [shouted]),),
    )
    assert len(corpus.held_out) == 1
    assert len(corpus.train) == 49
    assert corpus.set_aside.reasons["near-held-out"].places[0].endswith("a.jsonl:8")
    assert corpus.set_aside.rows == 51 == corpus.set_aside.kept + 1


def test_split_is_by_content_whatever_the_order(tmp_path: Path) -> None:
    rows = [talk(item) for item in range(200)]
    one = build(tmp_path, train=(write(tmp_path / "a.jsonl", rows),), held_out_fraction=0.1)
    two = build(tmp_path, train=(write(tmp_path / "b.jsonl", rows[::-1]),), held_out_fraction=0.1)
    assert set(texts(one.held_out)) == set(texts(two.held_out))
    assert 8 <= len(one.held_out) <= 35
    assert not set(texts(one.held_out)) & set(texts(one.train))
    assert len(one.held_out) + len(one.train) == 200


def test_mixture_weights_say_how_often_rows_are_seen(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", [talk(item) for item in range(10)])
    many = write(tmp_path / "many.jsonl", [talk(item) for item in range(100, 300)])
    corpus = build(tmp_path, train=(few, many), weights=(3.0, 0.25), held_out_fraction=0.0)
    found = dict(zip(answers(corpus.train), corpus.train.repeats.tolist(), strict=True))
    assert [found[f"It is answer {item}.<|im_end|>"] for item in range(10)] == [3] * 10
    part = [value for name, value in found.items() if value == 1]
    assert 30 <= len(part) <= 70
    assert len(corpus.train) == 10 + len(part)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), 1e9])
def test_a_weight_that_makes_no_sense_is_refused(tmp_path: Path, weight: float) -> None:
    source = write(tmp_path / "a.jsonl", [talk(1), talk(2)])
    with pytest.raises(UserError, match=r"data\.weights"):
        build(tmp_path, train=(source,), weights=(weight,))


def test_kinds_and_duplicates_are_kept_and_counted(tmp_path: Path) -> None:
    rows = [{**talk(item), "kind": f"k{item % 3}"} for item in range(30)]
    corpus = build(tmp_path, train=(write(tmp_path / "a.jsonl", [*rows, rows[0]]),), held_out_fraction=0.0)
    assert [corpus.train.kind(item) for item in range(4)] == ["k0", "k1", "k2", "k0"]
    assert corpus.set_aside.notes["duplicates"] == 1


def test_what_was_found_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    source = write(tmp_path / "a.jsonl", [talk(1), talk(2), {"prompt": "only"}])
    build(tmp_path, said, train=(source,))
    assert f"{source}: 2 messages, 1 prompt" in said
    assert "3 rows, 1 set aside (33.3%): no-answer 1" in said


def test_documents_on_disk_are_the_documents_given(tmp_path: Path) -> None:
    given = Documents.of([([1, 2, 3], [False, True, True]), ([], []), ([4], [True])], kinds=["a", "", "a"])
    from paceline.data.documents import Writer

    with Writer(tmp_path / "d") as writer:
        for item in range(3):
            writer.append(*given.document(item), given.kind(item), 2**64 - 1 - item, item)
    loaded = Documents.load(tmp_path / "d")
    for item in range(3):
        assert [part.tolist() for part in loaded.document(item)] == [part.tolist() for part in given.document(item)]
        assert loaded.kind(item) == given.kind(item)
    assert loaded.hashes.tolist() == [2**64 - 1, 2**64 - 2, 2**64 - 3]
    assert loaded.repeats.tolist() == [0, 1, 2]
    assert loaded.lengths.tolist() == [3, 0, 1]


def test_the_same_bytes_under_another_name_are_told_under_that_name(tmp_path: Path) -> None:
    rows = [talk(number) for number in range(3)]
    said: list[str] = []
    for name in ("first.jsonl", "second.jsonl"):
        said.clear()
        build(tmp_path, said, train=(write(tmp_path / name, rows),), held_out_fraction=0.0)
        assert any(name in line for line in said), said
