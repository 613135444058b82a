"""Answers written in this process by transformers' own `generate`, in batches of prompts of like length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from paceline.data.rows import Message, RowError
from paceline.data.template import Template
from paceline.errors import UserError
from paceline.regenerate.draft import Answer, Draft
from paceline.regenerate.judge import is_looping, split_reasoning
from paceline.regenerate.options import RegenerateOptions
from paceline.shapes import TargetShape
from paceline.target.describe import load_tokenizer, read_shape
from paceline.target.transformers_body import compute_dtype, load_model

_WINDOW = 16
"""Batches that are sorted by length together."""


@dataclass(frozen=True)
class _Asked:
    draft: Draft
    ids: list[int]


class Writer:
    """A target that answers drafts."""

    def __init__(self, options: RegenerateOptions) -> None:
        """Load tokenizer and model. Raises UserError."""
        self.options = options
        self.shape: TargetShape = read_shape(options.target)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(options.target)
        self.template = Template(self.tokenizer, self.shape.eos_ids, options.thinking)
        self.device = _device(options.device)
        self.batch = options.batch or (256 if self.device.type == "cuda" else 16)
        self._model: Any | None = None

    def write(self, drafts: Iterable[Draft]) -> Iterator[Draft]:
        """Finish every draft, in an order that keeps batches even; what is yielded is done."""
        source = iter(drafts)
        waiting: list[_Asked] = []
        while True:
            room = _WINDOW * self.batch - len(waiting)
            for draft in itertools.islice(source, room):
                yield from self._ask(draft, waiting)
            if not waiting:
                return
            waiting.sort(key=lambda item: len(item.ids))
            count = self._rows(len(waiting[-1].ids))
            chosen, waiting = waiting[-count:], waiting[:-count]
            for asked, answer in zip(chosen, self._answer([item.ids for item in chosen]), strict=True):
                asked.draft.add(answer)
                yield from self._ask(asked.draft, waiting)

    def _rows(self, longest: int) -> int:
        """Answers written at once: as asked, or what the GPU's free memory takes."""
        if self.options.batch or self.device.type != "cuda":
            return self.batch
        self._loaded()
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return min(self.batch, rows_that_fit(free, self.shape, longest + self.options.max_new_tokens))

    def _ask(self, draft: Draft, waiting: list[_Asked]) -> Iterator[Draft]:
        """Queue the draft's next prompt, or yield the draft if there is none."""
        messages = draft.prompt()
        if messages is None:
            yield draft
            return
        try:
            waiting.append(_Asked(draft, self._prompt_ids(messages, draft)))
        except RowError as error:
            draft.add(Answer({}, 0, ("failed",), error.problem.example or error.problem.reason))
            yield draft

    def _prompt_ids(self, messages: list[Message], draft: Draft) -> list[int]:
        text = self.template.render(messages, draft.conversation.tools, prompt=True)
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        room = self.shape.max_positions - self.options.max_new_tokens
        if self.shape.max_positions and len(ids) > room:
            raise RowError(
                "template-refused",
                f"the prompt's {len(ids)} tokens leave no room for {self.options.max_new_tokens} new ones",
            )
        return ids

    @torch.no_grad()
    def _answer(self, prompts: list[list[int]]) -> list[Answer]:
        model = self._loaded()
        longest = max(map(len, prompts))
        pad = self.shape.eos_ids[0]
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.device
        )
        if self.options.temperature:
            torch.manual_seed(self.options.seed ^ hash(tuple(prompts[0])) & 0xFFFF_FFFF)
        written = model.generate(input_ids=ids, attention_mask=mask, generation_config=self._generation(pad))
        return [self._judge(prompt, row) for prompt, row in zip(prompts, written[:, longest:].tolist(), strict=True)]

    def _generation(self, pad: int) -> GenerationConfig:
        options = self.options
        ends = {"max_new_tokens": options.max_new_tokens, "eos_token_id": list(self.shape.eos_ids), "pad_token_id": pad}
        if not options.temperature:
            return GenerationConfig(do_sample=False, **ends)
        return GenerationConfig(
            do_sample=True,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,  # 0 is off; left out, the library takes 50
            **ends,
        )

    def _judge(self, prompt: list[int], row: list[int]) -> Answer:
        end = next((place for place, token in enumerate(row) if token in self.shape.eos_ids), None)
        ids = row if end is None else row[:end]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        message = split_reasoning(text, str(self.tokenizer.decode(prompt[-8:])))
        flags = ["truncated"] if end is None else []
        flags += ["empty"] if not message["content"].strip() else []
        flags += ["looping"] if is_looping(text) else []
        if ids and self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] != ids:
            flags.append("other-ids")
        return Answer(message, len(row) if end is None else end + 1, tuple(flags))

    def _loaded(self) -> Any:
        if self._model is None:
            if not self.shape.eos_ids:
                raise UserError(
                    f"target {self.shape.name} names no end-of-sequence token", "add eos_token_id to its config.json"
                )
            dtype = compute_dtype(self.options.target, self.device)
            self._model = load_model(self.options.target, dtype).to(self.device)
            # Sampling is what the options say, and nothing that the model's authors recommend beside it.
            self._model.generation_config = GenerationConfig()
        return self._model


def rows_that_fit(free_bytes: int, shape: TargetShape, tokens: int) -> int:
    """Rows of this many tokens whose keys and values (two bytes each) fit, with as much again while a cache grows."""
    per_token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    return max(1, int(0.4 * free_bytes) // (per_token * tokens))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device = {name!r} cannot be used: {reason}", "choose auto, cpu or cuda") from None
    return device
