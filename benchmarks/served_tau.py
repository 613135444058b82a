"""A drafter's acceptance length twice: exact, as training measures it, and by decoding, as serving has it.

    python benchmarks/served_tau.py --drafter FOLDER --target SmolLM2.gguf --out RECORD

Both on the demo's held-out prompts, each answer to the length that the data has. In float32 the two must be the same
where the answers are the target's own; `--dtype bfloat16` shows what rounding does.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import torch

from paceline import demo, export
from paceline.batches import BatchShape, FeatureBatch
from paceline.bench import machine
from paceline.config import DataConfig, TargetConfig, TrainingConfig
from paceline.data.corpus import build_corpus
from paceline.data.stream import Stream
from paceline.drafter.objective import Objective
from paceline.evaluation.acceptance import Acceptance, agreement_of, summarise
from paceline.evaluation.decode import Engine, decode
from paceline.evaluation.prompts import encode, load_prompts
from paceline.evaluation.verify import load_drafter
from paceline.target.describe import load_tokenizer
from paceline.target.transformers_body import TransformersTarget
from paceline.training.scores import evaluation_record, walked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--exact-only", action="store_true", help="decode nothing")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shape, tensors = export.read(options.drafter)
    config = TargetConfig(model=options.target, dtype=options.dtype, mask_token_id=shape.mask_token_id)
    target = TransformersTarget.load(config, options.device, shape.layer_ids)
    drafter = load_drafter(shape, tensors, target.dtype).to(target.device)
    held_out = chosen(options.out.with_suffix(".prompts.jsonl"), options.count)
    exact = exact_acceptance(target, drafter, config, held_out)
    print(json.dumps({"exact": exact.tau, "agreement": exact.agreement}), flush=True)
    record: dict[str, Any] = {
        "kind": "served tau",
        "command": sys.argv,
        "machine": machine(),
        "dtype": options.dtype,
        "convention": "tau = tokens committed a step, bonus included; greedy; held-out prompts of the demo",
        "exact": evaluation_record(exact, 0),
    }
    if not options.exact_only:
        shape = dataclasses.replace(shape, eos_token_ids=target.shape.eos_ids or shape.eos_token_ids)
        engine = Engine(target.model, target.ends, drafter, shape)
        decoded = decoded_acceptance(engine, config, held_out, options.batch)
        record["decoded"] = evaluation_record(dataclasses.replace(decoded, agreement=1.0), 0)
        record["decoded_over_exact"] = decoded.tau / exact.tau
        print(json.dumps({"decoded": decoded.tau, "decoded_over_exact": record["decoded_over_exact"]}))
    held_out.unlink()
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def chosen(path: Path, count: int) -> Path:
    """A file of so many held-out rows, of each kind in turn (they are mixed in the data); 0 takes all."""
    rows = gzip.decompress((demo.DATA / "held_out.jsonl.gz").read_bytes()).decode("utf-8").splitlines()
    path.write_text("\n".join(rows[: count or None]) + "\n", encoding="utf-8")
    return path


@torch.no_grad()
def exact_acceptance(target: TransformersTarget, drafter: Any, config: TargetConfig, held_out: Path) -> Acceptance:
    """What a training run prints: one parallel forward over every held-out answer position."""
    data = DataConfig(train=(str(demo.DATA / "train.jsonl.gz"),), held_out=(str(held_out),), max_tokens=512)
    corpus = build_corpus(
        data,
        load_tokenizer(config),
        mask_token_id=config.mask_token_id,
        eos_ids=target.shape.eos_ids,
        seed=0,
        report=print,
    )
    shape = BatchShape(2048, 1536, drafter.shape.block_size, 4.0)
    stream = Stream(corpus.held_out, shape, 0, corpus.held_out, len(corpus.held_out.ids))
    looks = stream.evaluation_batches()
    objective = Objective(drafter, target.ends, shape, TrainingConfig(), "dense")
    moved = [batch.tokens.to(target.device) for batch in looks]
    on_host = target.device.type == "cpu"
    accepts = [
        objective.accepts(FeatureBatch(tokens, target.features(tokens)), prefix_only=on_host).cpu() for tokens in moved
    ]
    agreement = [
        agreement_of(target.next_tokens(tokens).cpu(), batch.tokens) for tokens, batch in zip(moved, looks, strict=True)
    ]
    return walked(accepts, looks, agreement)


@torch.no_grad()
def decoded_acceptance(engine: Engine, config: TargetConfig, held_out: Path, batch: int) -> Acceptance:
    """The decoding loop over the same prompts, each answer as long as the data has it."""
    tokenizer = load_tokenizer(config)
    rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    prompts = load_prompts(str(held_out))
    answers = {row["messages"][0]["content"]: row["messages"][-1]["content"] for row in rows}
    work = []
    for prompt in prompts:
        # One more for the end token; where an answer was cut there is none, and the loop stops at the limit.
        limit = len(tokenizer(answers[prompt.messages[-1]["content"]], add_special_tokens=False)["input_ids"]) + 1
        work.append((limit, encode(tokenizer, prompt), prompt.kind))
    work.sort(key=lambda item: item[0])
    walks = []
    assert engine.shape is not None
    ends = engine.shape.eos_token_ids
    for start in range(0, len(work), batch):
        part = work[start : start + batch]
        found = decode(engine, [ids for _, ids, _ in part], max(limit for limit, _, _ in part), ends)
        walks += [answer.walk(kind) for answer, (_, _, kind) in zip(found.answers, part, strict=True)]
        print(f"{len(walks)} of {len(work)}", file=sys.stderr, flush=True)
    return summarise(iter(walks), engine.shape.block_size)


if __name__ == "__main__":
    sys.exit(main())
