"""Write the raw answers of the demo data: the target's own greedy answers to the prompts of `make_demo_prompts.py`.

    python benchmarks/make_demo_answers.py --prompts prompts.jsonl --model smollm2.gguf --tokenizer smollm2/ \
        --out raw.jsonl.gz --device cuda

`--model` is a model folder or a GGUF file; the tokenizer always comes from a folder, since a tokenizer that is read
from a GGUF file may split text differently. Weights are rounded to bfloat16 once and, unless told otherwise, computed
with in float32, without TF32: an answer then is what lossless decoding of this target gives, near-ties aside.
`make_demo_files.py` makes the shipped files of it.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import eager_mask

COMPACT_EVERY = 16
END = "<|im_end|>"


@dataclass(frozen=True)
class Answer:
    """What the target wrote: ids without the end-of-turn token, and whether it came to an end by itself."""

    ids: list[int]
    finished: bool


def load_model(path: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    gguf = {}
    if path.suffix == ".gguf":
        gguf = {"gguf_file": path.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    folder = path.parent if gguf else path
    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", eager_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="grouped", **gguf)
    torch.nn.Module.to(model, device, dtype)  # transformers decorates `to` in a way that type checkers misread
    return model.eval()


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    text = str(tokenizer.apply_chat_template(chat(prompt), tokenize=False, add_generation_prompt=True))
    return tokenizer.encode(text, add_special_tokens=False)


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Row numbers, a few batches at a time by falling length: little is padding, and what a killed run has is mixed."""
    window = 4 * size
    for first in range(0, len(lengths), window):
        order = sorted(range(first, min(first + window, len(lengths))), key=lambda row: -lengths[row])
        for start in range(0, len(order), size):
            yield order[start : start + size]


def left_padded(rows: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask; what stands in the padding is never seen."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which query heads share their key head without copies of it: four times as fast at large batches.

    query [B, heads, new, D]; key and value [B, key heads, all, D]; additive mask [B, 1, new, all]. The extra arguments
    are part of transformers' interface.
    """
    rows, heads, new, width = query.shape
    key_heads = key.shape[1]
    grouped = query.reshape(rows, key_heads, -1, width)
    scores = (grouped @ key.transpose(2, 3) * scaling).view(rows, key_heads, -1, new, key.shape[2])
    weights = (scores + attention_mask[:, :, None]).softmax(-1).view(rows, key_heads, -1, key.shape[2])
    return (weights @ value).view(rows, heads, new, width).transpose(1, 2), None


@torch.inference_mode()
def answer_batch(model: PreTrainedModel, prompts: list[list[int]], end: int, limit: int) -> list[Answer]:
    """Greedy answers. Rows that have ended leave the batch, which is what makes the long ones cheap."""
    answers: list[list[int]] = [[] for _ in prompts]
    written = torch.empty(len(prompts), 0, dtype=torch.long, device=model.device)
    alive = torch.arange(len(prompts), device=model.device)
    ids, mask = left_padded(prompts, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    for step in range(limit):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        ids = logits.argmax(-1)
        written = torch.cat([written, ids], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = positions[:, -1:] + 1
        if (step + 1) % COMPACT_EVERY and step + 1 < limit:
            continue
        ended = (written == end).any(-1)
        for row, new in zip(alive[ended].tolist(), written[ended].tolist(), strict=True):
            answers[row] = new
        left = (~ended).nonzero()[:, 0]
        if not len(left):
            break
        cache.batch_select_indices(left)
        ids, mask, positions, written, alive = (t[left] for t in (ids, mask, positions, written, alive))
    for row, new in zip(alive.tolist(), written.tolist(), strict=True):
        answers[row] = answers[row] or new
    return [cut(new, end) for new in answers]


def cut(new_ids: list[int], end: int) -> Answer:
    finished = end in new_ids
    return Answer(new_ids[: new_ids.index(end)] if finished else new_ids, finished)


def generate(arguments: argparse.Namespace) -> None:
    """Answer all prompts. Each batch is written as soon as it is there: what a killed run has written can be used."""
    torch.set_float32_matmul_precision("highest")
    rows = read_rows(arguments.prompts)[: arguments.first]
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    model = load_model(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    end = tokenizer.convert_tokens_to_ids(END)
    ids = [prompt_ids(tokenizer, row["prompt"]) for row in rows]
    arguments.out.write_bytes(b"")
    answers: list[Answer] = []
    start = time.perf_counter()
    for batch in batches([len(one) for one in ids], arguments.batch):
        new = answer_batch(model, [ids[row] for row in batch], end, arguments.max_new_tokens)
        answers.extend(new)
        raw = [{"id": rows[row]["id"], **asdict(answer)} for row, answer in zip(batch, new, strict=True)]
        with arguments.out.open("ab") as file:
            file.write(compressed(raw))
        record = run_record(arguments, answers, time.perf_counter() - start)
        record_path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
        print(record["answers"], record["seconds"], flush=True)


def run_record(arguments: argparse.Namespace, answers: list[Answer], seconds: float) -> dict[str, Any]:
    tokens = sum(len(answer.ids) for answer in answers)
    return {
        "answers": len(answers),
        "answer_tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "batch": arguments.batch,
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": "float32 (weights rounded to bfloat16), TF32 off" if arguments.dtype == "float32" else arguments.dtype,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model_sha256": sha256(arguments.model.read_bytes()).hexdigest() if arguments.model.is_file() else None,
    }


# --- files ---


def record_path(raw: Path) -> Path:
    return raw.parent / (raw.name.removesuffix(".jsonl.gz") + ".record.json")


def read_rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.decode("utf-8").splitlines()]


def compressed(rows: Iterable[dict[str, Any]]) -> bytes:
    """Compressed JSON lines, the same bytes for the same rows."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    return gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--prompts", "--tokenizer", "--model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=2048, help="2048 rows take about 60 GB of GPU memory")
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--first", type=int, help="answer only the first prompts")
    generate(parser.parse_args())


if __name__ == "__main__":
    main()
