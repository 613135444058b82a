"""A world of GPUs through everything that it must bear, in one call: cold starts, topologies, a kill, a resume.

    python benchmarks/topologies.py --model FOLDER --data chats.jsonl --mask-token-id 4 --workers 8 --out RECORD \
        --cold 10 --runs colocated 5+3 4+4 auto --kill 5+3 [section.key=value …]

Every launch is `paceline train` as a user would type it, in a run folder of its own. On a CPU it works with small
shapes, to see that the script itself works. Rates leave out the first steps and the evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.bench import machine
from paceline.training.metrics import read_metrics

_SKIPPED = 5
"""Steps at the start that no rate counts."""


@dataclass
class Place:
    """Where the launches of one call live."""

    folder: Path
    options: argparse.Namespace
    number: int = 0
    launches: list[dict[str, Any]] = field(default_factory=list)

    def words(self, name: str, topology: str, steps: int) -> list[str]:
        """The arguments of one launch."""
        options = self.options
        kind, targets, drafters = parse(topology)
        return [
            f"target.model={options.model}",
            f"target.mask_token_id={options.mask_token_id}",
            f"data.train={options.data}",
            f"data.cache_folder={self.folder / 'data'}",
            f"compiling.cache={self.folder / 'cache'}",
            f"run.folder={self.folder / 'runs'}",
            f"run.name={name}",
            f"launch.workers={options.workers}",
            f"topology.kind={kind}",
            f"topology.targets={targets}",
            f"topology.drafters={drafters}",
            f"training.steps={steps}",
            f"training.global_batch={options.global_batch or options.workers}",
            f"evaluation.every={steps}",
            "checkpoint.every=0",
            *options.overrides,
        ]

    def start(self, name: str, words: list[str], verb: str = "train", *, resume: bool = False) -> subprocess.Popen[str]:
        config = self.folder / "run.toml"
        config.write_text("")
        log = (self.folder / f"{name}.log").open("a")
        command = [sys.executable, "-m", "paceline", verb, str(config), *words, *(["--resume"] if resume else [])]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)

    def launch(self, topology: str, steps: int, label: str) -> dict[str, Any]:
        """One whole run, to its end."""
        self.number += 1
        name = f"{self.number}-{topology.replace('+', '-')}"
        started = time.time()
        process = self.start(name, self.words(name, topology, steps))
        code = process.wait()
        found = describe(self.folder / "runs" / name, started, self.options.tokens)
        found |= {"label": label, "topology": topology, "exit_code": code, "wall_seconds": time.time() - started}
        if code:
            found["log"] = (self.folder / f"{name}.log").read_text()[-3000:]
        if topology == "auto":
            text = (self.folder / f"{name}.log").read_text()
            found["table"] = [line for line in text.splitlines() if line.startswith(("topology", "colocated", "split"))]
        self.launches.append(found)
        self.say(found)
        return found

    def say(self, found: dict[str, Any]) -> None:
        keys = (
            "label",
            "topology",
            "exit_code",
            "wall_seconds",
            "steps",
            "tokens_per_second",
            "step_ms",
            "waited_share",
        )
        print(json.dumps({key: found.get(key) for key in keys}), flush=True)


def parse(topology: str) -> tuple[str, int, int]:
    """`colocated`, `auto`, or `5+3` -> (kind, targets, drafters)."""
    if "+" not in topology:
        return topology, 0, 0
    targets, drafters = topology.split("+")
    return "split", int(targets), int(drafters)


def describe(run: Path, started: float, tokens: int) -> dict[str, Any]:
    """What a run folder tells of its start, its rate and who waited."""
    steps = [record for record in read_metrics(run) if record["event"] == "step"]
    ranks = {path.stem: json.loads(path.read_text()) for path in sorted((run / "warmup").glob("rank-*.json"))}
    found: dict[str, Any] = {
        "steps": len(steps),
        "losses": [record["loss"] for record in steps],
        "tau": [record["tau"] for record in read_metrics(run) if record["event"] == "evaluation"],
        "phases": {
            rank: {part["name"]: round(part["seconds"], 2) for part in facts["parts"]} for rank, facts in ranks.items()
        },
        "graphs_compiled": {rank: facts["total"]["graphs"] for rank, facts in ranks.items()},
        "targets": {path.stem: json.loads(path.read_text()) for path in sorted((run / "targets").glob("rank-*.json"))},
    }
    counted = steps[_SKIPPED:]
    if counted:
        seconds = sum(record["seconds"] for record in counted)
        found |= {
            "step_ms": 1e3 * statistics.median(record["seconds"] for record in counted),
            "tokens_per_second": sum(record["tokens"] for record in counted) / seconds,
            "rows_per_second": sum(record["tokens"] for record in counted) / tokens / seconds,
            "waited_share": sum(record["waited"] for record in counted) / seconds,
        }
    for target in found["targets"].values():
        target["busy_share"] = target["busy_seconds"] / max(target["seconds"], 1e-9)
    return found


def killed_and_resumed(place: Place, topology: str, steps: int) -> dict[str, Any]:
    """Kill the last worker after the first checkpoint; how the run ends, and whether a resumed one has its losses."""
    whole = place.launch(topology, steps, "undisturbed, for the kill")
    name = "killed"
    run = place.folder / "runs" / name
    words = [*place.words(name, topology, steps), f"checkpoint.every={max(1, steps // 4)}"]
    process = place.start(name, words)
    checkpoints = run / "checkpoints"
    deadline = time.monotonic() + place.options.seconds
    while (
        process.poll() is None and time.monotonic() < deadline and len(list(checkpoints.glob("step-*/whole.json"))) < 1
    ):
        time.sleep(0.05)
    if process.poll() is not None:
        return {"topology": topology, "ended_early": (place.folder / f"{name}.log").read_text()[-3000:]}
    doctor = asked_doctor(run)
    victim = json.loads((run / "heartbeat" / f"rank-{place.options.workers - 1}.json").read_text())
    if process.poll() is not None:
        return {"topology": topology, "doctor": doctor, "ended_early": "while the doctor asked: give more --kill-steps"}
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.monotonic()
    code = process.wait(timeout=120)
    ended = time.monotonic() - killed
    message = (place.folder / f"{name}.log").read_text().strip().splitlines()[-6:]
    resumed = place.start(name, words, resume=True).wait()
    losses = [record["loss"] for record in read_metrics(run) if record["event"] == "step"]
    pairs = list(zip(losses, whole["losses"], strict=False))
    worst = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=None)
    return {
        "topology": topology,
        "victim": {key: victim[key] for key in ("rank", "role", "step", "phase")},
        "doctor": doctor,
        "exit_code": code,
        "seconds_to_end": ended,
        "message": message,
        "resume_exit_code": resumed,
        "losses_compared": len(pairs),
        "worst_relative_difference": worst,
    }


def asked_doctor(run: Path) -> dict[str, Any]:
    """`paceline doctor RUN` while the run lives."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "paceline", "doctor", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        findings = json.loads(done.stdout).get("findings", [])
    except json.JSONDecodeError:
        findings = done.stdout.splitlines()[-3:]
    return {"exit_code": done.returncode, "seconds": time.monotonic() - begun, "findings": findings[:6]}


