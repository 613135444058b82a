"""Batch number i: documents packed into one fixed shape, anchors drawn, labels weighed. A pure function of its inputs.

Whoever asks for batch i, on whatever machine and however many workers there are, gets the same tensors: rows are
packed once from the lengths, their order is permuted anew each epoch, and anchors are drawn by a counter-based
generator keyed by (seed, epoch, document), so nothing depends on what was drawn before.

Anchors (arXiv 2602.06036, §4.2): positions, without repetition, whose own token and next token are supervised tokens of
one document. Slot j of a block at anchor a is labelled with token a + j and weighs exp(-(j - 1) / gamma), up to and not
including the first slot whose token is unsupervised or of another document. S, A, B as in `paceline.batches`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from paceline.batches import BatchShape, EvaluationBatch, TokenBatch
from paceline.data.documents import Documents
from paceline.data.packing import allot, best_fit
from paceline.errors import UserError

_ORDER, _ANCHORS = 1, 2
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Packing:
    """What a run gets out of its shape."""

    documents: int
    """Placings in one epoch (mixture repeats counted)."""
    unused: int
    """Documents without an anchor once they are cut to S tokens; they are left out."""
    cut: int
    """Documents longer than S, cut to it."""
    rows: int
    """Batches of one epoch."""
    fill: float
    """Share of context tokens that are not padding."""
    supervised: int
    """Supervised tokens of an epoch."""
    eligible: int
    """Positions of an epoch that could be anchors."""
    anchors: int
    """Anchors drawn in an epoch."""
    padded_slots: float
    """Share of label slots (A·(B - 1) a batch) that weigh nothing, sampled over at most 32 rows."""

    @property
    def anchors_per_supervised(self) -> float:
        return self.anchors / max(1, self.supervised)


@dataclass(frozen=True)
class _Chosen:
    """A document's place in a row with the positions (within the document) that are its anchors."""

    document: int
    anchors: np.ndarray


