"""A GGUF file written here, through every door: facts, tokenizer, conversion, ends, features."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "numerics"))

from target_world import documents, pack

gguf_library = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from paceline.config import TargetConfig  # noqa: E402
from paceline.errors import UserError  # noqa: E402
from paceline.target import gguf  # noqa: E402
from paceline.target.describe import load_tokenizer, read_shape  # noqa: E402
from paceline.target.ends import load_ends  # noqa: E402
from paceline.target.source import resolve  # noqa: E402
from paceline.target.transformers_body import TransformersTarget  # noqa: E402

H, INNER, LAYERS, HEADS, KV, D = 64, 96, 3, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reserved>"]


def letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path: Path, *, head: str = "none", quantised: bool = False) -> dict[str, np.ndarray]:
    """A small llama-kind file; `head`: no output matrix, a rounded copy of the embedding, or one of its own."""
    tokens = [*SPECIAL, *letters(), "12", "ĊĊ"]
    writer = gguf_library.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(H)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(7 if quantised else 0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(letters()) + 2))
    writer.add_token_merges(["1 2", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    tensors = random_tensors(len(tokens), head)
    for name, values in tensors.items():
        if quantised and values.ndim == 2:
            kind = gguf_library.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf_library.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def random_tensors(vocabulary: int, head: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (0.2 * random.standard_normal(shape)).astype(np.float32)

    found = {"token_embd.weight": matrix(vocabulary, H), "output_norm.weight": 1 + matrix(H)}
    if head == "copy":
        found["output.weight"] = (found["token_embd.weight"] * 256).round() / np.float32(256)
    elif head == "own":
        found["output.weight"] = matrix(vocabulary, H)
    shapes = {
        "attn_q": (HEADS * D, H),
        "attn_k": (KV * D, H),
        "attn_v": (KV * D, H),
        "attn_output": (H, HEADS * D),
        "ffn_gate": (INNER, H),
        "ffn_up": (INNER, H),
        "ffn_down": (H, INNER),
    }
    for layer in range(LAYERS):
        found |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        found |= {f"blk.{layer}.{name}.weight": 1 + matrix(H) for name in ("attn_norm", "ffn_norm")}
    return found


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_facts_and_tokenizer_without_conversion(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    config = TargetConfig(model=str(tmp_path / "m.gguf"))
    shape = read_shape(config)
    assert (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (H, LAYERS, HEADS, KV, D)
    assert (shape.vocabulary, shape.eos_ids, shape.bos_ids, shape.max_positions) == (262, (2,), (1,), 256)
    assert shape.rope["rope_theta"] == 100_000.0
    tokenizer = load_tokenizer(config)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (SPECIAL[2], SPECIAL[1], SPECIAL[0])
    # Digits stay apart although the vocabulary could join them, and line ends are joined although a digit follows.
    assert len(tokenizer("\n\n12", add_special_tokens=False)["input_ids"]) <= 4
    assert "12" not in tokenizer.tokenize("a 12")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == (
        "<|im_start|>x<|im_end|>"
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("head", "tied"), [("none", True), ("copy", True), ("own", False)])
def test_weights_ties_and_ends(tmp_path: Path, head: str, tied: bool) -> None:
    written = write_gguf(tmp_path / "m.gguf", head=head)
    config = TargetConfig(model=str(tmp_path / "m.gguf"), layer_ids=(0, 1))
    target = TransformersTarget.load(config, "cpu")
    assert read_shape(config).tied == tied
    assert torch.equal(target.ends.embedding_VH, torch.from_numpy(written["token_embd.weight"]))
    assert (target.ends.head_VH is target.ends.embedding_VH) == tied
    if not tied:
        assert torch.equal(target.ends.head_VH, torch.from_numpy(written["output.weight"]))
    up = target.layers[1].mlp.up_proj.weight
    assert torch.equal(up, torch.from_numpy(written["blk.1.ffn_up.weight"]))
    target.self_check(pack(documents(20, 30)))
    ends = load_ends(config, "cpu", torch.float32)
    assert torch.equal(ends.head_VH, target.ends.head_VH)


def test_a_quantised_file_becomes_a_folder_once(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", quantised=True)
    source = resolve(TargetConfig(model=str(tmp_path / "m.gguf")))
    said: list[str] = []
    folder = gguf.as_folder(source, said.append)
    assert len(said) == 1
    assert gguf.as_folder(source, said.append).location == folder.location
    assert len(said) == 1
    config = json.loads((Path(folder.location) / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    target = TransformersTarget.load(TargetConfig(model=folder.location, layer_ids=(1,)), "cpu")
    expected = torch.from_numpy(written["blk.2.ffn_down.weight"])
    torch.testing.assert_close(target.layers[2].mlp.down_proj.weight, expected, rtol=0.02, atol=0.01)
    again = TransformersTarget.load(TargetConfig(model=str(tmp_path / "m.gguf"), layer_ids=(1,)), "cpu")
    batch = pack(documents(20, 30))
    assert torch.equal(again.features(batch), target.features(batch))


def test_a_file_cut_short_is_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for share in (0.02, 0.5):
        (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
        config = TargetConfig(model=str(tmp_path / "cut.gguf"))
        with pytest.raises(UserError, match=r"cut\.gguf"):
            TransformersTarget.load(config, "cpu")
    assert not [path for path in (tmp_path / "cache" / "paceline" / "targets").iterdir() if path.is_dir()]
