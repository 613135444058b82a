"""How long workers take to start compiled, on a cold and on a warm cache: the launcher, real modules, N processes.

    python benchmarks/cold_start.py --model FOLDER --data chats.jsonl --mask-token-id 4 --out RECORD

Runs on CPU too (the dense attention is compiled there). Seconds of the warm-up's parts leave imports and loading out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    launches = []
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as place:
            for cache in ("cold", "warm"):
                launches.append(_launch(options, Path(place), workers, cache))
                print(json.dumps({key: launches[-1][key] for key in ("workers", "cache", "wall_seconds", "ranks")}))
    record = {
        "kind": "cold start",
        "command": " ".join(sys.argv),
        "machine": _machine(),
        "torch": torch.__version__,
        "launches": launches,
    }
    options.out.write_text(json.dumps(record, indent=1))
    return 0


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _launch(options: argparse.Namespace, place: Path, workers: int, cache: str) -> dict[str, Any]:
    """One `paceline warmup` of `workers` processes; what each rank's warm-up took and compiled."""
    run = place / "runs" / "start"
    shutil.rmtree(run, ignore_errors=True)
    config = place / "run.toml"
    config.write_text("")
    words = [
        f"target.model={options.model}",
        f"target.mask_token_id={options.mask_token_id}",
        f"data.train={options.data}",
        f"data.cache_folder={place / 'data'}",
        f"compiling.cache={place / 'cache'}",
        "compiling.mode=on",
        f"run.folder={place / 'runs'}",
        "run.name=start",
        f"launch.workers={workers}",
        f"training.global_batch={workers}",
        *options.overrides,
    ]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "paceline", "warmup", str(config), *words], check=True)
    wall = time.monotonic() - started
    ranks = []
    for path in sorted((run / "warmup").glob("rank-*.json")):
        facts = json.loads(path.read_text())
        seconds = sum(part["seconds"] for part in facts["parts"])
        ranks.append({"rank": path.stem, "part_seconds": seconds, **facts["total"]})
    return {"workers": workers, "cache": cache, "wall_seconds": wall, "ranks": ranks}


if __name__ == "__main__":
    sys.exit(main())
