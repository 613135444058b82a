"""Train the demo's drafter on a GPU on all shipped data, and write the record.

python benchmarks/train_demo.py --model SmolLM2.gguf --out OUT [section.key=value …]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import sys
import time
from pathlib import Path

import torch

from paceline import config as configuration
from paceline import demo, launch
from paceline.training.metrics import read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/train-demo"))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    base = demo.demo_config(options.model, options.folder, demo.GPU, gpu=torch.cuda.is_available())
    path = options.folder.with_suffix(".toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(configuration.dump(base))
    config = configuration.load(path, options.overrides)
    started = time.monotonic()
    code = launch.run(config)
    record = _record(options.folder, config, time.monotonic() - started, options.out)
    print(json.dumps({key: record[key] for key in ("minutes", "best", "step_ms", "tokens_per_second")}))
    return code


def _record(folder: Path, config: configuration.Config, seconds: float, out: Path) -> dict:
    out.mkdir(parents=True, exist_ok=True)
    records = read_metrics(folder)
    steps = [record for record in records if record["event"] == "step"]
    evaluations = [record for record in records if record["event"] == "evaluation"]
    times = sorted(record["seconds"] for record in steps)
    record = {
        "kind": "train-demo",
        "command": " ".join(sys.argv),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "minutes": seconds / 60,
        "steps": len(steps),
        "step_ms": 1e3 * times[len(times) // 2],
        "tokens_per_second": sum(record["tokens"] for record in steps) / sum(times),
        "convention": "tau = tokens committed a step, bonus included; exact, greedy, held-out prompts",
        "best": max(evaluations, key=lambda record: record["tau"]),
        "evaluations": evaluations,
        "losses": [record["loss"] for record in steps][:: max(1, len(steps) // 200)],
        "config": dataclasses.asdict(config),
    }
    (out / "train_demo.json").write_text(json.dumps(record, indent=1))
    shutil.copyfile(folder / "best" / "model.safetensors", out / "model.safetensors")
    shutil.copyfile(folder / "best" / "config.json", out / "config.json")
    return record


if __name__ == "__main__":
    sys.exit(main())
