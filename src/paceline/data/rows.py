"""What a source yields: a row is a conversation or the named reason why it is not one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

REASONS: dict[str, str] = {
    "not-json": "the line or element is not valid JSON",
    "not-utf8": "the bytes are not UTF-8, or the text holds half of a surrogate pair",
    "cut-off": "the file ends in the middle of this row",
    "row-too-large": "the row is larger than 64 MiB",
    "unreadable-file": "the file is damaged from here on",
    "wrong-shape": "the row has none of the keys of the shape that was asked for or detected",
    "no-messages": "the list of messages is empty",
    "empty-text": "pre-rendered text of length zero",
    "bad-message": "a message is not an object with a role and a content",
    "unknown-role": "a message has a role that is not system, user, assistant or tool",
    "null-content": "a message has no content and no tool call",
    "content-not-text": "a content is a number, an object, an image or another thing that is not text",
    "starts-with-assistant": "the first turn is the assistant's: the prompt that it answers is missing",
    "roles-out-of-order": "two turns of one role follow each other, or a tool result follows no tool call",
    "no-answer": "there is no assistant turn to learn from (write answers with `paceline regenerate`)",
    "bad-tools": "the tools or tool calls are not lists of objects",
    "template-refused": "the chat template raised an error for this conversation",
    "answer-not-found": "the rendered text does not hold the answer where the prompt ends",
    "reasoning-missing": "the template's prompt opens a reasoning part and the row has none (see data.thinking)",
    "no-answer-marker": "pre-rendered text without the marker that opens an assistant turn in the chat template",
    "holds-mask-token": "the text holds the mask token, which must never occur in text",
    "no-labels": "no answer has two tokens (the first is known from the prefill and is never a label)",
    "cut-before-answer": "cut to data.max_tokens, nothing of an answer is left",
    "near-held-out": "the same conversation, or nearly, is in the held-out set",
}
"""Every reason for which a row is set aside, with its meaning."""

NOTES: dict[str, str] = {
    "cut": "documents cut to data.max_tokens",
    "joined-start": "answers whose first token also holds the end of the prompt: that token is not supervised",
    "no-end-token": "answers after which the template writes no end-of-sequence token",
    "rewritten-turns": "documents made for an earlier turn because the template rewrites history",
    "tags-unused": "answers outside the template's generation tags, found by rendering prefixes instead",
    "unlabelled": "documents left out because no answer in them has two tokens, beside others of their row that do",
    "duplicates": "rows that repeat another row's content exactly",
    "trailing-prompt": "conversations whose last turns, after the last answer, were left out",
}
"""What is counted without setting a row aside."""


@dataclass(frozen=True)
class Place:
    """Where a row stands: a file (or data set) and a 1-based number, of the line in JSONL and of the row elsewhere."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Problem:
    """Why a row is set aside. `example` is what a person needs to see, cut to a few hundred characters."""

    reason: str
    example: str = ""

    def __post_init__(self) -> None:
        assert self.reason in REASONS, self.reason


class RowError(Exception):
    """Raised inside the room where a row turns out to be unusable; always caught and counted."""

    def __init__(self, reason: str, example: str = "") -> None:
        super().__init__(reason)
        self.problem = Problem(reason, example)


@dataclass(frozen=True)
class Conversation:
    """Checked messages, or (for pre-rendered rows) text that already holds the template's markers."""

    messages: tuple[Message, ...] = ()
    kind: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""
    truncated: bool = False
    """The last answer was cut off while the target wrote it: the template's end token is not the target's own."""

    def words(self) -> str:
        """The text by which near-duplicates are recognised: what users wrote, or all of it where nobody did."""
        users = [str(item.get("content", "")) for item in self.messages if item["role"] == "user"]
        return "\n".join(users) or self.text or "\n".join(str(item.get("content", "")) for item in self.messages)


@dataclass(frozen=True)
class Row:
    """One row of a source, usable or not: exactly one of `conversation` and `problem` is set."""

    place: Place
    source: int
    """Number of the entry of `data.train` (or `data.held_out`) that the row came from."""
    shape: str = ""
    conversation: Conversation | None = None
    problem: Problem | None = None


def excerpt(value: object, limit: int = 400) -> str:
    """The beginning of a value as printable text."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else text[:limit] + " …"
