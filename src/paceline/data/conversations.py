"""A parsed row, in any of the shapes that people keep conversations in -> checked messages.

Nothing is repaired by guessing: a row that does not say who spoke, or whose turns do not follow each other, is set
aside by a named reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.data.rows import Conversation, Message, RowError, excerpt

SHAPES = ("messages", "sharegpt", "completion", "alpaca", "prompt", "text")

# As the chat formats spell them; dumps in the ShareGPT spelling name the model that answered.
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_LISTS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog")
_QUESTIONS = ("prompt", "question", "query", "input")
_ANSWERS = ("completion", "response", "answer", "output", "chosen")
_KINDS = ("kind", "category", "task")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEEPEST = 64
_KEPT = ("tool_call_id", "name")


def detect(value: Any) -> str:
    """The shape of one parsed row, by its keys; empty where it has none. A bare list is `messages`."""
    if isinstance(value, list):
        return "messages"
    return _detect_keys(value) if isinstance(value, Mapping) else ""


def _detect_keys(value: Mapping[str, Any]) -> str:
    for key in _LISTS:
        if isinstance(value.get(key), list):
            return "sharegpt" if _speaks_sharegpt(value[key]) else "messages"
    if "instruction" in value and _first(value, _ANSWERS):
        return "alpaca"
    if _first(value, _QUESTIONS):
        return "completion" if _first(value, _ANSWERS) else "prompt"
    return "prompt" if "instruction" in value else "text" if "text" in value else ""


def _speaks_sharegpt(items: list[Any]) -> bool:
    first = items[0] if items else None
    return isinstance(first, Mapping) and "from" in first and "role" not in first


def _first(value: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next((key for key in keys if value.get(key) is not None), "")


def convert(value: Any, shape: str = "auto") -> tuple[str, Conversation]:
    """The row's shape and its checked conversation. Raises RowError (a named reason) where it is not one."""
    found = detect(value) if shape == "auto" else shape
    if not found or not isinstance(value, list | Mapping):
        raise RowError("wrong-shape", excerpt(_brief(value)))
    row: Mapping[str, Any] = {"messages": value} if isinstance(value, list) else value
    conversation = _READERS[found](row)
    check_text(conversation.text)
    return found, conversation


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with the keys {', '.join(map(str, list(value)[:12])) or 'none'}"
    return f"{type(value).__name__}: {value!r}"


def _kind(row: Mapping[str, Any]) -> str:
    value = row.get(_first(row, _KINDS))
    return value[:80] if isinstance(value, str) else ""


def _cut_off(row: Mapping[str, Any]) -> bool:
    """Whether the last answer is marked as cut off: by a field of its own, or by `regenerate`'s flags."""
    flags = row.get("flags")
    return row.get("truncated") is True or (isinstance(flags, list) and "truncated" in flags)


def _from_list(row: Mapping[str, Any]) -> Conversation:
    key = next((name for name in _LISTS if isinstance(row.get(name), list)), "")
    if not key:
        raise RowError("wrong-shape", excerpt(_brief(row)))
    return _conversation(row[key], row)


def _conversation(items: list[Any], row: Mapping[str, Any]) -> Conversation:
    messages = [_message(item) for item in items]
    if not messages:
        raise RowError("no-messages", "[]")
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] not in ("system", "developer"):
        check_text(system)
        messages.insert(0, {"role": "system", "content": system})
    _check_order(messages)
    return Conversation(tuple(messages), _kind(row), _tools(row), truncated=_cut_off(row))


def _from_pair(row: Mapping[str, Any]) -> Conversation:
    question, answer = _first(row, _QUESTIONS), _first(row, _ANSWERS)
    if not question or not answer:
        raise RowError("wrong-shape", excerpt(_brief(row)))
    asked, answered = row[question], row[answer]
    # The conversational form of prompt/completion: both, or the prompt alone, are lists of messages.
    turns = list(asked) if isinstance(asked, list) else [{"role": "user", "content": asked}]
    turns += list(answered) if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
    return _conversation(turns, row)


def _from_alpaca(row: Mapping[str, Any]) -> Conversation:
    answer = _first(row, _ANSWERS)
    if "instruction" not in row or not answer:
        raise RowError("wrong-shape", excerpt(_brief(row)))
    asked = row["instruction"]
    extra = row.get("input")
    if isinstance(asked, str) and isinstance(extra, str) and extra.strip():
        asked = f"{asked}\n\n{extra}"
    return _conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": row[answer]}], row)


def _from_prompt(row: Mapping[str, Any]) -> Conversation:
    key = _first(row, ("prompt", "question", "query", "instruction", "input", "text"))
    if not key:
        raise RowError("wrong-shape", excerpt(_brief(row)))
    asked = row[key]
    return _conversation(list(asked) if isinstance(asked, list) else [{"role": "user", "content": asked}], row)


