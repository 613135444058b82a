"""`paceline data show`: what a run would learn from, before it runs.

`gather` collects facts, `screen` and `show_page.page` turn them into a terminal view and an HTML page; none of them
loads a model. Whether answers are the target's own is found by a callable that the caller brings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.batches import BatchShape, TokenBatch
from paceline.config import Config, default_gamma
from paceline.data.corpus import Corpus, open_corpus, said
from paceline.data.documents import Documents
from paceline.data.quarantine import SetAside, check_limits
from paceline.data.rows import NOTES, REASONS, excerpt
from paceline.data.stream import Packing, Stream
from paceline.data.template import Template
from paceline.errors import UserError

NextTokens = Callable[[TokenBatch], Tensor]
"""The target's argmax after each token of a batch: int64 [S]."""

ON_POLICY, SAMPLED = 0.95, 0.7
"""Agreement from which answers are taken for the target's own greedy ones, or its own sampled ones."""
_AGREEMENT_TOKENS = 16384
_SHOWN_TOKENS = 1500
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x9B: 0x241B}
"""Control characters of the data are drawn, never sent to the terminal."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a document's text of one nature."""

    text: str
    supervised: bool
    special: bool


@dataclass(frozen=True)
class Shown:
    """One document, ready to be coloured."""

    title: str
    pieces: tuple[Piece, ...]
    cut: bool
    """Whether the document ends by the limit on tokens, or the view by its own."""


@dataclass(frozen=True)
class Agreement:
    """How often a label is the target's own first choice."""

    equal: int
    looked_at: int

    @property
    def share(self) -> float:
        return self.equal / max(1, self.looked_at)

    @property
    def verdict(self) -> str:
        if self.share >= ON_POLICY:
            return "the target's own greedy answers"
        if self.share >= SAMPLED:
            return "like the target's own answers, sampled or in another precision"
        return "not the target's own answers: a drafter learns another model's text; run `paceline regenerate` first"


@dataclass(frozen=True)
class Facts:
    """Everything that is shown."""

    lines: tuple[str, ...]
    set_aside: SetAside
    documents: tuple[Shown, ...]
    lengths: tuple[tuple[int, int, int], ...]
    """(from, to, count) of documents by tokens."""
    supervised_share: float
    packing: Packing | None
    shape: BatchShape
    agreement: Agreement | None
    complaint: str = ""
    """Why a run would refuse this data; empty where it would not."""


def show(  # noqa: PLR0913 - what the command line brings together
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask_token_id: int,
    eos_ids: tuple[int, ...],
    rows: int = 5,
    html: Path | None = None,
    agreement: NextTokens | None = None,
    console: Console | None = None,
) -> int:
    """Print (and write as a page, where `html` names one) what `config.data` gives. Exit code 1 if a run would refuse.

    Raises UserError where a source is missing or the page cannot be written.
    """
    from paceline.data.show_page import page  # noqa: PLC0415 - only where a page is asked for

    template = Template(tokenizer, eos_ids, config.data.thinking)
    corpus = open_corpus(config.data, template, mask_token_id=mask_token_id, seed=config.run.seed)
    facts = gather(corpus, config, tokenizer, rows=rows, agreement=agreement)
    out = console or Console()
    out.print(screen(facts))
    if html is not None:
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page(facts), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot write {html}: {error.strerror or error}", "name a file in a writable folder"
            ) from None
        out.print(f"written to {html}")
    return 1 if facts.complaint else 0


def gather(
    corpus: Corpus,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    agreement: NextTokens | None = None,
) -> Facts:
    """Look at a corpus as the run of `config` would use it."""
    shape = batch_shape(config)
    complaint, stream = "", None
    try:
        check_limits(corpus.set_aside, config.data.max_set_aside)
        stream = Stream(corpus.train, shape, config.run.seed)
    except UserError as error:
        complaint = str(error)
    documents = corpus.train
    return Facts(
        lines=tuple(said(corpus)),
        set_aside=corpus.set_aside,
        documents=tuple(
            shown(documents, index, tokenizer, config.data.max_tokens) for index in _spread(documents, rows)
        ),
        lengths=histogram(documents.lengths),
        supervised_share=_share(documents),
        packing=stream.packing() if stream else None,
        shape=shape,
        agreement=agree(stream, agreement) if stream and agreement else None,
        complaint=complaint,
    )


def batch_shape(config: Config) -> BatchShape:
    """The shape of a run's batches."""
    block = config.drafter.block_size
    return BatchShape(
        config.training.tokens, config.training.anchors, block, config.training.gamma or default_gamma(block)
    )