class Stream:
    """Training and evaluation batches over tokenised documents.

    Raises UserError where no document has a position that could be an anchor.
    """

    def __init__(
        self,
        documents: Documents,
        shape: BatchShape,
        seed: int,
        held_out: Documents | None = None,
        evaluation_anchors: int = 4096,
    ) -> None:
        self.documents = documents
        self.shape = shape
        self.seed = seed & _MASK
        self.held_out = held_out
        self.evaluation_anchors = evaluation_anchors
        self._lengths = np.minimum(documents.lengths, shape.tokens)
        self._eligible = eligible_counts(documents, shape.tokens)
        self._placed = np.repeat(np.arange(len(documents)), np.where(self._eligible > 0, documents.repeats, 0))
        if not len(self._placed):
            raise UserError(
                f"none of {len(documents)} documents has two supervised tokens within {shape.tokens} tokens",
                "raise training.tokens, or look at the data with `paceline data show`",
            )
        self._copies = _copy_numbers(self._placed)
        self._rows = best_fit(self._lengths[self._placed], shape.tokens)
        self._weights = slot_weights(shape.block_size, shape.gamma)
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    @property
    def batches_per_epoch(self) -> int:
        return len(self._rows)

    def batch(self, index: int) -> TokenBatch:
        """Batch `index` of an endless run of epochs. Raises ValueError for a negative index."""
        if index < 0:
            raise ValueError(f"batch index {index} is negative")
        epoch, place = divmod(index, len(self._rows))
        row = self._rows[int(self._epoch_order(epoch)[place])]
        return self._assemble(index, self.documents, self._draw(row, epoch))

    def empty(self, index: int) -> TokenBatch:
        """A batch of the same shape that weighs nothing."""
        return self._assemble(index, self.documents, [])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            keys = _random(self.seed, _ORDER, epoch, 0, 0, len(self._rows))
            self._order = (epoch, np.argsort(keys, kind="stable"))
        return self._order[1]

    def _draw(self, row: list[int], epoch: int) -> list[_Chosen]:
        documents = [int(self._placed[item]) for item in row]
        counts = allot([int(self._eligible[document]) for document in documents], self.shape.anchors)
        return [
            _Chosen(document, self._draw_anchors(document, int(self._copies[item]), epoch, count))
            for item, document, count in zip(row, documents, counts, strict=True)
        ]

    def _draw_anchors(self, document: int, copy: int, epoch: int, count: int) -> np.ndarray:
        places = eligible_places(self.documents.document(document)[1][: self.shape.tokens])
        if count >= len(places):
            return places
        keys = _random(self.seed, _ANCHORS, epoch, document, copy, len(places))
        return np.sort(places[np.argsort(keys, kind="stable")[:count]])

    def _assemble(self, index: int, source: Documents, row: list[_Chosen]) -> TokenBatch:
        S, A, B = self.shape.tokens, self.shape.anchors, self.shape.block_size
        ids, positions = np.zeros(S, np.int64), np.zeros(S, np.int64)
        owners, supervised = np.full(S, -1, np.int32), np.zeros(S, bool)
        anchors, starts = np.zeros(A, np.int64), np.zeros(A, np.int64)
        bounds, drawn = [0], 0
        for number, chosen in enumerate(row):
            text, mask = source.document(chosen.document)
            low, length, count = bounds[-1], min(len(text), S), len(chosen.anchors)
            high = low + length
            ids[low:high], supervised[low:high] = text[:length], mask[:length]
            positions[low:high], owners[low:high] = np.arange(length), number
            anchors[drawn : drawn + count], starts[drawn : drawn + count] = chosen.anchors + low, low
            bounds.append(high)
            drawn += count
        labels, weights = label_blocks(ids, owners, supervised, anchors[:drawn], self._weights)
        return TokenBatch(
            index=index,
            ids_S=torch.from_numpy(ids),
            positions_S=torch.from_numpy(positions),
            documents_S=torch.from_numpy(owners),
            supervised_S=torch.from_numpy(supervised),
            anchors_A=torch.from_numpy(anchors),
            starts_A=torch.from_numpy(starts),
            labels_AB=torch.from_numpy(_padded(labels, (A, B))),
            weights_AB=torch.from_numpy(_padded(weights, (A, B))),
            documents=tuple(chosen.document for chosen in row),
            bounds=tuple(bounds),
        )

    # -- evaluation

    def evaluation_batches(self) -> list[EvaluationBatch]:
        """Held-out answers, whole, with every eligible position an anchor; at most `evaluation_anchors` of them.

        Answers are taken in the order of their content's hash until the next one does not fit. An answer with more
        positions than a batch has anchors is spread over batches that share its document. Held-out document n is
        numbered -1 - n in `TokenBatch.documents`.
        """
        if self.held_out is None:
            return []
        answers = self._choose_answers(self.held_out)
        rows = list(_fill_rows(answers, self._held_lengths(), self.shape))
        kinds = tuple(self.held_out.kind(document) for document, _ in answers)
        batches = []
        for index, row in enumerate(rows):
            tokens = self._assemble(index, self.held_out, [_Chosen(item.document, item.anchors) for item in row])
            tokens = dataclasses.replace(tokens, documents=tuple(-1 - document for document in tokens.documents))
            numbers = np.concatenate([item.numbers for item in row])
            padded = np.full(self.shape.anchors, -1, np.int64)
            padded[: len(numbers)] = numbers
            batches.append(EvaluationBatch(tokens, torch.from_numpy(padded), kinds if any(kinds) else ()))
        return batches

    def _held_lengths(self) -> np.ndarray:
        assert self.held_out is not None
        return np.minimum(self.held_out.lengths, self.shape.tokens)

    def _choose_answers(self, held_out: Documents) -> list[tuple[int, np.ndarray]]:
        """(document, eligible positions) of the chosen answers; those of one document stand together."""
        chosen: list[tuple[int, np.ndarray]] = []
        shortest: tuple[int, np.ndarray] | None = None
        left = self.evaluation_anchors
        for document in np.argsort(held_out.hashes, kind="stable").tolist():
            for places in split_answers(held_out.document(document)[1][: self.shape.tokens]):
                if shortest is None or len(places) < len(shortest[1]):
                    shortest = (document, places)
                if len(places) > left:
                    # Going on to shorter answers would favour them. One answer at least is looked at.
                    return chosen or [shortest]
                chosen.append((document, places))
                left -= len(places)
        return chosen

    # -- facts

    def packing(self) -> Packing:
        placed = self._placed
        tokens = int(self._lengths[placed].sum())
        eligible = [int(self._eligible[placed[row]].sum()) for row in self._rows]
        anchors = sum(min(count, self.shape.anchors) for count in eligible)
        return Packing(
            documents=len(placed),
            unused=int((self._eligible == 0).sum()),
            cut=int((self.documents.lengths > self.shape.tokens).sum()),
            rows=len(self._rows),
            fill=tokens / (len(self._rows) * self.shape.tokens),
            supervised=int(supervised_counts(self.documents, self.shape.tokens)[placed].sum()),
            eligible=sum(eligible),
            anchors=anchors,
            padded_slots=self._padded_slots(),
        )

    def _padded_slots(self) -> float:
        looked = range(min(32, len(self._rows)))
        used = sum(int((self.batch(index).weights_AB > 0).sum()) for index in looked)
        return 1 - used / (len(looked) * self.shape.anchors * (self.shape.block_size - 1))

    def digest(self, n: int) -> str:
        """Hash of every tensor of the first n batches: equal wherever the inputs are."""
        digest = hashlib.sha256()
        for index in range(n):
            digest.update(batch_bytes(self.batch(index)))
        return digest.hexdigest()


