"""`paceline regenerate`: read prompts, have them answered, keep what is good."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from paceline.data.rows import REASONS, Conversation
from paceline.data.sources import read
from paceline.errors import UserError
from paceline.regenerate.draft import Draft, prompt_key
from paceline.regenerate.endpoint import Endpoint
from paceline.regenerate.journal import Journal
from paceline.regenerate.options import RegenerateOptions
from paceline.regenerate.output import flagged_path, write_outputs
from paceline.regenerate.progress import Progress


class Body(Protocol):
    """What answers drafts."""

    def write(self, drafts: Iterable[Draft]) -> Iterator[Draft]: ...


def regenerate(options: RegenerateOptions, report: Callable[[str], None] = print) -> int:
    """Answer every prompt of `options.sources` and write `options.output`; go on from an earlier start.

    Rows are told apart by the hash of their prompts: the input may be shuffled or grow between starts, no row is lost
    and none is answered twice. Whenever it ends (also by an interrupt), the output holds what is done so far.

    Returns 0 when every row has an answer, 1 when some failed. Raises UserError.
    """
    options.check()
    keys = _read_keys(options, report)
    body, options, template = _body(options)
    journal_path = Path(options.output).with_suffix(".journal.jsonl")
    with Journal(journal_path, options.fingerprint(template)) as journal:
        waiting = {key for key in keys if not journal.is_done(key)}
        if len(waiting) < len(keys):
            report(f"regenerate: {len(keys) - len(waiting):,} of {len(keys):,} rows were answered by an earlier start")
        try:
            _answer_all(body, journal, _drafts(options, waiting), Progress(len(waiting), report))
        finally:
            _finish(journal, keys, options, report)
        return int(any(not journal.is_done(key) for key in keys))


def _body(options: RegenerateOptions) -> tuple[Body, RegenerateOptions, str]:
    """What answers, the options with the served name filled in, and the text of the template that renders here."""
    if options.endpoint:
        endpoint = Endpoint(options)
        return endpoint, dataclasses.replace(options, served_name=endpoint.name), ""
    from paceline.regenerate.in_process import Writer  # noqa: PLC0415  (torch and transformers: seconds to import)

    writer = Writer(options)
    return writer, options, writer.template.source


def _answer_all(body: Body, journal: Journal, drafts: Iterable[Draft], progress: Progress) -> None:
    """Write finished rows as they come: each is on disk before it counts."""
    for draft in body.write(drafts):
        journal.append([draft.record()])
        progress.add(draft.tokens, draft.flags)


def _finish(journal: Journal, keys: list[str], options: RegenerateOptions, report: Callable[[str], None]) -> None:
    output = Path(options.output)
    good, flagged = write_outputs(journal, keys, output, options.keep)
    report(f"regenerate: {good:,} rows in {output}")
    if flagged:
        counts = Counter(flag for key in keys if key in journal.entries for flag in journal.entries[key].flags)
        named = ", ".join(f"{count} {flag}" for flag, count in sorted(counts.items()))
        report(f"regenerate: {flagged:,} rows in {flagged_path(output)} ({named})")
    if journal.broken:
        report(f"regenerate: {journal.broken} lines of {journal.path} were damaged; their rows were answered again")


def _conversations(options: RegenerateOptions, problems: Counter[str]) -> Iterator[Conversation]:
    """Usable conversations of the sources; the rest is counted by reason."""
    for row in read(options.sources, options.shape):
        if row.problem is not None:
            problems[row.problem.reason] += 1
        elif row.conversation is None or not row.conversation.messages:
            problems["wrong-shape"] += 1
        else:
            yield row.conversation


def _read_keys(options: RegenerateOptions, report: Callable[[str], None]) -> list[str]:
    """Keys of the prompts, in order, each once. Memory is about a hundred bytes a row; the text is read again later."""
    problems: Counter[str] = Counter()
    keys: dict[str, None] = {}
    repeated = 0
    for conversation in _conversations(options, problems):
        key = prompt_key(conversation)
        repeated += key in keys
        keys[key] = None
        if options.limit and len(keys) == options.limit:
            break
    for reason, count in sorted(problems.items()):
        report(f"regenerate: {count:,} rows set aside: {reason} ({REASONS[reason]})")
    if repeated:
        report(f"regenerate: {repeated:,} rows repeat another row's prompt and are answered once")
    if not keys:
        raise UserError(f"no prompts in {', '.join(options.sources)}", "give conversations or prompts")
    return list(keys)


def _drafts(options: RegenerateOptions, waiting: set[str]) -> Iterator[Draft]:
    """Drafts of the prompts that still wait, each once."""
    left = set(waiting)
    for conversation in _conversations(options, Counter()):
        if not left:
            return
        key = prompt_key(conversation)
        if key in left:
            left.discard(key)
            yield Draft(key, conversation)
