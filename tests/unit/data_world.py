"""Small tokenizers and chat templates in the form of those that people use, with what targets emit written by hand.

The templates are our own text. `emitted` is the oracle: the exact text that the target writes in an assistant turn,
spelled out without rendering anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]

_TEXT = [
    "Hello there, how are you today? The answer is simply that it is so.",
    "assistant\n\n1. First\n\n2. Second\n\n\n  indented text    with spaces",
    "user system think tool call function name arguments city Paris weather 12 + 30 = 42",
    "def f(x):\n    return x + 1\n\nprint(f(2))",
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    "ASSISTANT: Hello USER: What is this? ASSISTANT: This is that.",
]
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|message|>",
    "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<s>", "</s>", "[INST]", "[/INST]",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<|mask|>",
)  # fmt: skip
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges over line breaks and leading spaces, and every marker of the templates below."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|begin_of_text|>"
    )


def token(text: str) -> int:
    found = byte_tokenizer().convert_tokens_to_ids(text)
    assert isinstance(found, int)
    return found


def with_template(source: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|begin_of_text|>",
    )
    tokenizer.chat_template = source
    return tokenizer


@dataclass(frozen=True)
class Kind:
    """A template, the tokens that end an answer, and what its target emits for an assistant message."""

    name: str
    source: str
    ends: tuple[str, ...]
    emitted: Callable[[Message], str]
    system: bool = True
    tools: bool = False
    reasoning: bool = False
    rewrites: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return with_template(self.source)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(token(text) for text in self.ends)


SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are small.<|im_end|>
{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN25 = """{%- if tools %}{{- '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content }}{% else %}{{- 'You help.' }}{% endif %}
  {{- '\n\n# Tools\n' }}{% for t in tools %}{{- '\n' }}{{- t | tojson }}{% endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' or (m.role == 'system' and not (tools and loop.first)) or
         (m.role == 'assistant' and not m.tool_calls) %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant' }}{% if m.content %}{{- '\n' + m.content }}{% endif %}
    {%- for c in m.tool_calls %}{% set f = c.function if c.function else c %}
      {{- '\n<tool_call>\n{"name": "' }}{{- f.name }}{{- '", "arguments": ' }}{{- f.arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{% for t in tools %}{{- t | tojson + '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set content = m.content if m.content is string else '' %}{% set thought = '' %}
    {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
    {%- elif '</think>' in content %}
      {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else %}{{- content }}{% endif %}
    {%- for c in m.tool_calls or [] %}
      {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}
      {{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
  {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

LLAMA31 = """{{- bos_token }}{% if not date_string is defined %}
{%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}{% endif %}
{%- if messages[0].role == 'system' %}{% set head = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set head = '' %}{% set rest = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + head }}
{%- if tools %}{% for t in tools %}{{- '\n' }}{{- t | tojson }}{% endfor %}{% endif %}{{- '<|eot_id|>' }}
{%- for m in rest %}
  {%- if m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
  {%- elif m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{% endif %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name }}
    {{- '", "parameters": ' }}{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA3 = """{{- '<bos>' }}{% set ns = namespace(head='') %}
{%- if messages[0].role == 'system' %}{% set ns.head = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
  {{- (ns.head if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>You are a model.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\n' }}{{- tools | tojson }}{{- '<|end|>' }}{% endif %}
{%- set ns = namespace(final=-1) %}
{%- for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- if m.tool_calls %}
      {%- if m.thinking and loop.index0 > ns.final %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
      {%- set f = m.tool_calls[0].function %}
      {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
      {{- f.arguments | tojson }}{{- '<|call|>' }}
    {%- elif loop.last and not add_generation_prompt %}
      {%- if m.thinking %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.x to=assistant<|channel|>commentary<|message|>' }}{{- m.content | tojson }}{{- '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

MISTRAL = """{{- '<s>' }}{% for m in messages %}
  {%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.role == 'assistant' %}{{- ' ' + m.content + '</s>' }}
  {%- else %}{{- raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}"""

DEEPSEEK_R1 = """{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- m.content }}{% endif %}
  {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{% endif %}
  {%- if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1] %}
    {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{% endif %}"""

DEEPSEEK_V3 = """{{- '<｜begin▁of▁sentence｜>' }}{% set ns = namespace(asked=false) %}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- m.content }}{% endif %}
  {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{% endif %}
  {%- if m.role == 'assistant' %}{{- '<｜Assistant｜></think>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}
  {%- if thinking is defined and thinking %}{{- '<think>' }}{% else %}{{- '</think>' }}{% endif %}{% endif %}"""

PLAIN = """{% for m in messages %}{{ m.role.upper() + ': ' + m.content }}{{ '</s>' if m.role == 'assistant' else '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""

NO_PROMPT = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"""

TRAILING_END = """{% for m in messages %}{{ '<|' ~ 'im_start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""


def tagged(opening: str, closing: str, *, holds_end: bool = True, blank: bool = False) -> str:
    """A ChatML template whose answers stand between generation tags of the given spelling."""
    end = "{{ '<|im_end|>' }}"
    inner = "{{ m.content }}" + (end if holds_end else "")
    line = "\n" if blank else ""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}" + opening + line + inner + closing + ("" if holds_end else end) + "{{ '\n' }}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _calls(message: Message) -> list[tuple[str, str]]:
    import json

    found = [call["function"] for call in message.get("tool_calls", [])]
    return [(item["name"], json.dumps(item["arguments"], ensure_ascii=False)) for item in found]


def _qwen_calls(message: Message) -> list[str]:
    return [f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in _calls(message)]


def _qwen25(message: Message) -> str:
    content, calls = message.get("content", ""), _qwen_calls(message)
    return "\n".join([*([content] if content or not calls else []), *calls]) + "<|im_end|>"


def _qwen3(message: Message) -> str:
    thought = message.get("reasoning_content", "").strip("\n")
    parts = [message.get("content", "").lstrip("\n"), *_qwen_calls(message)]
    body = "\n".join(part for part in parts if part)
    return f"<think>\n{thought}\n</think>\n\n{body}<|im_end|>"


def _llama(message: Message) -> str:
    for name, text in _calls(message):
        return f'{{"name": "{name}", "parameters": {text}}}<|eot_id|>'
    return message["content"].strip() + "<|eot_id|>"


def _gpt_oss(message: Message) -> str:
    thought = message.get("reasoning_content", "")
    head = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    for name, text in _calls(message):
        return f"{head} to=functions.{name}<|channel|>commentary json<|message|>{text}<|call|>"
    return f"{head}<|channel|>final<|message|>{message['content']}<|return|>"


def _deepseek_r1(message: Message) -> str:
    return f"{message['reasoning_content'].strip()}\n</think>\n\n{message['content']}<｜end▁of▁sentence｜>"


KINDS = (
    Kind("smollm2", SMOLLM2, ("<|im_end|>",), lambda m: m["content"] + "<|im_end|>"),
    Kind("qwen2.5", QWEN25, ("<|im_end|>", "<|endoftext|>"), _qwen25, tools=True),
    Kind("qwen3", QWEN3, ("<|im_end|>", "<|endoftext|>"), _qwen3, tools=True, reasoning=True, rewrites=True),
    Kind("llama3.1", LLAMA31, ("<|eot_id|>", "<|eom_id|>"), _llama, tools=True),
    Kind("gemma3", GEMMA3, ("<eos>", "<end_of_turn>"), lambda m: m["content"].strip() + "<end_of_turn>"),
    Kind("gpt-oss", GPT_OSS, ("<|return|>", "<|call|>"), _gpt_oss, tools=True, reasoning=True, rewrites=True),
    Kind("mistral", MISTRAL, ("</s>",), lambda m: " " + m["content"] + "</s>", system=False),
    Kind("deepseek-v3", DEEPSEEK_V3, ("<｜end▁of▁sentence｜>",), lambda m: m["content"] + "<｜end▁of▁sentence｜>"),
    Kind("deepseek-r1", DEEPSEEK_R1, ("<｜end▁of▁sentence｜>",), _deepseek_r1, reasoning=True, rewrites=True),
    Kind("plain", PLAIN, ("</s>",), lambda m: m["content"] + "</s>"),
    Kind("no-prompt", NO_PROMPT, ("<|im_end|>",), lambda m: m["content"] + "<|im_end|>"),
    Kind(
        "trailing-end", TRAILING_END, ("<|end|>", "<|endoftext|>"), lambda m: m["content"] + "<|end|>", rewrites=False
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = message["thinking"] = reasoning
    return message