def compared(launches: list[dict[str, Any]]) -> dict[str, float]:
    """The largest relative difference of each topology's losses from the first one's."""
    first = launches[0]["losses"]
    return {
        launch["topology"]: max(
            (abs(a - b) / max(abs(b), 1e-9) for a, b in zip(launch["losses"], first, strict=False)), default=0.0
        )
        for launch in launches[1:]
    }


def command(words: list[str]) -> str:
    """This call, with names in place of absolute paths."""
    split = [word.rpartition("=") for word in words]
    short = [key + sign + (Path(value).name if value.startswith("/") else value) for key, sign, value in split]
    return " ".join(["benchmarks/topologies.py", *short])


def written(record: dict[str, Any], folder: str) -> str:
    """As JSON, with no path of this machine."""
    text = json.dumps(record, indent=1) + "\n"
    return text.replace(folder, "FOLDER").replace(str(Path(__file__).parent.parent), "REPOSITORY")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--workers", type=int, default=torch.cuda.device_count() or 8)
    parser.add_argument("--global-batch", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cold", type=int, default=0, help="cold starts, the compile cache deleted before each")
    parser.add_argument("--runs", nargs="*", default=["colocated"])
    parser.add_argument("--kill", default="", help="the topology of which one worker is killed")
    parser.add_argument("--kill-steps", type=int, default=0, help="of the killed run; as many as --steps otherwise")
    parser.add_argument("--seconds", type=float, default=300.0, help="patience with the killed run's first checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="keep the launches' logs here")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    options.overrides.insert(0, f"training.tokens={options.tokens}")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options)
        record: dict[str, Any] = {
            "kind": "topologies",
            "command": " ".join(["benchmarks/topologies.py", *sys.argv[1:]]),
            "machine": machine(),
        }
        try:
            record["cold"] = []
            for number in range(options.cold):
                shutil.rmtree(place.folder / "cache", ignore_errors=True)
                topology = next((name for name in options.runs if "+" in name), "colocated")
                record["cold"].append(place.launch(topology, 20, f"cold start {number + 1}"))
            record["runs"] = [place.launch(topology, options.steps, "run") for topology in options.runs]
            record["losses_differ"] = compared(record["runs"])
            print(json.dumps(record["losses_differ"]), flush=True)
            if options.kill:
                record["kill"] = killed_and_resumed(place, options.kill, options.kill_steps or options.steps)
                print(json.dumps(record["kill"]), flush=True)
        finally:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(written(record, folder))
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in place.folder.glob("*.log"):
                    shutil.copy(log, options.logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
