"""Tiny random targets of every family, and drafters for them: what the decoding and export tests run on.

They are random, not trained: a test that needs agreement between drafter and target makes an oracle of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from paceline.batches import FrozenEnds
from paceline.config import DrafterConfig, TargetConfig
from paceline.drafter.model import Drafter
from paceline.drafter.sizes import shape_for
from paceline.shapes import DrafterShape, TargetShape
from paceline.target.describe import read_shape
from paceline.target.ends import assemble

VOCABULARY = 97
MASK = 96
END = 95
WINDOW = 12

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts_per_tok": 2}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_COMMON, tie_word_embeddings=True),
    "mistral": MistralConfig(**_COMMON, tie_word_embeddings=False, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **_COMMON, tie_word_embeddings=True, sliding_window=WINDOW, layer_types=_MIXED, final_logit_softcapping=20.0
    ),
    "gpt-oss": GptOssConfig(
        **_COMMON, **_EXPERTS, num_local_experts=4, sliding_window=WINDOW, layer_types=_MIXED, tie_word_embeddings=False
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **_COMMON, **_EXPERTS, num_experts=4, moe_intermediate_size=16, tie_word_embeddings=False
    ),
}


def make_target(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model whose choices vary (plain initialisation repeats one token for ever)."""
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def save_target(model: PreTrainedModel, folder: Path) -> TargetConfig:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), dtype="float32", mask_token_id=MASK, layer_ids=(0, 1, 2))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(VOCABULARY - 2)} | {"<end>": END}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", bos_token="w1", pad_token="w0")
    made.chat_template = (
        "{% for m in messages %}w5 {{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
    )
    return made


def shapes_of(folder: Path, block_size: int = 6, layers: int = 2) -> tuple[TargetShape, DrafterShape]:
    target = read_shape(TargetConfig(model=str(folder)))
    config = DrafterConfig(layers=layers, block_size=block_size)
    return target, shape_for(target, (0, 1, 2), config, MASK)


def drafter_shape(model: PreTrainedModel, block_size: int = 6) -> DrafterShape:
    """A drafter's shape without a folder; only for targets whose ends need no scale."""
    config = model.config
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=2,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layer_ids=(0, 1, 2),
        block_size=block_size,
        mask_token_id=MASK,
        vocabulary=config.vocab_size,
        target_layers=config.num_hidden_layers,
        eos_token_ids=(END,),
    )


def ends_of(model: PreTrainedModel, target: TargetShape | None = None) -> FrozenEnds:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (end.weight for end in ends if isinstance(end, torch.nn.Embedding | torch.nn.Linear))
    if target is not None:
        return assemble(embedding, head, None, target)
    return FrozenEnds(embedding.detach(), head.detach())


def make_drafter(shape: DrafterShape, seed: int = 1) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(shape)
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter.eval().requires_grad_(False)


def prompts(count: int, longest: int = 30, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, END, (length,), generator=generator).tolist() for length in lengths]


def grouped_prompts(lengths: Sequence[int] = (3, 31), each: int = 10) -> list[list[int]]:
    """Prompts of a few lengths, so that the oracle can run those of one length together."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, END, (length,), generator=generator).tolist() for length in lengths for _ in range(each)]


@torch.no_grad()
def slow_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int, end_ids: Sequence[int] = ()
) -> list[list[int]]:
    """`slow_greedy` of many prompts, those of one length in a batch."""
    answers: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[row]) for row in rows])
        for _ in range(limit):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
        answers |= dict(zip(rows, ids[:, length:].tolist(), strict=True))
    return [cut(answers[row], end_ids) for row in range(len(prompts))]


def cut(tokens: list[int], end_ids: Sequence[int]) -> list[int]:
    first = next((place for place, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[: first + 1]


@torch.no_grad()
def slow_greedy(model: PreTrainedModel, prompt: Sequence[int], limit: int, end_ids: Sequence[int] = ()) -> list[int]:
    """The oracle: the whole sequence again for every token, no cache, nothing shared with the decoding loop."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in end_ids:
            break
    return ids[len(prompt) :]


class Oracle:
    """A drafter that is told the truth: at each position the state whose head output is the token there.

    Wrong on purpose at the positions of `mistakes`. With `one_hot_ends`, a state's logits are the state itself.
    """

    dtype = torch.float32

    def __init__(self, truth: Sequence[Sequence[int]], mistakes: Sequence[int] = ()) -> None:
        longest = max(len(row) for row in truth) + 128
        self.truth = torch.zeros(len(truth), longest, dtype=torch.long)
        for row, tokens in enumerate(truth):
            self.truth[row, : len(tokens)] = torch.tensor(list(tokens))
        for position in mistakes:
            self.truth[:, position] = (self.truth[:, position] + 1) % VOCABULARY

    def context_kv(self, features_RSF: Tensor, positions_RS: Tensor) -> list[tuple[Tensor, Tensor]]:
        return []

    def blocks(self, block_RQH: Tensor, positions_RQ: Tensor, context: Any, attend: Any) -> Tensor:
        return torch.nn.functional.one_hot(self.truth.gather(1, positions_RQ), VOCABULARY).float()


def one_hot_ends() -> FrozenEnds:
    return FrozenEnds(torch.eye(VOCABULARY), torch.eye(VOCABULARY))
