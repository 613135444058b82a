"""What an answer is, seen from its text alone: looping or not, and where its reasoning ends."""

from __future__ import annotations

from paceline.data.rows import Message

_TAIL = 4000
_REPEATS = 4
_LEAST = 120
_WORDS = 8


def is_looping(text: str) -> bool:
    """Whether a text ends in one stretch repeated over and over, or is mostly repetition.

    Looping is a tail of at least 120 characters that is one period four times or more, or a text of 100 words and more
    of whose runs of eight words more than half occurred before.
    """
    return _periodic_tail(text.rstrip()[-_TAIL:]) or _mostly_repeated(text.split())


def _periodic_tail(text: str) -> bool:
    """By the Z-function of the reversed text: how far it agrees with itself shifted by each period."""
    backwards = text[::-1]
    agrees = _z_function(backwards)
    return any(
        agrees[period] + period >= max(_LEAST, _REPEATS * period) for period in range(1, len(backwards) // _REPEATS + 1)
    )


def _z_function(text: str) -> list[int]:
    """For each place, the length of the common beginning of the text and of its rest from there."""
    found = [0] * max(1, len(text))
    low = high = 0
    for place in range(1, len(text)):
        length = min(high - place, found[place - low]) if place < high else 0
        while place + length < len(text) and text[length] == text[place + length]:
            length += 1
        if place + length > high:
            low, high = place, place + length
        found[place] = length
    return found


def _mostly_repeated(words: list[str]) -> bool:
    if len(words) < 100:
        return False
    runs = [tuple(words[place : place + _WORDS]) for place in range(len(words) - _WORDS + 1)]
    return len(set(runs)) < len(runs) / 2


def split_reasoning(text: str, prompt_tail: str) -> Message:
    """An assistant message from what was written; reasoning in <think> tags is taken out of the content."""
    opened = text.lstrip().startswith("<think>") or prompt_tail.rstrip().endswith("<think>")
    if not opened or "</think>" not in text:
        return {"role": "assistant", "content": text}
    reasoning, _, content = text.partition("</think>")
    reasoning = reasoning.strip().removeprefix("<think>").strip()
    message: Message = {"role": "assistant", "content": content.strip()}
    return message | ({"reasoning_content": reasoning} if reasoning else {})