def _from_text(row: Mapping[str, Any]) -> Conversation:
    text = row.get("text")
    if not isinstance(text, str):
        raise RowError("wrong-shape" if text is None else "content-not-text", excerpt(_brief(row)))
    if not text:
        raise RowError("empty-text", excerpt(_brief(row)))
    return Conversation(text=text, kind=_kind(row))


_READERS = {
    "messages": _from_list,
    "sharegpt": _from_list,
    "completion": _from_pair,
    "alpaca": _from_alpaca,
    "prompt": _from_prompt,
    "text": _from_text,
}


def _message(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("bad-message", excerpt(item))
    spoken = item.get("role", item.get("from"))
    if not isinstance(spoken, str):
        raise RowError("bad-message", excerpt(item))
    role = _ROLES.get(spoken.strip().lower())
    if role is None:
        raise RowError("unknown-role", excerpt(spoken))
    message: Message = {"role": role}
    calls = _tool_calls(item.get("tool_calls"))
    content = _content(item.get("content", item.get("value")), item, optional=bool(calls))
    if content is not None:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    _copy_extras(item, message)
    return message


def _copy_extras(item: Mapping[str, Any], message: Message) -> None:
    for key in _KEPT:
        if isinstance(item.get(key), str):
            message[key] = item[key]
    reasoning = item.get(_first(item, _REASONING))
    if isinstance(reasoning, str) and reasoning and message["role"] == "assistant":
        check_text(reasoning)
        # Templates read it under one of two names.
        message["reasoning_content"] = message["thinking"] = reasoning


def _content(value: Any, item: Mapping[str, Any], *, optional: bool) -> str | None:
    if value is None:
        if optional:
            return None
        raise RowError("null-content", excerpt(dict(item)))
    if isinstance(value, list):
        value = _joined_parts(value)
    if not isinstance(value, str):
        raise RowError("content-not-text", excerpt(value))
    check_text(value)
    return value


def _joined_parts(parts: list[Any]) -> str:
    """The text of a list of content parts; anything but text in it makes the row unusable."""
    texts = [
        part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None for part in parts
    ]
    if any(not isinstance(text, str) for text in texts):
        raise RowError("content-not-text", excerpt(parts))
    return "".join(str(text) for text in texts)


def check_text(text: str) -> None:
    """Refuse text that is no Unicode (half surrogate pairs, or bytes that were not UTF-8)."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("not-utf8", excerpt(text)) from None


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    if value is None or value == []:
        return []
    calls = _maybe_json(value)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError("bad-tools", excerpt(value))
    return [_tool_call(call) for call in calls]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    clean = {key: item for key, item in call.items() if item is not None}
    function = clean.get("function", clean)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("bad-tools", excerpt(call))
    # Interfaces hand arguments over as JSON text; templates expect the object and write it themselves.
    arguments = _maybe_json(function.get("arguments", {}))
    inner = {"name": function["name"], "arguments": arguments}
    _check_leaves(inner)
    rest = {key: clean[key] for key in ("id", "type") if isinstance(clean.get(key), str)}
    return {**rest, "type": "function", "function": inner}


def _check_leaves(value: Any, depth: int = 0) -> None:
    """Refuse what is no Unicode anywhere inside, and nesting that would exhaust the stack of what walks it later."""
    if depth > _DEEPEST:
        raise RowError("bad-tools", "nested too deeply")
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_leaves(key, depth + 1)
            _check_leaves(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_leaves(item, depth + 1)


def _maybe_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


def _tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    value = row.get(_first(row, ("tools", "functions")))
    if value in (None, [], ""):
        return ()
    tools = _maybe_json(value)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("bad-tools", excerpt(value))
    _check_leaves(tools)
    return tuple(dict(tool) for tool in tools)


def _check_order(messages: list[Message]) -> None:
    """Instructions first, then the user; assistant answers user or tool; tools answer an assistant that called."""
    turns = [item for item in messages if item["role"] not in ("system", "developer")]
    if not turns:
        raise RowError("no-answer", excerpt(messages))
    if turns[0]["role"] == "assistant":
        raise RowError("starts-with-assistant", excerpt(turns[0].get("content", "")))
    before = {"role": "start"}
    for turn in turns:
        if not _may_follow(before, turn):
            raise RowError("roles-out-of-order", f"{turn['role']} after {before['role']}")
        before = turn


def _may_follow(before: Message, turn: Message) -> bool:
    if turn["role"] == "user":
        return before["role"] in ("start", "assistant")
    if turn["role"] == "assistant":
        return before["role"] in ("user", "tool")
    # ShareGPT dumps keep the call as plain text, so any assistant turn may be followed by a result.
    return before["role"] in ("assistant", "tool")
