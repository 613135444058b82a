"""Masks of chat templates in thirteen forms, against what each target emits as written by hand in data_world."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest
from data_world import BY_NAME, KINDS, Kind, Message, assistant, byte_tokenizer, tagged, token, user, with_template
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data.rows import Conversation, RowError
from paceline.data.template import Document, Template, Tokens
from paceline.errors import UserError

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LIMIT = 100_000

_MARKERS = (
    "<|im_end|> <|eot_id|> <end_of_turn> </s> [/INST] <|return|> <|end|> <｜end▁of▁sentence｜> <|start|>assistant"
)
_PIECES = st.sampled_from(
    [
        "Hello",
        " so",
        "\n",
        "\n\n",
        " ",
        "  ",
        "1.",
        "é",
        "日本語",
        "😀",
        "👩‍👧",
        "م",
        "{}",
        "a",
        "\t",
        *_MARKERS.split(),
    ]
)
TEXT = st.one_of(st.lists(_PIECES, max_size=6).map("".join), st.text(st.characters(codec="utf-8"), max_size=12))


@cache
def template_of(kind: Kind, thinking: Any = "template") -> Template:
    return Template(kind.tokenizer(), kind.eos_ids, thinking)


def tokens_of(template: Template, messages: list[Message], tools: Any = (), limit: int = LIMIT) -> list[Tokens]:
    documents, _ = template.documents(Conversation(tuple(messages), tools=tuple(tools)))
    return template.tokenise(documents, limit)


def supervised_text(template: Template, tokens: list[Tokens]) -> str:
    return "".join(str(template.tokenizer.decode(item.ids[item.supervised])) for item in tokens)


def wanted(kind: Kind, messages: list[Message]) -> str:
    return "".join(kind.emitted(item) for item in messages if item["role"] == "assistant")


def chat(kind: Kind, pairs: list[tuple[str, str]], thought: str = "I think.") -> list[Message]:
    reasoning = thought if kind.reasoning else ""
    return [item for asked, answer in pairs for item in (user(asked), assistant(answer, reasoning))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(asked=TEXT, answer=TEXT)
@FEW
def test_one_answer_is_supervised_exactly(kind: Kind, asked: str, answer: str) -> None:
    template = template_of(kind)
    messages = chat(kind, [(asked, answer)])
    (tokens,) = tokens_of(template, messages)
    text = supervised_text(template, [tokens])
    expected = wanted(kind, messages)
    if "joined-start" in tokens.notes:
        # The first token began in the prompt; nothing but its own characters may be missing.
        assert expected.encode().endswith(text.replace("�", "").encode())
        assert len(text) >= len(expected) - 24
    else:
        assert text == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=2, max_size=3))
@FEW
def test_every_answer_of_a_conversation_is_supervised(kind: Kind, pairs: list[tuple[str, str]]) -> None:
    template = template_of(kind)
    messages = chat(kind, pairs)
    tokens = tokens_of(template, messages)
    if not any(note == "joined-start" for item in tokens for note in item.notes):
        assert supervised_text(template, tokens) == wanted(kind, messages)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(asked=TEXT, answer=TEXT, cut=st.integers(0, 60))
@FEW
def test_cut_at_any_length_ids_and_mask_are_beginnings(kind: Kind, asked: str, answer: str, cut: int) -> None:
    template = template_of(kind)
    messages = chat(kind, [(asked, answer)])
    (whole,) = tokens_of(template, messages)
    for limit in (cut, len(whole.ids) - 2, len(whole.ids)):
        (part,) = tokens_of(template, messages, limit=max(1, limit))
        assert len(part.ids) == len(part.supervised) == min(max(1, limit), len(whole.ids))
        assert part.ids.tolist() == whole.ids[: len(part.ids)].tolist()
        assert part.supervised.tolist() == whole.supervised[: len(part.ids)].tolist()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "deepseek-r1"], ids=lambda kind: kind.name)
@given(asked=TEXT, answer=TEXT)
@FEW
def test_ids_are_those_of_the_templates_own_rendering(kind: Kind, asked: str, answer: str) -> None:
    template = template_of(kind)
    messages = chat(kind, [(asked, answer)])
    own = template.tokenizer.apply_chat_template(messages, chat_template=template.source, return_dict=False)
    assert tokens_of(template, messages)[-1].ids.tolist() == own


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_empty_and_shortest_answers(kind: Kind) -> None:
    template = template_of(kind)
    for answer in ("", "a", "is so", "😀"):
        messages = chat(kind, [("Hello", answer), ("", "a"), ("so", answer)])
        tokens = tokens_of(template, messages)
        if not any(item.notes for item in tokens):
            assert supervised_text(template, tokens) == wanted(kind, messages)


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}]


def tool_talk(reasoning: str = "") -> list[Message]:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Genève <|im_end|> 😀"}},
    }
    asked: Message = {**assistant("", reasoning), "tool_calls": [call]}
    return [
        user("What is it?"),
        asked,
        {"role": "tool", "content": "12", "name": "weather"},
        assistant("It is 12.", reasoning),
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.tools], ids=lambda kind: kind.name)
def test_tool_calls_and_results_are_rendered_and_the_calls_supervised(kind: Kind) -> None:
    template = template_of(kind)
    messages = tool_talk("Look it up." if kind.reasoning else "")
    tokens = tokens_of(template, messages, TOOLS)
    assert supervised_text(template, tokens) == wanted(kind, messages)
    # What the target had before it when it wrote the last turn (with its reasoning for the call), and what it wrote.
    before = template.tokenizer.apply_chat_template(
        messages[:-1], tools=TOOLS, chat_template=template.source, add_generation_prompt=True, tokenize=False
    )
    text = str(template.tokenizer.decode(tokens[-1].ids))
    assert text.rstrip("\n") == before + kind.emitted(messages[-1])


def test_a_call_without_content_is_rendered_as_the_template_does() -> None:
    kind = BY_NAME["qwen2.5"]
    template = template_of(kind)
    messages = tool_talk()
    del messages[1]["content"]
    assert supervised_text(template, tokens_of(template, messages, TOOLS)) == wanted(kind, messages)


def test_reasoning_stripped_from_history_makes_a_document_of_each_turn() -> None:
    kind = BY_NAME["qwen3"]
    template = template_of(kind)
    messages = chat(kind, [("a", "one"), ("b", "two"), ("c", "three")])
    documents, notes = template.documents(Conversation(tuple(messages)))
    assert len(documents) == 3
    assert notes.count("rewritten-turns") == 2
    # Each is what the target had before it when it wrote the turn: earlier reasoning gone, its own there.
    assert [document.text.count("I think.") for document in documents] == [1, 1, 1]
    assert documents[2].text.startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n")


def test_turns_that_history_keeps_share_one_document() -> None:
    kind = BY_NAME["qwen2.5"]
    documents, notes = template_of(kind).documents(Conversation(tuple(chat(kind, [("a", "one"), ("b", "two")]))))
    assert len(documents) == 1
    assert notes == []


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thinking_is_passed_to_the_template(thinking: str) -> None:
    template = template_of(BY_NAME["qwen3"], thinking)
    (tokens,) = tokens_of(template, [user("a"), assistant("b")])
    text = supervised_text(template, [tokens])
    assert text == ("b<|im_end|>" if thinking == "off" else "<think>\n\n</think>\n\nb<|im_end|>")


def test_a_prompt_that_opens_reasoning_needs_some() -> None:
    kind = BY_NAME["deepseek-r1"]
    messages = [user("a"), assistant("b")]
    with pytest.raises(RowError) as caught:
        tokens_of(template_of(kind), messages)
    assert caught.value.problem.reason == "reasoning-missing"
    off = template_of(kind, "off")
    tokens = tokens_of(off, messages)
    assert supervised_text(off, tokens) == "b<｜end▁of▁sentence｜>"


def test_inline_reasoning_is_kept_as_the_target_wrote_it() -> None:
    template = template_of(BY_NAME["deepseek-r1"])
    (tokens,) = tokens_of(template, [user("a"), assistant("<think>\nWhy?\n</think>\n\nSo.")])
    assert supervised_text(template, [tokens]) == "Why?\n</think>\n\nSo.<｜end▁of▁sentence｜>"


SPELLINGS = [
    ("{% generation %}", "{% endgeneration %}", False),
    ("{%- generation -%}", "{%- endgeneration -%}", True),
    ("{%generation%}", "{%endgeneration%}", False),
    ("{%-generation-%}", "{%-endgeneration-%}", True),
    ("{%  generation  %}", "{%  endgeneration  %}", True),
    ("{%+ generation %}", "{%+ endgeneration %}", False),
]


@pytest.mark.parametrize(("opening", "closing", "blank"), SPELLINGS)
@pytest.mark.parametrize("holds_end", [True, False])
def test_generation_tags_of_every_spelling(opening: str, closing: str, blank: bool, holds_end: bool) -> None:
    source = tagged(opening, closing, holds_end=holds_end, blank=blank)
    template = Template(with_template(source), (token("<|im_end|>"),))
    messages = [user("Hello"), assistant("It is <|im_end|> so.\n"), user("a"), assistant("b")]
    documents, notes = template.documents(Conversation(tuple(messages)))
    tokens = template.tokenise(documents, LIMIT)
    assert "tags-unused" not in notes
    assert supervised_text(template, tokens) == "It is <|im_end|> so.\n<|im_end|>b<|im_end|>"
    own = template.tokenizer.apply_chat_template(messages, return_dict=False)
    assert [item.ids.tolist() for item in tokens] == [own]


def test_tags_that_leave_part_of_an_answer_out_are_followed() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}Sure: "
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = Template(with_template(source), (token("<|im_end|>"),))
    assert supervised_text(template, tokens_of(template, [user("a"), assistant("bc")])) == "bc<|im_end|>"


def test_tags_around_nothing_fall_back_to_prefixes() -> None:
    source = tagged("{% generation %}{% endgeneration %}", "")
    template = Template(with_template(source), (token("<|im_end|>"),))
    assert supervised_text(template, tokens_of(template, [user("a"), assistant("bc")])) == "bc<|im_end|>"


def test_a_template_that_refuses_gives_its_own_words() -> None:
    with pytest.raises(RowError) as caught:
        tokens_of(template_of(BY_NAME["mistral"]), [{"role": "system", "content": "s"}, user("a"), assistant("b")])
    assert caught.value.problem.reason == "template-refused"
    assert "only user and assistant" in caught.value.problem.example


def test_a_template_that_loses_the_answer_is_caught() -> None:
    template = Template(with_template("{% for m in messages %}{{ m.role }}: {{ m.content[:3] }}\n{% endfor %}"), (1,))
    with pytest.raises(RowError) as caught:
        tokens_of(template, [user("Hello"), assistant("A long answer")])
    assert caught.value.problem.reason == "answer-not-found"


def test_no_template_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"no chat template"):
        tokens_of(Template(byte_tokenizer(), (1,)), [user("a"), assistant("b")])


def test_no_end_token_is_noted_and_the_content_supervised() -> None:
    template = Template(
        with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"), (token("</s>"),)
    )
    documents, notes = template.documents(Conversation((user("a"), assistant("It is"))))
    (tokens,) = template.tokenise(documents, LIMIT)
    assert notes == ["no-end-token"]
    assert supervised_text(template, [tokens]) == "It is"


def test_a_first_token_that_began_in_the_prompt_is_not_supervised() -> None:
    kind = BY_NAME["plain"]
    template = template_of(kind)
    (tokens,) = tokens_of(template, [user("a"), assistant("Hello there")])
    # "ASSISTANT: " and "Hello" meet in one token " Hello".
    assert "joined-start" in tokens.notes
    assert supervised_text(template, [tokens]) == " there</s>"


def test_offsets_that_hide_a_leading_space_do_not_mislead() -> None:
    from tokenizers import processors

    tokenizer = with_template(BY_NAME["plain"].source)
    trimming = type(tokenizer)(tokenizer_object=_with_processor(tokenizer, processors.ByteLevel(trim_offsets=True)))
    trimming.chat_template = tokenizer.chat_template
    template = Template(trimming, BY_NAME["plain"].eos_ids)
    (tokens,) = tokens_of(template, [user("a"), assistant("Hello there")])
    assert supervised_text(template, [tokens]) == " there</s>"


def _with_processor(tokenizer: Any, processor: Any) -> Any:
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.post_processor = processor
    return copy


def test_without_offsets_prefixes_of_ids_give_the_same() -> None:
    kind = BY_NAME["qwen2.5"]
    template = template_of(kind)
    messages = chat(kind, [("Hello 😀", "It is\n\nso"), ("a", "日本")])
    documents, _ = template.documents(Conversation(tuple(messages)))
    (with_offsets,) = template.tokenise(documents, LIMIT)
    supervised = [False] * len(with_offsets.ids)
    for low, high in documents[0].spans:
        first, last, _ = template._range_by_prefixes(documents[0].text, with_offsets.ids.tolist(), low, high)
        supervised[first:last] = [True] * (last - first)
    assert supervised == with_offsets.supervised.tolist()


def test_prerendered_text_is_supervised_by_the_templates_markers() -> None:
    kind = BY_NAME["smollm2"]
    template = template_of(kind)
    rendered = template.render([user("Hello"), assistant("It is"), user("a"), assistant("b")])
    tokens = template.tokenise([template.parse_text(rendered)], LIMIT)
    assert supervised_text(template, tokens) == "It is<|im_end|>b<|im_end|>"
    cut = template.parse_text(rendered[: rendered.rindex("b") + 1])
    assert supervised_text(template, template.tokenise([cut], LIMIT)) == "It is<|im_end|>b"


def test_text_in_another_form_says_what_was_looked_for() -> None:
    with pytest.raises(RowError) as caught:
        template_of(BY_NAME["smollm2"]).parse_text("[INST] a[/INST] b</s>" + "x" * 400)
    problem = caught.value.problem
    assert problem.reason == "no-answer-marker"
    assert repr("<|im_start|>assistant\n") in problem.example
    assert "[INST] a[/INST] b</s>" in problem.example


def test_text_for_a_model_without_a_template_is_supervised_whole() -> None:
    template = Template(byte_tokenizer(), (token("<|endoftext|>"),))
    document = template.parse_text("Hello there")
    assert document == Document("Hello there", ((0, 11),), (0,))


def test_dates_are_fixed_so_that_tokens_do_not_depend_on_the_day() -> None:
    template = template_of(BY_NAME["gpt-oss"])
    assert "Current date: 2026-01-01" in template.render([user("a")])
    assert "Today Date: 01 Jan 2026" in template_of(BY_NAME["llama3.1"]).render([user("a")])


def test_a_template_travels_to_another_process() -> None:
    template = template_of(BY_NAME["qwen3"])
    again = pickle.loads(pickle.dumps(template))
    messages = chat(BY_NAME["qwen3"], [("a", "b")])
    assert tokens_of(again, messages)[0].ids.tolist() == tokens_of(template, messages)[0].ids.tolist()


def test_fingerprint_tells_templates_and_settings_apart() -> None:
    kinds = [template_of(BY_NAME["qwen3"]), template_of(BY_NAME["qwen3"], "off"), template_of(BY_NAME["qwen2.5"])]
    assert len({item.fingerprint() for item in kinds}) == 3
    assert template_of(BY_NAME["qwen3"]).fingerprint() == kinds[0].fingerprint()


# deepseek-r1 refuses an answer without its reasoning, cut off or not.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "deepseek-r1"], ids=lambda kind: kind.name)
def test_an_answer_that_was_cut_off_has_no_end_token_to_learn(kind: Kind) -> None:
    template = template_of(kind)
    messages = [user("Count."), assistant("one two thr")]
    whole = supervised_text(template, tokens_of(template, messages))
    documents, _ = template.documents(Conversation(tuple(messages), truncated=True))
    cut = supervised_text(template, template.tokenise(documents, LIMIT))
    assert cut.endswith("one two thr")
    assert whole.startswith(cut)
    assert len(whole) > len(cut) or not template.ends


def test_only_the_last_answer_of_a_row_is_cut() -> None:
    kind = BY_NAME["smollm2"]
    template = template_of(kind)
    messages = [user("a"), assistant("first"), user("b"), assistant("second")]
    documents, _ = template.documents(Conversation(tuple(messages), truncated=True))
    text = supervised_text(template, template.tokenise(documents, LIMIT))
    assert text == "first<|im_end|>second"