def batch_bytes(batch: TokenBatch) -> bytes:
    """All tensors of a batch, little-endian, one after another."""
    tensors = (
        batch.ids_S,
        batch.positions_S,
        batch.documents_S,
        batch.supervised_S,
        batch.anchors_A,
        batch.starts_A,
        batch.labels_AB,
        batch.weights_AB,
    )
    return b"".join(np.ascontiguousarray(item.numpy()).tobytes() for item in tensors)


def slot_weights(block_size: int, gamma: float) -> np.ndarray:
    """float32 [B]: 0 for slot 0, exp(-(j - 1) / gamma) for slot j, but no 0: that would mean a slot without label."""
    least = float(np.finfo(np.float32).tiny)
    weights = [max(least, math.exp(-(slot - 1) / gamma)) for slot in range(1, block_size)]
    return np.asarray([0.0, *weights], dtype=np.float32)


def label_blocks(
    ids_S: np.ndarray, owners_S: np.ndarray, supervised_S: np.ndarray, anchors_A: np.ndarray, weights_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Labels int64 [A, B] and weights float32 [A, B] of blocks; tokens of another document are labelled 0."""
    S, B = len(ids_S), len(weights_B)
    places = anchors_A[:, None] + np.arange(B)[None, :]
    inside = np.minimum(places, S - 1)
    own = (places < S) & (owners_S[inside] == owners_S[anchors_A][:, None])
    counts = np.logical_and.accumulate(own & supervised_S[inside], axis=1)
    return np.where(own, ids_S[inside], 0), np.where(counts, weights_B[None, :], 0).astype(np.float32)


def eligible_places(supervised: np.ndarray) -> np.ndarray:
    """int64: positions of a document whose own and next token are supervised."""
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def split_answers(supervised: np.ndarray) -> list[np.ndarray]:
    """Eligible positions of a document, one array for each run of supervised tokens (an answer)."""
    places = eligible_places(supervised)
    return [item for item in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(item)]


def eligible_counts(documents: Documents, limit: int) -> np.ndarray:
    """int64 [n]: eligible positions within each document's first `limit` tokens."""
    return _counts(documents, limit, pairs=True)


def supervised_counts(documents: Documents, limit: int) -> np.ndarray:
    """int64 [n]: supervised tokens within each document's first `limit` tokens."""
    return _counts(documents, limit, pairs=False)


def _counts(documents: Documents, limit: int, *, pairs: bool) -> np.ndarray:
    """Counted over stretches of about four million tokens, so that the mask is never in memory as a whole."""
    offsets = np.asarray(documents.offsets)
    counts = np.zeros(len(documents), np.int64)
    first = 0
    while first < len(documents):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + (1 << 22), side="right")) - 1)
        low, high = int(offsets[first]), int(offsets[last])
        mask = np.asarray(documents.supervised[low:high]).astype(np.int64)
        if pairs:
            mask[:-1] *= mask[1:]
            mask[offsets[first + 1 : last + 1] - low - 1] = 0  # a document's last token has no next
        total = np.concatenate([[0], np.cumsum(mask)])
        ends = np.minimum(offsets[first + 1 : last + 1], offsets[first:last] + limit) - low
        cut = offsets[first + 1 : last + 1] - offsets[first:last] > limit
        if pairs:
            ends = ends - cut  # the last token kept of a cut document has no next either
        counts[first:last] = total[ends] - total[offsets[first:last] - low]
        first = last
    return counts


