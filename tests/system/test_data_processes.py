"""The tokenised data built by several processes, by several at once, and by one that is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from data_byte_world import END, MASK, byte_tokenizer

from paceline.config import DataConfig
from paceline.data import corpus as corpus_room
from paceline.data.corpus import Corpus, build_corpus

SPAWN = multiprocessing.get_context("spawn")


def write(path: Path, count: int) -> str:
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": f"q {i} {i * i}"}, {"role": "assistant", "content": f"a {i}"}]}
        for i in range(count)
    ]
    rows[3] = {"messages": []}
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def build(source: str, cache: str, processes: int | None = None) -> Corpus:
    return build_corpus(
        DataConfig(train=(source,), cache_folder=cache),
        byte_tokenizer(),
        mask_token_id=MASK,
        eos_ids=(END,),
        seed=0,
        report=lambda _: None,
        processes=processes,
    )


def build_and_tell(source: str, cache: str, builds: str, pipe: Connection) -> None:
    real = corpus_room._build

    def counted(*arguments: Any) -> None:
        Path(builds, str(os.getpid())).touch()
        real(*arguments)

    corpus_room._build = counted
    pipe.send(build(source, cache).digest)


def build_and_die(source: str, cache: str) -> None:
    def die(_: Path) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    corpus_room._digest = die
    build(source, cache)


def test_more_processes_give_the_same_tokens(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", 1500)
    one = build(source, str(tmp_path / "one"), 1)
    two = build(source, str(tmp_path / "two"), 2)
    assert one.digest == two.digest
    assert one.set_aside == two.set_aside
    assert one.set_aside.reasons["no-messages"].places == (f"{source}:4",)


def test_workers_that_start_together_build_once(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", 300)
    (tmp_path / "builds").mkdir()
    workers, ends = [], []
    for _ in range(2):
        mine, theirs = SPAWN.Pipe()
        arguments = (source, str(tmp_path / "cache"), str(tmp_path / "builds"), theirs)
        workers.append(SPAWN.Process(target=build_and_tell, args=arguments))
        workers[-1].start()
        ends.append(mine)
    digests = [end.recv() for end in ends]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(set(digests)) == 1
    assert len(list((tmp_path / "builds").iterdir())) == 1


def test_killed_while_building_the_next_one_builds(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", 50)
    worker = SPAWN.Process(target=build_and_die, args=(source, str(tmp_path / "cache")))
    worker.start()
    worker.join(120)
    assert worker.exitcode == -signal.SIGKILL
    corpus = build(source, str(tmp_path / "cache"))
    assert len(corpus.train) + len(corpus.held_out) == 49
    assert not list((tmp_path / "cache").glob(".building-*"))
