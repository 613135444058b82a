"""Answers of a tiny random model, against greedy decoding of one prompt at a time, written out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.regenerate import RegenerateOptions, regenerate
from paceline.regenerate.in_process import Writer, rows_that_fit
from paceline.shapes import TargetShape

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LIMIT = 24


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    marks = [AddedToken(text, special=True) for text in ("<|user|>", "<|assistant|>", "<|system|>")]
    fast.add_special_tokens({"additional_special_tokens": marks})
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose recommended sampling must not be used, and that ends about half of its answers in time."""
    folder = tmp_path_factory.mktemp("model")
    fast = byte_tokenizer()
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(fast) + 4,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        initializer_range=0.6,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight[fast.eos_token_id] *= 2.5
    model.generation_config = GenerationConfig(
        eos_token_id=fast.eos_token_id, do_sample=True, temperature=3.0, repetition_penalty=1.5
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": f"question {number} " + "and more " * (number % 5)} for number in range(22)]
    rows.append({"messages": [{"role": "user", "content": text} for text in ("one",)] + [
        {"role": "assistant", "content": "old"}, {"role": "user", "content": "two"}]})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options(model_folder: Path, source: str, tmp_path: Path, **changes: object) -> RegenerateOptions:
    base = {"max_new_tokens": LIMIT, "batch": 5, "device": "cpu"}
    target = TargetConfig(model=str(model_folder))
    return RegenerateOptions(sources=(source,), output=str(tmp_path / "out.jsonl"), target=target, **(base | changes))


def rows_of(tmp_path: Path) -> list[dict]:
    files = [tmp_path / "out.jsonl", tmp_path / "out.flagged.jsonl"]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def greedy(model: torch.nn.Module, ids: list[int], end: int) -> tuple[list[int], bool]:
    """Plain greedy decoding without a cache: the whole text again for each token."""
    written: list[int] = []
    while len(written) < LIMIT:
        with torch.no_grad():
            token = int(model(torch.tensor([ids + written]), use_cache=False).logits[0, -1].argmax())
        if token == end:
            return written, True
        written.append(token)
    return written, False


def test_greedy_answers_are_the_targets_own(model_folder: Path, source: str, tmp_path: Path) -> None:
    assert regenerate(options(model_folder, source, tmp_path), lambda _: None) == 0
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    fast = byte_tokenizer()
    rows = rows_of(tmp_path)
    assert len(rows) == 23
    ended = 0
    for row in rows:
        prompt = fast.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        ids, stopped = greedy(model, fast(prompt, add_special_tokens=False)["input_ids"], fast.eos_token_id)
        assert row["messages"][-1]["content"] == fast.decode(ids, skip_special_tokens=True)
        assert ("truncated" in row["flags"]) != stopped
        assert row["tokens"] >= len(ids) + stopped
        ended += stopped
    assert 3 <= ended <= 20, "the tiny model should end some answers and not others"


def test_stopped_between_batches_and_started_again(
    model_folder: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regenerate(options(model_folder, source, tmp_path), lambda _: None)
    whole = {row["messages"][0]["content"]: row for row in rows_of(tmp_path)}
    (tmp_path / "out.journal.jsonl").unlink()
    answer, calls = Writer._answer, []

    def stops_at_the_third(self: Writer, prompts: list[list[int]]) -> list:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, prompts)

    monkeypatch.setattr(Writer, "_answer", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        regenerate(options(model_folder, source, tmp_path), lambda _: None)
    first = rows_of(tmp_path)
    assert 0 < len(first) <= 10
    assert regenerate(options(model_folder, source, tmp_path), lambda _: None) == 0
    assert {row["messages"][0]["content"]: row for row in rows_of(tmp_path)} == whole
    assert sum(calls[3:]) <= 24 - len(first) + 1


def test_sampling_is_seeded_and_different(model_folder: Path, source: str, tmp_path: Path) -> None:
    def texts(**changes: object) -> list[str]:
        (tmp_path / "out.journal.jsonl").unlink(missing_ok=True)
        regenerate(options(model_folder, source, tmp_path, limit=6, **changes), lambda _: None)
        return sorted(row["messages"][-1]["content"] for row in rows_of(tmp_path))

    sampled = texts(temperature=1.0, seed=1)
    assert texts(temperature=1.0, seed=1) == sampled
    assert texts(temperature=1.0, seed=2) != sampled
    assert texts(temperature=1.0, top_k=1) == texts()


def test_prompts_that_leave_no_room_fail_alone(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 300}) + "\n" + json.dumps({"prompt": "short"}) + "\n")
    assert regenerate(options(model_folder, str(path), tmp_path), lambda _: None) == 1
    failed = [row for row in rows_of(tmp_path) if "failed" in row["flags"]]
    assert len(failed) == 1
    assert "no room" in failed[0]["error"]


def test_journal_of_other_settings_is_not_continued(model_folder: Path, source: str, tmp_path: Path) -> None:
    regenerate(options(model_folder, source, tmp_path, limit=1), lambda _: None)
    with pytest.raises(UserError, match="begun with another"):
        regenerate(options(model_folder, source, tmp_path, limit=1, temperature=0.5), lambda _: None)


def test_batches_fit_the_memory_there_is() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    shape = TargetShape("t", "qwen3", 4096, 36, 151936, 32, 8, 128, 12288, 1e-6, rope, 40960, False, (), (0,))
    assert rows_that_fit(100 << 30, shape, 4096) == 71  # 147,456 bytes a token
    assert rows_that_fit(1 << 20, shape, 4096) == 1


def test_a_device_that_is_not_there(model_folder: Path, source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="device = 'nonsense'"):
        regenerate(options(model_folder, source, tmp_path, device="nonsense"), lambda _: None)