def _copy_numbers(placed: np.ndarray) -> np.ndarray:
    """0, 1, 2, … within each run of equal documents."""
    starts = np.flatnonzero(np.concatenate([[True], placed[1:] != placed[:-1]]))
    return np.arange(len(placed)) - np.repeat(starts, np.diff(np.append(starts, len(placed))))


def _random(seed: int, purpose: int, epoch: int, item: int, copy: int, count: int) -> np.ndarray:
    """uint64 [count] of the Philox generator; raw words, because only those never change between versions."""
    generator = np.random.Philox(counter=[0, copy, item, epoch], key=[seed, purpose])
    return generator.random_raw(count)


def _padded(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(shape, values.dtype)
    padded[: len(values)] = values
    return padded


@dataclass
class _Piece:
    """Anchors of one document in one evaluation row, with the answer that each belongs to."""

    document: int
    anchors: np.ndarray
    numbers: np.ndarray


def _fill_rows(answers: list[tuple[int, np.ndarray]], lengths: np.ndarray, shape: BatchShape) -> Iterator[list[_Piece]]:
    """Pack documents with all their anchors into rows, in order; a document goes on in the next row if it must."""
    row: list[_Piece] = []
    tokens, anchors = shape.tokens, shape.anchors
    for piece in _pieces(answers):
        rest = piece
        while len(rest.anchors):
            if anchors == 0 or int(lengths[rest.document]) > tokens:
                yield row
                row, tokens, anchors = [], shape.tokens, shape.anchors
            taken = min(anchors, len(rest.anchors))
            row.append(_Piece(rest.document, rest.anchors[:taken], rest.numbers[:taken]))
            rest = _Piece(rest.document, rest.anchors[taken:], rest.numbers[taken:])
            tokens -= int(lengths[rest.document])
            anchors -= taken
    if row:
        yield row


def _pieces(answers: list[tuple[int, np.ndarray]]) -> Iterator[_Piece]:
    """Answers of one document joined; an answer's number is its place in the list."""
    start = 0
    for end in range(1, len(answers) + 1):
        if end == len(answers) or answers[end][0] != answers[start][0]:
            group = range(start, end)
            places = np.concatenate([answers[item][1] for item in group])
            numbers = np.concatenate([np.full(len(answers[item][1]), item, np.int64) for item in group])
            yield _Piece(answers[start][0], places, numbers)
            start = end