def _spread(documents: Documents, rows: int) -> list[int]:
    """Document numbers over the whole set, not its beginning alone."""
    count = min(rows, len(documents))
    return [index * len(documents) // count for index in range(count)]


def _share(documents: Documents) -> float:
    total = len(documents.ids)
    step = 1 << 22
    marked = sum(int(np.count_nonzero(documents.supervised[at : at + step])) for at in range(0, total, step))
    return marked / max(1, total)


def shown(documents: Documents, index: int, tokenizer: PreTrainedTokenizerBase, limit: int) -> Shown:
    """One document in pieces: neighbours of one nature together, so that characters of several tokens stay whole."""
    ids, supervised = documents.document(index)
    cut = len(ids) >= limit or len(ids) > _SHOWN_TOKENS
    ids, supervised = ids[:_SHOWN_TOKENS], supervised[:_SHOWN_TOKENS]
    special = np.isin(ids, np.asarray([*tokenizer.added_tokens_decoder], np.int64))
    nature = supervised.astype(np.int64) * 2 + special
    edges = [0, *(np.flatnonzero(np.diff(nature)) + 1).tolist(), len(ids)]
    pieces = [
        Piece(str(tokenizer.decode(ids[low:high].tolist())), bool(supervised[low]), bool(special[low]))
        for low, high in itertools.pairwise(edges)
        if high > low
    ]
    kind = documents.kind(index)
    title = (
        f"document {index}"
        + (f", {kind}" if kind else "")
        + f": {int(supervised.sum())} of {len(ids)} tokens supervised"
    )
    return Shown(title, tuple(pieces), cut)


def histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """(from, to, count) over bins that double: 1-15, 16-31, 32-63, …"""
    if not len(lengths):
        return ()
    edges = [1, 16]
    while edges[-1] <= int(lengths.max()):
        edges.append(edges[-1] * 2)
    counts = np.histogram(lengths, bins=edges)[0]
    return tuple((low, high - 1, int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False))


def agree(stream: Stream, next_tokens: NextTokens) -> Agreement:
    """Compare labels with the target's argmax over some thousand tokens of the first batches."""
    equal = looked = seen = 0
    for index in range(stream.batches_per_epoch):
        if seen >= _AGREEMENT_TOKENS:
            break
        batch = stream.batch(index)
        seen += batch.ids_S.numel()
        chosen = next_tokens(batch).cpu()
        # The last token of a prompt predicts the answer's first, which is the target's own too.
        labelled = batch.supervised_S[1:] & (batch.documents_S[1:] == batch.documents_S[:-1])
        equal += int((chosen[:-1] == batch.ids_S[1:])[labelled].sum())
        looked += int(labelled.sum())
    return Agreement(equal, looked)


# -- the terminal


def screen(facts: Facts) -> RenderableType:
    """The terminal view."""
    parts: list[RenderableType] = [coloured(item) for item in facts.documents]
    parts.append(
        Text("green: the target wrote it and it is learnt; dim: context; bold: special tokens", style="italic")
    )
    parts.append(Text("\n".join(facts.lines)))
    if facts.set_aside.reasons:
        parts.append(_reasons(facts.set_aside))
    parts.append(_lengths(facts.lengths))
    parts.append(_numbers(facts))
    if facts.complaint:
        parts.append(Panel(Text(facts.complaint), title="a run would refuse this data", border_style="red"))
    return Group(*parts)


def coloured(item: Shown) -> Panel:
    text = Text()
    for piece in item.pieces:
        style = ("green" if piece.supervised else "dim") + (" bold" if piece.special else "")
        text.append(piece.text.translate(_VISIBLE), style)
    if item.cut:
        text.append(" … cut", "red")
    return Panel(text, title=item.title, title_align="left")


def _reasons(set_aside: SetAside) -> Table:
    table = Table("rows", "reason", "first", "example", title="set aside", title_justify="left")
    for name, reason in sorted(set_aside.reasons.items(), key=lambda item: -item[1].count):
        first = Text(reason.places[0] if reason.places else "")
        table.add_row(f"{reason.count:,}", f"{name}\n{REASONS[name]}", first, Text(excerpt(reason.example, 120)))
    return table


def _lengths(lengths: tuple[tuple[int, int, int], ...]) -> Table:
    table = Table("tokens", "documents", "", title="length of documents", title_justify="left", box=None)
    most = max((count for _, _, count in lengths), default=1) or 1
    for low, high, count in lengths:
        table.add_row(f"{low:,} to {high:,}", f"{count:,}", "█" * round(40 * count / most))
    return table


def numbers(facts: Facts) -> list[tuple[str, str]]:
    """Names and values of what a run would get, for either view."""
    found = [("supervised share of tokens", f"{facts.supervised_share:.1%}")]
    duplicates = facts.set_aside.notes.get("duplicates", 0)
    found.append(("duplicates", f"{duplicates:,} {NOTES['duplicates']}"))
    packing = facts.packing
    if packing is not None:
        shape = f"{facts.shape.tokens:,} tokens, {facts.shape.anchors:,} anchors, blocks of {facts.shape.block_size}"
        found += [
            ("shape of a batch", shape),
            ("batches of an epoch", f"{packing.rows:,}"),
            ("packing fill", f"{packing.fill:.1%}"),
            ("anchors per supervised token", f"{packing.anchors_per_supervised:.3f}"),
            ("label slots that weigh nothing", f"{packing.padded_slots:.1%}"),
            ("documents cut to a batch's tokens", f"{packing.cut:,}"),
            ("documents without an anchor", f"{packing.unused:,}"),
        ]
    if facts.agreement is not None:
        looked = f"{facts.agreement.share:.1%} of {facts.agreement.looked_at:,} labels"
        found.append(("agreement with the target", f"{looked}: {facts.agreement.verdict}"))
    return found


def _numbers(facts: Facts) -> Table:
    table = Table("", "", box=None, show_header=False)
    for name, value in numbers(facts):
        table.add_row(name, Text(value))
    return table
