"""A tiny whole run on CPU: a random target of two layers, conversations in its own words, and its configuration."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DrafterConfig,
    EvaluationConfig,
    LaunchConfig,
    RunConfig,
    TargetConfig,
    TrainingConfig,
)

VOCABULARY, END, MASK = 48, 47, 46


def make_world(folder: Path, head_dim: int = 8, kv_heads: int = 1) -> None:
    """Write target and data below `folder`; any process may then use `config_of`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2 * head_dim,
        intermediate_size=3 * head_dim,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "target")
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder / "target")
    draw = random.Random(0)
    for name, count in (("train", 24), ("held_out", 5)):
        rows = [json.dumps({"messages": _conversation(draw, model, tokenizer)}) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def _tokenizer() -> PreTrainedTokenizerFast:
    marks = {"<pad>": 0, "<start>": 1, "<user>": 2, "<model>": 3, "<mask>": MASK, "<end>": END}
    words = marks | {f"w{number}": number for number in range(4, MASK)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", bos_token="<start>", pad_token="<pad>")
    made.chat_template = (
        "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<model> ' }}"
        "{{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<model> {% endif %}"
    )
    return made


def _conversation(
    draw: random.Random, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, str]]:
    """A random question, and what the target answers to it greedily."""
    question = {"role": "user", "content": " ".join(f"w{draw.randrange(4, MASK)}" for _ in range(draw.randint(2, 6)))}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer: list[int] = []
    while len(answer) < draw.randint(12, 30):
        logits = model(torch.tensor([ids + answer])).logits[0, -1].detach()
        logits[[0, 1, 2, 3, MASK, END]] = -torch.inf
        answer.append(int(logits.argmax()))
    return [question, {"role": "assistant", "content": tokenizer.decode(answer)}]


def config_of(folder: Path, name: str = "run", steps: int = 10, every: int = 5) -> Config:
    """Ten steps of three batches, so that no number of drafters but one and three divides them."""
    return Config(
        run=RunConfig(name=name, folder=str(folder / "runs"), seed=3),
        target=TargetConfig(model=str(folder / "target"), dtype="float32", mask_token_id=MASK, layer_ids=(0, 1)),
        data=DataConfig(
            train=(str(folder / "train.jsonl"),),
            held_out=(str(folder / "held_out.jsonl"),),
            cache_folder=str(folder / "data"),
            max_tokens=64,
        ),
        drafter=DrafterConfig(layers=1, block_size=4, init="random"),
        training=TrainingConfig(steps=steps, tokens=64, anchors=16, global_batch=3, learning_rate=1e-2),
        evaluation=EvaluationConfig(every=5, anchors=256),
        checkpoint=CheckpointConfig(every=every, keep=3),
        launch=LaunchConfig(threads=1, collective_seconds=90.0),
    )


def records(run_folder: Path) -> list[dict[str, object]]:
    """The metrics of a run, without what a clock says."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in _CLOCKED} for line in lines]


_CLOCKED = ("seconds", "tokens_per_second", "waited")


def same_numbers(folder: Path, name: str, first: int = 0, relative: float = 1e-5) -> None:
    """Fail where the run `name` has other records than `alone`, beyond step `first`."""
    expected = [record for record in records(folder / "runs" / "alone") if record["step"] > first or not first]
    found = [record for record in records(folder / "runs" / name) if record["step"] > first or not first]
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert _close(one, other, relative), (name, one, other)


def _close(found: Any, expected: Any, relative: float) -> bool:
    """Equal, numbers to a relative difference (NaN is equal to itself)."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_close(found[key], expected[key], relative) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(
            _close(*pair, relative) for pair in zip(found, expected, strict=True)
        )
    if isinstance(expected, float):
        both_nan = math.isnan(expected) and math.isnan(found)
        return both_nan or math.isclose(found, expected, rel_tol=relative, abs_tol=1e-9)
    return found == expected


def half_done(folder: Path, name: str, of: str = "alone") -> None:
    """The run `of`, as if it had been killed after the checkpoint of step 5 had been written, under another name."""
    shutil.copytree(folder / "runs" / of, folder / "runs" / name)
    shutil.rmtree(folder / "runs" / name / "checkpoints" / "step-10")
