"""Time of the target's packed forward: Qwen3-8B's shape with random weights, layers up to the last captured one.

python benchmarks/target_forward.py [--tokens 8192] [--float8]   (needs an NVIDIA GPU; one JSON record on stdout)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from paceline.batches import TokenBatch
from paceline.shapes import TargetShape
from paceline.target.describe import choose_layers
from paceline.target.ends import assemble
from paceline.target.float8 import use_float8_weights
from paceline.target.transformers_body import TransformersTarget

H, LAYERS, HEADS, KV, D, INNER, V = 4096, 36, 32, 8, 128, 12288, 151936
CUDA = torch.device("cuda")


def make_target() -> TransformersTarget:
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=H,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=D,
        intermediate_size=INNER,
        vocab_size=V,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    with CUDA:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    shape = TargetShape("qwen3-8b", "qwen3", H, LAYERS, V, HEADS, KV, D, INNER, 1e-6, rope, 40960, True, (), (0,))
    weight = model.get_input_embeddings().weight
    return TransformersTarget(model, shape, choose_layers(LAYERS, 5), CUDA, assemble(weight, weight, None, shape))


def row(tokens: int, lengths: list[int]) -> TokenBatch:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    assert bounds[-1] <= tokens
    positions = torch.cat([torch.arange(length) for length in lengths] + [torch.zeros(tokens - bounds[-1])]).long()
    owners = torch.cat([torch.full((length,), place) for place, length in enumerate(lengths)]).int()
    owners = torch.nn.functional.pad(owners, (0, tokens - bounds[-1]), value=-1)
    nothing = torch.zeros(1, dtype=torch.int64)
    return TokenBatch(
        0,
        torch.randint(0, V, (tokens,)),
        positions,
        owners,
        torch.zeros(tokens, dtype=torch.bool),
        nothing,
        nothing,
        nothing.view(1, 1),
        torch.zeros(1, 1),
        tuple(range(len(lengths))),
        tuple(bounds),
    ).to(CUDA)


def milliseconds(call: object, repeats: int = 10) -> float:
    """Median over repeats, each between synchronisations."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()  # type: ignore[operator]
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[2:])[repeats // 2]


def operations(batch: TokenBatch, layers: int) -> float:
    """Multiply-adds counted as two: the matmuls of the layers, and causal attention within documents."""
    matmuls = 2 * len(batch.ids_S) * (H * D * (2 * HEADS + 2 * KV) + 3 * H * INNER)
    lengths = [end - start for start, end in zip(batch.bounds, batch.bounds[1:], strict=False)]
    attention = sum(2 * 2 * length * (length + 1) / 2 * HEADS * D for length in lengths)
    return layers * (matmuls + attention)


def peak() -> float:
    """Operations a second of an 8192 x 8192 x 8192 bfloat16 matmul, in this process."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    return 2 * 8192**3 / (1e-3 * milliseconds(lambda: a @ b, 20))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--float8", action="store_true")
    chosen = arguments.parse_args()
    ceiling = peak()
    target = make_target()
    target.close_upper_layers()
    tokens = chosen.tokens
    rows = {"one": row(tokens, [tokens]), "mixed": row(tokens, [tokens // 4, tokens // 2, 700, 500, 300])}
    out = torch.empty(tokens, target.width, dtype=torch.bfloat16, device=CUDA)
    record: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": tokens,
        "layers": target.layer_ids[-1] + 1,
        "matmul_tflops": ceiling / 1e12,
    }

    def measure(kind: str) -> None:
        for name, batch in rows.items():
            spent = milliseconds(lambda batch=batch: target.features(batch, out))
            share = operations(batch, target.layer_ids[-1] + 1) / (1e-3 * spent) / ceiling
            record[f"{kind}_{name}_ms"], record[f"{kind}_{name}_share"] = round(spent, 2), round(share, 3)

    measure("eager")
    exact = target.features(rows["mixed"]).float()
    if chosen.float8:
        use_float8_weights(target.decoder, CUDA)
        off = (target.features(rows["mixed"]).float() - exact).norm() / exact.norm()
        record["float8_relative_difference"] = round(float(off), 4)
    start = time.perf_counter()
    target.compile_layers()
    target.features(rows["one"], out)
    torch.cuda.synchronize()
    record["compile_seconds"] = round(time.perf_counter() - start, 1)
    measure("compiled_float8" if chosen.float8 else "compiled")
    record["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
