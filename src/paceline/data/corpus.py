"""The tokenised data of a run: built once, found again by content, shared by all workers.

Two passes keep memory flat. The first reads rows, renders and tokenises them chunk by chunk into flat arrays on disk.
The second decides which rows are held out (that needs all of them) and copies documents to their side. What stays in
memory meanwhile is about a hundred bytes a row. The finished folder takes its final name in one rename.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.config import DataConfig
from paceline.data.documents import Columns, Documents, Writer, load_array
from paceline.data.quarantine import Counter, SetAside, check_limits
from paceline.data.rows import NOTES, Place, Problem, Row
from paceline.data.sources import File, content_digest, read_file, resolve
from paceline.data.split import BANDS, choose_held_out, groups, scramble, touches
from paceline.data.template import Template
from paceline.data.work import Chunk, Settings, processes_for, run
from paceline.errors import UserError
from paceline.permissions import apply_umask

_MOST_REPEATS = 10_000
_FORM = 3
"""Raise it when the same inputs give other tokens than before."""
Report = Callable[[str], None]
Files = tuple[list[File], list[File]]
"""Those of data.train and those of data.held_out."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents of both sides, and what was left out."""

    train: Documents
    held_out: Documents
    set_aside: SetAside
    digest: str
    """Hash of all tokens, masks and hashes of both sides: equal on any machine that read the same."""
    folder: Path


def build_corpus(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask_token_id: int,
    eos_ids: tuple[int, ...],
    seed: int,
    report: Callable[[str], None],
    processes: int | None = None,
) -> Corpus:
    """Read, render, tokenise and split, or map what was built from the same content before.

    `seed` decides which rows a fractional mixture weight keeps. `processes` is how many tokenise; None starts more than
    this one only where the data is large enough to pay for it. Raises UserError where there is no data, where more than
    `max_set_aside` of the rows are set aside, or where nothing is left to learn from.
    """
    template = Template(tokenizer, eos_ids, config.thinking)
    corpus = open_corpus(config, template, mask_token_id=mask_token_id, seed=seed, processes=processes)
    for line in said(corpus):
        report(line)
    check_limits(corpus.set_aside, config.max_set_aside)
    if not len(corpus.train):
        raise UserError(
            f"no training documents are left of {corpus.set_aside.kept:,} usable rows",
            "bring more rows, lower data.held_out_fraction, or raise data.weights",
        )
    return corpus


def open_corpus(
    config: DataConfig, template: Template, *, mask_token_id: int, seed: int, processes: int | None = None
) -> Corpus:
    """The corpus as it is, however much of it was set aside. Raises UserError where a source or a weight is wrong."""
    if any(not 0 <= weight <= _MOST_REPEATS for weight in config.weights):
        raise UserError(f"data.weights = {list(config.weights)}", f"give numbers from 0 to {_MOST_REPEATS:,}")
    files = resolve(config.train), resolve(config.held_out) if config.held_out else []
    key = _key(config, template, files, mask_token_id, seed)
    root = Path(config.cache_folder).expanduser() if config.cache_folder else default_cache()
    folder = root / key
    with _locked(root, key):
        if not (folder / "facts.json").is_file():
            settings = Settings(template, config.max_tokens, mask_token_id)
            _build(folder, config, settings, files, seed, processes)
        return _load(folder)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "paceline" / "data"


