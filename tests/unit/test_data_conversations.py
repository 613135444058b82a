"""Rows in every shape -> conversations, or the reason why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.data.conversations import convert, detect
from paceline.data.rows import RowError

GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"messages": GOOD}, "messages"),
        (GOOD, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sharegpt"),
        ({"conversation": GOOD}, "messages"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"question": "a", "answer": "b"}, "completion"),
        ({"prompt": [GOOD[0]], "completion": [GOOD[1]]}, "completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
    ],
)
def test_shapes_are_told_by_their_keys(row: Any, shape: str) -> None:
    found, conversation = convert(row)
    assert found == shape
    assert [(item["role"], item["content"]) for item in conversation.messages] == [("user", "a"), ("assistant", "b")]


def test_the_other_shapes() -> None:
    assert convert({"prompt": "a"})[1].messages == ({"role": "user", "content": "a"},)
    assert convert({"instruction": "a", "input": "x", "output": "b"})[1].messages[0]["content"] == "a\n\nx"
    assert convert({"text": "<s>a"})[1].text == "<s>a"
    assert detect({"id": 1}) == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no-messages"),
        ([], "no-messages"),
        ({"messages": [GOOD[1]]}, "starts-with-assistant"),
        ({"messages": [{"role": "system", "content": "s"}, GOOD[1]]}, "starts-with-assistant"),
        ({"messages": [GOOD[0], GOOD[0]]}, "roles-out-of-order"),
        ({"messages": [GOOD[0], GOOD[1], GOOD[1]]}, "roles-out-of-order"),
        ({"messages": [{"role": "tool", "content": "t"}, GOOD[1]]}, "roles-out-of-order"),
        ({"messages": [{"role": "user", "content": None}]}, "null-content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content-not-text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "content-not-text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown-role"),
        ({"messages": ["a"]}, "bad-message"),
        ({"messages": [{"content": "a"}]}, "bad-message"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not-utf8"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no-answer"),
        ({"messages": GOOD, "tools": 3}, "bad-tools"),
        ({"messages": [GOOD[0], {"role": "assistant", "tool_calls": [{"function": 1}]}]}, "bad-tools"),
        ({"prompt": 4, "completion": "b"}, "content-not-text"),
        ({"text": 5}, "content-not-text"),
        ({"text": ""}, "empty-text"),
        ({"messages": GOOD, "tools": [{"a": DEEP}]}, "bad-tools"),
        ({"id": 1}, "wrong-shape"),
        (5, "wrong-shape"),
        (None, "wrong-shape"),
    ],
)
def test_each_fault_has_its_name(row: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        convert(row)
    assert caught.value.problem.reason == reason


def test_a_named_shape_is_asked_for_and_no_other_taken() -> None:
    row = {"messages": GOOD, "text": "x"}
    assert convert(row, "text")[1].text == "x"
    with pytest.raises(RowError) as caught:
        convert({"messages": GOOD}, "alpaca")
    assert caught.value.problem.reason == "wrong-shape"


def test_tools_calls_results_and_reasoning_travel() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": 1})}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "assistant", "content": "c", "tool_calls": None},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "f"}}]),
        "kind": "k",
    }
    _, conversation = convert(row)
    asked, called, result, answer = conversation.messages
    assert asked["content"] == "ab"
    assert called["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert called["reasoning_content"] == called["thinking"] == "why"
    assert "content" not in called
    assert result["tool_call_id"] == "c1"
    assert answer == {"role": "assistant", "content": "c"}
    assert conversation.tools == ({"type": "function", "function": {"name": "f"}},)
    assert conversation.kind == "k"


def test_a_system_key_beside_the_turns_becomes_the_first_message() -> None:
    _, conversation = convert({"system": "s", "conversations": [{"from": "human", "value": "a"}]})
    assert [item["role"] for item in conversation.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("mark", "cut"),
    [({"truncated": True}, True), ({"flags": ["truncated"]}, True), ({"flags": ["looping"]}, False), ({}, False)],
)
def test_an_answer_marked_as_cut_off(mark: dict[str, Any], cut: bool) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two thr"}]
    assert convert({"messages": messages, **mark})[1].truncated is cut
