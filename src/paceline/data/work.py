"""Rows -> token arrays, chunk by chunk: the part of building that several processes can share."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from paceline.data.rows import Conversation, Place, Problem, Row, RowError
from paceline.data.split import BANDS, signature
from paceline.data.stream import eligible_places
from paceline.data.template import Document, Template, Tokens

_CHUNK_ROWS = 512
_CHUNK_CHARACTERS = 1 << 21
PAYS_FROM = 256 << 20
"""Bytes of input from which starting more processes (some seconds each) gains time."""


@dataclass(frozen=True)
class Settings:
    """What turns a conversation into tokens."""

    template: Template
    max_tokens: int
    mask_token_id: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """The result for a chunk of rows, in order. r rows kept, d documents, t tokens."""

    ids: np.ndarray
    """int32 [t]"""
    supervised: np.ndarray
    """bool [t]"""
    lengths: np.ndarray
    """int64 [d]"""
    owners: np.ndarray
    """int64 [d]: kept row, within the chunk, of each document."""
    kept: tuple[int, ...]
    """Number within the chunk of each kept row."""
    hashes: np.ndarray
    """uint64 [r]"""
    signatures: np.ndarray
    """uint64 [r, BANDS]"""
    kinds: tuple[str, ...]
    problems: tuple[tuple[int, Problem], ...]
    """Rows of the chunk that turned out unusable."""
    notes: dict[str, int]


def content_hash(conversation: Conversation) -> int:
    """64-bit hash of what a conversation says (its kind aside): one row is the same in any file and any shape."""
    facts = [list(conversation.messages), list(conversation.tools), conversation.text]
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def tokenise_chunk(settings: Settings, conversations: list[Conversation]) -> Chunk:
    """Render, tokenise and mask; a conversation that cannot be is a problem, never an exception."""
    documents: list[Document] = []
    spans: list[tuple[int, int]] = []
    problems: dict[int, Problem] = {}
    notes: list[str] = []
    for number, conversation in enumerate(conversations):
        try:
            made, noted = settings.template.documents(conversation)
        except RowError as error:
            problems[number] = error.problem
            made, noted = [], []
        spans.append((len(documents), len(documents) + len(made)))
        documents += made
        notes += noted
    tokens = settings.template.tokenise(documents, settings.max_tokens)
    chosen: list[tuple[int, Tokens]] = []
    for number, (low, high) in enumerate(spans):
        if number not in problems:
            usable = [item for item in tokens[low:high] if len(eligible_places(item.supervised))]
            problem = _problem(tokens[low:high], usable, settings, documents[low])
            if problem is not None:
                problems[number] = problem
                continue
            notes += ["unlabelled"] * (high - low - len(usable))
            notes += [note for item in usable for note in item.notes]
            chosen += [(number, item) for item in usable]
    return _chunk(conversations, chosen, problems, notes)


def _problem(all_tokens: list[Tokens], usable: list[Tokens], settings: Settings, first: Document) -> Problem | None:
    if any((item.ids == settings.mask_token_id).any() for item in all_tokens):
        return Problem("holds-mask-token", f"token {settings.mask_token_id} in: {first.text[:300]}")
    if not usable:
        cut = any("cut" in item.notes for item in all_tokens)
        return Problem("cut-before-answer" if cut else "no-labels", first.text[-300:])
    return None


def _chunk(
    conversations: list[Conversation], chosen: list[tuple[int, Tokens]], problems: dict[int, Problem], notes: list[str]
) -> Chunk:
    kept = tuple(dict.fromkeys(number for number, _ in chosen))
    place = {number: index for index, number in enumerate(kept)}
    return Chunk(
        ids=np.concatenate([np.zeros(0, np.int32), *(item.ids for _, item in chosen)]),
        supervised=np.concatenate([np.zeros(0, bool), *(item.supervised for _, item in chosen)]),
        lengths=np.asarray([len(item.ids) for _, item in chosen], np.int64),
        owners=np.asarray([place[number] for number, _ in chosen], np.int64),
        kept=kept,
        hashes=np.asarray([content_hash(conversations[number]) for number in kept], np.uint64),
        signatures=np.asarray([signature(conversations[number].words()) for number in kept], np.uint64).reshape(
            -1, BANDS
        ),
        kinds=tuple(conversations[number].kind for number in kept),
        problems=tuple(problems.items()),
        notes={note: notes.count(note) for note in set(notes)},
    )


def chunks(rows: Iterable[Row]) -> Iterator[tuple[list[Row], list[Conversation]]]:
    """Usable rows in portions that are worth a call and fit in memory."""
    held: list[Row] = []
    talks: list[Conversation] = []
    size = 0
    for row in rows:
        if row.conversation is None:
            continue
        held.append(row)
        talks.append(row.conversation)
        size += _characters(row.conversation)
        if len(held) >= _CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
            yield held, talks
            held, talks, size = [], [], 0
    if held:
        yield held, talks


def _characters(conversation: Conversation) -> int:
    return len(conversation.text) + sum(len(str(item.get("content", ""))) for item in conversation.messages)


def run(settings: Settings, rows: Iterable[Row], processes: int) -> Iterator[tuple[list[tuple[Place, int]], Chunk]]:
    """Chunks in the order of the rows, with the place and source of each row of the chunk."""
    if processes <= 1:
        for held, talks in chunks(rows):
            yield _places(held), tokenise_chunk(settings, talks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_worker, (settings,)) as pool:
        waiting: deque[tuple[list[tuple[Place, int]], Future[Chunk]]] = deque()
        for held, talks in chunks(rows):
            waiting.append((_places(held), pool.submit(_in_worker, talks)))
            if len(waiting) > 2 * processes:
                places, future = waiting.popleft()
                yield places, future.result()
        for places, future in waiting:
            yield places, future.result()


def _places(rows: list[Row]) -> list[tuple[Place, int]]:
    return [(row.place, row.source) for row in rows]


_settings: list[Settings] = []


def _start_worker(settings: Settings) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    _settings[:] = [settings]


def _in_worker(conversations: list[Conversation]) -> Chunk:
    return tokenise_chunk(_settings[0], conversations)


def processes_for(size: int) -> int:
    """How many processes pay for an input of `size` bytes on this machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, 32) if size >= PAYS_FROM else 1
