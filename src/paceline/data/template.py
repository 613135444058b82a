"""A chat template -> token ids with the supervised mask, for any template, checked for each row.

Rendering and masking are apart: the ids of a document are those of the template's own text, whatever is masked. Which
of them the target wrote is found in the text and carried over to tokens:

1. For each assistant turn k the prompt P is the rendering of the messages before it with the generation prompt, and F
   the rendering up to and with the turn. F must begin with P. What follows, up to and with the first end-of-sequence
   token after the answer's content, is what the target emitted; the rest of F is the template's.
2. Where the template has generation tags, they say where the turn's text lies instead (and the end-of-sequence token
   that follows is still taken in, what follows that still left out).
3. If F up to the turn's end is how the longer conversation begins, the turn is supervised there. If not (templates that
   strip reasoning from history), the turn becomes a document of its own: F, as it was when the target wrote it.

A token is supervised if all its characters were emitted by the target and the prompt's ids are those that the target
would have been given.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import transformers
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from paceline.data.rows import Conversation, Message, RowError, excerpt
from paceline.data.tags import CLOSE, OPEN, Span, mark_tags, marks, pin_dates
from paceline.errors import UserError

_PROBE = "\ue0f2"
_THINK_END = "\n</think>\n\n"


@dataclass(frozen=True)
class Document:
    """Text as the target saw and wrote it. `spans` are the character ranges that it wrote; `prompts` their prompts."""

    text: str
    spans: tuple[Span, ...]
    prompts: tuple[int, ...]
    """Where the prompt of each span ends; as many as spans."""


@dataclass(frozen=True)
class Tokens:
    """int32 ids and a bool mask, always of one length, with what there is to note about them."""

    ids: np.ndarray
    supervised: np.ndarray
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Turn:
    text: str
    prompt: int
    end: int
    spans: tuple[Span, ...]


@dataclass
class Template:
    """The chat template of a tokenizer, ready to render and mask. Pickles, so that processes can share the work."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    thinking: Literal["template", "on", "off"] = "template"
    _starts: dict[str, list[int]] = field(default_factory=dict, repr=False)
    _special: frozenset[int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        source = self.tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default") or next(iter(source.values()))
        self.source: str = pin_dates(source) if isinstance(source, str) else ""
        self.marked = mark_tags(self.source)
        self.ends = tuple(text for item in self.eos_ids if (text := self._spelling(item)))
        self._prompts: bool | None = None

    def _spelling(self, token: int) -> str:
        added = self.tokenizer.added_tokens_decoder
        return str(added[token]) if token in added else str(self.tokenizer.decode([token]))

    def fingerprint(self) -> str:
        """Hash of everything here that decides ids and masks."""
        tokenizer: Any = self.tokenizer
        model = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
        added = {str(key): repr(value) for key, value in tokenizer.added_tokens_decoder.items()}
        facts = [type(tokenizer).__name__, model, added, dict(tokenizer.special_tokens_map), self.source]
        settings = [self.eos_ids, self.thinking, transformers.__version__]
        return hashlib.sha256(json.dumps([facts, settings], sort_keys=True, default=str).encode()).hexdigest()

    # -- rendering

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, prompt: bool = False) -> str:
        """The template's text, with the generation prompt where `prompt`. Raises RowError `template-refused`."""
        return self._render(self.source, messages, tools, prompt)

    def _render(self, source: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: bool) -> str:
        if not source:
            raise UserError(
                "the tokenizer has no chat template, and the data holds conversations",
                "set target.chat_template to a Jinja file, or bring pre-rendered text (data.shape = 'text')",
            )
        switches: dict[str, Any] = {} if self.thinking == "template" else self._switches()
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=source,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **switches,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            # Templates are programs of other people: what they raise on a conversation is that row's fault.
            raise RowError("template-refused", excerpt(f"{error}")) from None

    def _switches(self) -> dict[str, Any]:
        on = self.thinking == "on"
        return {"enable_thinking": on, "thinking": on}

    @property
    def prompts(self) -> bool:
        """Whether the template writes anything for the generation prompt."""
        if self._prompts is None:
            ask: list[Message] = [{"role": "user", "content": "x"}]
            try:
                self._prompts = self.render(ask, prompt=True) != self.render(ask)
            except RowError:
                self._prompts = "add_generation_prompt" in self.source
        return self._prompts

    # -- which text the target wrote

    def documents(self, conversation: Conversation) -> tuple[list[Document], list[str]]:
        """The documents of a conversation, and notes. Raises RowError where no answer can be placed for certain."""
        if conversation.text:
            return [self.parse_text(conversation.text)], []
        messages, tools = list(conversation.messages), conversation.tools
        answers = [place for place, item in enumerate(messages) if item["role"] == "assistant"]
        if not answers:
            raise RowError("no-answer", excerpt(messages[-1].get("content", "")))
        notes = ["trailing-prompt"] if answers[-1] + 1 < len(messages) else []
        cut = answers[-1] if conversation.truncated else -1
        turns = [self._turn(messages[: place + 1], tools, notes, cut=place == cut) for place in answers]
        documents = _merged(turns)
        notes += ["rewritten-turns"] * (len(documents) - 1)
        return documents, notes

    def _turn(self, messages: list[Message], tools: Sequence[dict[str, Any]], notes: list[str], cut: bool) -> _Turn:
        prompt = self.render(messages[:-1], tools, prompt=True)
        full = self.render(messages, tools)
        if not full.startswith(prompt):
            prompt, full = self._rejoined(prompt, full, messages, tools)
        content_end, head = self._content(messages, tools, full, len(prompt))
        start = len(prompt)
        if not self.prompts and full[start : start + head].strip():
            start += head  # nobody but the template writes the header, so it is not the target's
        # An answer that was cut off has no end token of the target's own: only the template closes it.
        end, ended = (content_end, True) if cut else self._end(full, content_end)
        if not ended:
            notes.append("no-end-token")
        spans = self._tagged(messages, tools, full, len(prompt), end) if self.marked else ()
        if self.marked and not spans:
            notes.append("tags-unused")
        return _Turn(full, len(prompt), end, spans or ((start, end),))

    def _content(
        self, messages: list[Message], tools: Sequence[dict[str, Any]], full: str, start: int
    ) -> tuple[int, int]:
        """Where the answer's content ends in `full`, and how many characters stand between the prompt and it."""
        answer = messages[-1]
        content = answer.get("content", "")
        tail = full[start:]
        leaves = _leaves(answer.get("tool_calls", []))
        plain = self.prompts and not leaves and not answer.get("reasoning_content") and "</think>" not in content
        for form in (content, content.strip()):
            if form and plain and tail.startswith(form):
                return start + len(form), 0
        head, trail = self._around(messages, tools, start)
        if not tail.endswith(trail):
            trail = ""
        end = len(tail) - len(trail) if trail or not content else 0
        held = tail[:end] if end else tail
        if content.strip() and not _holds(held, content):
            raise RowError("answer-not-found", excerpt(f"looked for {excerpt(content, 80)!r} in {tail!r}"))
        found = [tail.rfind(leaf) + len(leaf) for leaf in leaves if leaf in tail]
        return start + max([end if not leaves or content else 0, *found]), head

    def _around(self, messages: list[Message], tools: Sequence[dict[str, Any]], start: int) -> tuple[int, str]:
        """What the template writes before and after a content: rendered with a probe in its place."""
        probe = {**messages[-1], "content": _PROBE}
        try:
            text = self.render([*messages[:-1], probe], tools)
        except RowError:
            return 0, ""
        place = text.rfind(_PROBE)
        return (max(0, place - start), text[place + len(_PROBE) :]) if place >= 0 else (0, "")

    def _end(self, full: str, content_end: int) -> tuple[int, bool]:
        """Where the first end-of-sequence token at or after the content ends; the content's end where there is none."""
        found = [(place, place + len(text)) for text in self.ends if (place := full.find(text, content_end)) >= 0]
        return (min(found)[1], True) if found else (content_end, False)

    def _rejoined(
        self, prompt: str, full: str, messages: list[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, str]:
        """Prompt and text of a turn as they were when it was written, where `full` does not begin with the prompt.

        Two kinds of template do that: the prompt opens a reasoning part that rendered answers lack, or an answer
        changes how the turns before it are rendered.
        """
        answer = messages[-1]
        if prompt.rstrip().endswith("<think>") and full.startswith(prompt[: prompt.rindex("<think>")]):
            return self._with_reasoning(prompt, full[prompt.rindex("<think>") :], answer)
        before = self.render(messages[:-1], tools)
        opening = prompt[len(before) :] if prompt.startswith(before) else ""
        other = self.render([*messages[:-1], _replaced(answer)], tools)
        shared = full[: _common(full, other)]
        if not opening or opening not in shared:
            raise RowError("answer-not-found", excerpt(f"{full[-300:]!r} does not go on from {prompt[-100:]!r}"))
        return prompt, prompt + full[shared.rindex(opening) + len(opening) :]

    def _with_reasoning(self, prompt: str, tail: str, answer: Message) -> tuple[str, str]:
        """The same where the prompt opens a reasoning part; `tail` is what the template makes of the answer."""
        inline, closed, _ = answer.get("content", "").partition("</think>")
        if answer.get("reasoning_content"):
            return prompt, prompt + answer["reasoning_content"].strip() + _THINK_END + tail
        if closed:  # the text itself as the target wrote it, but for what the prompt holds already
            return prompt, prompt + inline.lstrip().removeprefix("<think>").lstrip("\n") + closed + tail
        if self.thinking != "off":
            raise RowError("reasoning-missing", excerpt(tail))
        prompt = prompt.rstrip("\n") + "\n" + _THINK_END
        return prompt, prompt + tail

    def _tagged(
        self, messages: list[Message], tools: Sequence[dict[str, Any]], full: str, start: int, end: int
    ) -> tuple[Span, ...]:
        """Spans of the last turn by the template's generation tags; none where they cannot be trusted."""
        if any(mark in full for mark in (OPEN, CLOSE)):
            return ()
        text = self._render(self.marked, messages, tools, False)
        if text.replace(OPEN, "").replace(CLOSE, "") != full:
            return ()
        spans = [(low, high) for low, high in marks(text) if high > start and low < end]
        if not spans:
            return ()
        # The emitted end-of-sequence token belongs to the turn whether the tags hold it or not.
        fixed = [(max(low, start), min(high, end)) for low, high in spans]
        fixed[-1] = (fixed[-1][0], end)
        return tuple(fixed)

    def parse_text(self, text: str) -> Document:
        """Spans of pre-rendered text by the template's own markers. Raises RowError `no-answer-marker`."""
        if not self.source:
            return Document(text, ((0, len(text)),), (0,))
        opening = self.opening()
        places = [match.end() for match in re.finditer(re.escape(opening), text)] if opening else []
        if not places:
            raise RowError("no-answer-marker", f"looked for {opening!r} in: {excerpt(text, 200)}")
        stops = [*(place - len(opening) for place in places[1:]), len(text)]
        spans = [(place, min(self._end(text, place)[0], stop)) for place, stop in zip(places, stops, strict=True)]
        spans = [(low, high if high > low else stop) for (low, high), stop in zip(spans, stops, strict=True)]
        return Document(text, tuple(spans), tuple(places))

    def opening(self) -> str:
        """The text with which the template opens an assistant turn."""
        ask: list[Message] = [{"role": "user", "content": "x"}]
        before = self.render(ask)
        prompt = self.render(ask, prompt=True)
        if prompt != before and prompt.startswith(before):
            return prompt[len(before) :]
        answered = self.render([*ask, {"role": "assistant", "content": _PROBE}])
        return answered[_common(before, answered) : answered.index(_PROBE)] if _PROBE in answered else ""

    # -- tokens

    def tokenise(self, documents: Sequence[Document], limit: int) -> list[Tokens]:
        """Ids and masks of documents, cut to `limit` tokens. Many in one call use the tokenizer's threads."""
        texts = [document.text for document in documents]
        if not texts:
            return []
        batch = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        encodings = batch.encodings
        return [
            self._masked(document, batch["input_ids"][place], encodings[place] if encodings else None, limit)
            for place, document in enumerate(documents)
        ]

    def _masked(self, document: Document, ids: list[int], encoding: Any, limit: int) -> Tokens:
        supervised = np.zeros(len(ids), dtype=bool)
        notes: list[str] = []
        for (low, high), prompt in zip(document.spans, document.prompts, strict=True):
            first, last, joined = self._token_range(document.text, ids, encoding, low, high, prompt)
            supervised[first:last] = True
            notes += ["joined-start"] * joined
        if len(ids) > limit:
            notes.append("cut")
        return Tokens(np.asarray(ids[:limit], dtype=np.int32), supervised[:limit], tuple(notes))

    def _token_range(
        self, text: str, ids: list[int], encoding: Any, low: int, high: int, prompt: int
    ) -> tuple[int, int, bool]:
        """First and last + 1 token that lie wholly inside [low, high), and whether a token straddles the start."""
        if encoding is None:
            return self._range_by_prefixes(text, ids, low, high)
        first, joined = _first_inside(encoding, low, high, len(ids))
        last = _last_inside(encoding, high, len(text), len(ids))
        if low == prompt and not joined and first < len(ids):
            joined = self._prompt_leaks(text, ids, encoding, prompt, first)
            first += joined
        return first, max(first, last), joined

    def _prompt_leaks(self, text: str, ids: list[int], encoding: Any, prompt: int, first: int) -> bool:
        """Whether token `first` holds some of the prompt, though its offsets say not (some tokenizers trim theirs).

        The ids before it are compared with those of the prompt alone, from its last special token on. Where they
        differ the prompt may only be split in another way, so their text decides.
        """
        token = next((place for place in range(first - 1, 0, -1) if ids[place] in self._splitters()), 0)
        begin = encoding.token_to_chars(token)[0] if token else 0
        piece = text[begin:prompt]
        expected = self._starts.get(piece)
        if expected is None:
            expected = self._ids(piece)
            if len(piece) < 200 and len(self._starts) < 1000:
                self._starts[piece] = expected
        found = ids[token:first]
        return found != expected and self._decoded(found) != self._decoded(expected)

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _splitters(self) -> frozenset[int]:
        """Tokens that split the text before anything else, so that encoding starts afresh at them."""
        if self._special is None:
            added = self.tokenizer.added_tokens_decoder.items()
            self._special = frozenset(number for number, token in added if token.special and not token.lstrip)
        return self._special

    def _range_by_prefixes(self, text: str, ids: list[int], low: int, high: int) -> tuple[int, int, bool]:
        """The same without offsets (tokenizers in Python): ids of the text's beginnings are compared."""
        before, until = self._ids(text[:low]), self._ids(text[:high])
        first, last = _common(before, ids), _common(until, ids)
        joined = first < len(before)
        return first + joined, max(first + joined, last), joined

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _merged(turns: list[_Turn]) -> list[Document]:
    """Turns whose text is how a later one begins share its document; the others get one of their own. In order."""
    documents: list[list[_Turn]] = [[turns[-1]]]
    for turn in reversed(turns[:-1]):
        holder = documents[-1][0]
        if holder.prompt >= turn.end and holder.text.startswith(turn.text[: turn.end]):
            documents[-1].append(turn)
        else:
            documents.append([turn])
    return [_document(group) for group in reversed(documents)]


def _document(group: list[_Turn]) -> Document:
    pairs = [(span, turn.prompt) for turn in reversed(group) for span in turn.spans]
    return Document(group[0].text, tuple(span for span, _ in pairs), tuple(prompt for _, prompt in pairs))


def _first_inside(encoding: Any, low: int, high: int, count: int) -> tuple[int, bool]:
    """The first token that begins at or after `low`, and whether the one before it reaches over `low`."""
    token = _token_from(encoding, low, high)
    if token is None:
        return count, False
    if encoding.token_to_chars(token)[0] >= low:
        return token, False
    while token < count and (chars := encoding.token_to_chars(token)) is not None and chars[0] < low:
        token += 1
    return token, True


def _last_inside(encoding: Any, high: int, length: int, count: int) -> int:
    """One more than the last token that ends at or before `high`."""
    token = _token_from(encoding, high, length)
    return count if token is None else token


def _token_from(encoding: Any, low: int, high: int) -> int | None:
    """The token of the first character of [low, high) that belongs to one."""
    for place in range(low, high):
        token = encoding.char_to_token(place)
        if token is not None:
            return int(token)
    return None


def _replaced(answer: Message) -> Message:
    """An answer of the same form in which every text is another."""
    other = {**answer, "content": _PROBE}
    for key in ("reasoning_content", "thinking"):
        if key in answer:
            other[key] = _PROBE
    if "tool_calls" in answer:
        other["tool_calls"] = [{**call, "function": {"name": _PROBE, "arguments": {}}} for call in answer["tool_calls"]]
    return other


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, str) and value else []


def _holds(text: str, content: str) -> bool:
    """Whether the content stands in the text, up to the white space and inline reasoning that templates take away."""
    kept = content.rpartition("</think>")[2].strip()
    return content.strip() in text or kept in text


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