def _key(config: DataConfig, template: Template, files: Files, mask_token_id: int, seed: int) -> str:
    facts = {
        "form": _FORM,
        "content": [content_digest(part) for part in files],
        # What was set aside is told by file and line: the same bytes under another name are told under that name.
        "names": [config.train, config.held_out, *([file.name for file in part] for part in files)],
        "tokenizer": template.fingerprint(),
        "shape": config.shape,
        "weights": config.weights,
        "seed": seed if any(weight % 1 for weight in config.weights) else 0,
        "held_out_fraction": config.held_out_fraction,
        "max_tokens": config.max_tokens,
        "mask": mask_token_id,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _locked(root: Path, key: str) -> Iterator[None]:
    """One process builds, the others wait for it; the lock goes with its process, however that ends."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = (root / f"{key}.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to the data cache {root}: {error}", "set data.cache_folder") from None
    with handle:
        try:
            import fcntl  # noqa: PLC0415 - not on Windows
        except ImportError:
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(
    folder: Path, config: DataConfig, settings: Settings, files: Files, seed: int, processes: int | None
) -> None:
    for left in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)  # by one that was killed: the lock is ours
    scratch = Path(tempfile.mkdtemp(prefix=f".building-{folder.name}-", dir=folder.parent))
    if processes is None:
        processes = processes_for(sum(file.size for part in files for file in part))
    counter = Counter()
    try:
        first = _tokenise(scratch / "all", settings, _all_rows(config, files, counter), counter, processes)
        _separate(scratch, first, config, counter, seed)
        shutil.rmtree(scratch / "all")
        facts = {"set_aside": counter.freeze().plain(), "digest": _digest(scratch)}
        (scratch / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        apply_umask(scratch)
        shutil.rmtree(folder, ignore_errors=True)  # without its facts, it is what an interrupted removal left
        scratch.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot write tokenised data to {folder}: {error}", "free space or set data.cache_folder"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class _First:
    """What the first pass leaves on disk: documents of all rows, and small facts of each row."""

    documents: Documents
    owners: np.ndarray
    """int64 [documents]: number of the row that each document comes from."""
    hashes: np.ndarray
    """uint64 [rows]"""
    signatures: np.ndarray
    """uint64 [rows, BANDS]"""
    sources: np.ndarray
    """int32 [rows]: entry of data.train, or -1 for rows of data.held_out."""
    files: np.ndarray
    """int32 [rows], into the names of files."""
    numbers: np.ndarray
    """int64 [rows]: line or row number within the file."""
    names: tuple[str, ...]

    def place(self, row: int) -> Place:
        return Place(self.names[int(self.files[row])], int(self.numbers[row]))


_FACTS = {"owners": "<i8", "hashes": "<u8", "signatures": "<u8", "sources": "<i4", "files": "<i4", "numbers": "<i8"}


def _tokenise(folder: Path, settings: Settings, rows: Iterator[Row], counter: Counter, processes: int) -> _First:
    names: dict[str, int] = {}
    count = 0
    with Writer(folder / "documents") as writer, Columns(folder, _FACTS) as facts:
        for places, chunk in run(settings, rows, processes):
            _count_chunk(counter, places, chunk)
            kept = [places[number] for number in chunk.kept]
            ends = np.cumsum(chunk.lengths)
            for length, end, owner in zip(chunk.lengths.tolist(), ends.tolist(), chunk.owners.tolist(), strict=True):
                part = slice(end - length, end)
                writer.append(chunk.ids[part], chunk.supervised[part], chunk.kinds[owner], int(chunk.hashes[owner]))
            facts.add("owners", chunk.owners + count)
            facts.add("hashes", chunk.hashes)
            facts.add("signatures", chunk.signatures.reshape(-1))
            facts.add("sources", np.asarray([source for _, source in kept], np.int32))
            facts.add("files", np.asarray([names.setdefault(place.file, len(names)) for place, _ in kept], np.int32))
            facts.add("numbers", np.asarray([place.number for place, _ in kept], np.int64))
            count += len(chunk.kept)
    loaded = {name: load_array(folder / f"{name}.npy") for name in _FACTS}
    loaded["signatures"] = loaded["signatures"].reshape(-1, BANDS)
    return _First(Documents.load(folder / "documents"), names=tuple(names), **loaded)


def _count_chunk(counter: Counter, places: list[tuple[Place, int]], chunk: Chunk) -> None:
    for number, problem in chunk.problems:
        counter.add(places[number][0], problem, was_kept=True)
    for name, count in chunk.notes.items():
        counter.note(name, count)


def _all_rows(config: DataConfig, files: Files, counter: Counter) -> Iterator[Row]:
    """Rows of both sides, counted; those of data.held_out carry source -1."""
    for file in files[0] + [dataclasses.replace(item, source=-1 - item.source) for item in files[1]]:
        entry = config.train[file.source] if file.source >= 0 else config.held_out[-1 - file.source]
        for row in read_file(file, config.shape):
            counter.seen(row, entry)
            yield row


def _separate(scratch: Path, first: _First, config: DataConfig, counter: Counter, seed: int) -> None:
    """Second pass: decide each row's side, and copy its documents there."""
    group = groups(first.signatures)
    hashes = np.asarray(first.hashes)
    given = np.asarray(first.sources) < 0
    counter.note("duplicates", len(hashes) - len(np.unique(hashes)))
    if config.held_out:
        held, dropped = given, touches(group, given) & ~given
    else:
        held, dropped = choose_held_out(group, hashes, config.held_out_fraction), np.zeros(len(group), bool)
    for row in np.flatnonzero(dropped).tolist():
        counter.add(first.place(row), Problem("near-held-out", f"content hash {int(hashes[row]):016x}"), was_kept=True)
    repeats = _repeats(first, config, seed)
    with Writer(scratch / "train") as train, Writer(scratch / "held_out") as kept_out:
        for number, owner in enumerate(np.asarray(first.owners).tolist()):
            ids, supervised = first.documents.document(number)
            kind, digest = first.documents.kind(number), int(hashes[owner])
            if held[owner]:
                kept_out.append(ids, supervised, kind, digest)
            elif not dropped[owner] and repeats[owner]:
                train.append(ids, supervised, kind, digest, int(repeats[owner]))


def _repeats(first: _First, config: DataConfig, seed: int) -> np.ndarray:
    """int64 [rows]: how often a row stands in an epoch. A fraction keeps that share of rows, the same every epoch."""
    weights = np.asarray([*(config.weights or [1.0] * len(config.train)), 1.0])
    weight = weights[np.maximum(np.asarray(first.sources), -1)]
    drawn = scramble(np.asarray(first.hashes) + np.uint64(seed & (2**64 - 1))) / 2.0**64
    return np.floor(weight + drawn).astype(np.int64)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for side in ("train", "held_out"):
        for name in ("ids", "supervised", "offsets", "hashes", "repeats"):
            with (folder / side / f"{name}.npy").open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _load(folder: Path) -> Corpus:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    sides = Documents.load(folder / "train"), Documents.load(folder / "held_out")
    return Corpus(*sides, SetAside.of_plain(facts["set_aside"]), facts["digest"], folder)


def said(corpus: Corpus) -> list[str]:
    """What there is to tell of a corpus, a line each."""
    shapes = corpus.set_aside.shapes.items()
    lines = [
        f"{entry}: " + ", ".join(f"{count:,} {shape}" for shape, count in found.items()) for entry, found in shapes
    ]
    lines.append(corpus.set_aside.line())
    lines += [f"{count:,} {NOTES[name]}" for name, count in corpus.set_aside.notes.items()]
    sides = ((corpus.train, "training documents"), (corpus.held_out, "held-out documents"))
    return lines + [f"{len(side):,} {name} of {len(side.ids):,} tokens" for side, name in sides]
