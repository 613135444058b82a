"""Wrong inputs through the command line: one line and a hint, exit code 2, no traceback, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pipeline_world import END, MASK, config_of, make_world

from paceline import cli, export
from paceline import config as configuration
from paceline.config import DrafterConfig, TargetConfig
from paceline.drafter.init import build
from paceline.drafter.sizes import shape_for
from paceline.target.describe import read_shape

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    (folder / "run.toml").write_text(configuration.dump(config_of(folder, "run", steps=1)))
    return folder


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _nothing(_: Path) -> None:
    pass


@dataclass(frozen=True)
class Wrong:
    """What is changed in a run that is right (`{}` is the folder of the world), and words that must be said."""

    overrides: tuple[str, ...]
    words: tuple[str, ...]
    prepare: Callable[[Path], None] = field(default=_nothing)


def _write(name: str, *rows: object) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / name).write_text("".join(f"{line}\n" for line in lines))

    return prepare


def _drafter(folder: Path, **sizes: int) -> None:
    """A drafter that was trained for this target, or with other sizes."""
    target = read_shape(TargetConfig(model=str(folder / "target")))
    shape = shape_for(target, (0, 1), DrafterConfig(**({"layers": 1, "block_size": 4} | sizes)), MASK)
    export.write(folder / "drafter", build(shape, "random", 0).state_dict(), shape, target, dtype="float32")


def _cut_drafter(folder: Path) -> None:
    _drafter(folder)
    path = folder / "drafter" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drafter_without_weights(folder: Path) -> None:
    _drafter(folder)
    (folder / "drafter" / "model.safetensors").unlink()


def _drafter_without_config(folder: Path) -> None:
    _drafter(folder)
    (folder / "drafter" / "config.json").write_text("{")


def _narrower_drafter(folder: Path) -> None:
    target = read_shape(TargetConfig(model=str(folder / "target")))
    mine = shape_for(target, (0, 1), DrafterConfig(layers=1, block_size=4), MASK)
    shape = dataclasses.replace(mine, intermediate_size=mine.intermediate_size // 2)
    export.write(folder / "drafter", build(shape, "random", 0).state_dict(), shape, target, dtype="float32")


def _target(folder: Path) -> Path:
    shutil.copytree(folder / "target", folder / "broken", dirs_exist_ok=True)
    return folder / "broken"


def _no_tokenizer(folder: Path) -> None:
    broken = _target(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()


def _pad_is_end(folder: Path) -> None:
    path = _target(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<end>"}))


def _used(folder: Path) -> None:
    (folder / "runs" / "used").mkdir(parents=True)
    (folder / "runs" / "used" / "metrics.jsonl").write_text('{"event": "step"}\n')


TEXT = "[INST] preformatted for another model [/INST] " + "so it goes on " * 30
QUESTION = {"messages": [{"role": "user", "content": "w5 w6 w7"}]}

WRONG = {
    "no data file": Wrong(("data.train={}/none.jsonl",), ("none.jsonl",)),
    "no held-out file": Wrong(("data.held_out={}/none.jsonl",), ("none.jsonl",)),
    "no target": Wrong(("target.model={}/none",), ("target.model", "none")),
    "a target without a tokenizer": Wrong(
        ("target.model={}/broken",), ("tokenizer of target.model", "broken"), _no_tokenizer
    ),
    "no template file": Wrong(("target.chat_template={}/none.jinja",), ("target.chat_template", "none.jinja")),
    "no drafter to start from": Wrong(("drafter.init={}/none",), ("drafter.init", "none")),
    "a folder that is no drafter": Wrong(("drafter.init={}/target",), ("LlamaForCausalLM",)),
    "a drafter of another depth": Wrong(
        ("drafter.init={}/drafter",),
        ("holds a drafter of 2 layers", "this run's has 1"),
        lambda f: _drafter(f, layers=2),
    ),
    "a drafter whose weights are cut short": Wrong(
        ("drafter.init={}/drafter",), ("drafter.init", "model.safetensors", "damaged"), _cut_drafter
    ),
    "a drafter without its weights": Wrong(
        ("drafter.init={}/drafter",), ("drafter.init", "safetensors"), _drafter_without_weights
    ),
    "a drafter with narrower layers": Wrong(
        ("drafter.init={}/drafter",), ("drafter.init", "not of this run's drafter"), _narrower_drafter
    ),
    "a drafter whose configuration is no JSON": Wrong(
        ("drafter.init={}/drafter",), ("drafter.init", "config.json"), _drafter_without_config
    ),
    "an empty file": Wrong(("data.train={}/empty.jsonl", "data.held_out=[]"), ("no rows",), _write("empty.jsonl")),
    "nothing supervised": Wrong(
        ("data.train={}/asked.jsonl", "data.held_out=[]"),
        ("4 of 4 rows", "no-answer", "asked.jsonl:1", "w5 w6 w7"),
        _write("asked.jsonl", *[QUESTION] * 4),
    ),
    "text for another template": Wrong(
        ("data.train={}/text.jsonl", "data.held_out=[]"),
        ("no-answer-marker", "looked for", "<model>", TEXT[:200]),
        _write("text.jsonl", *[{"text": TEXT}] * 4),
    ),
    "no mask token": Wrong(("target.mask_token_id=-1",), ("target.mask_token_id is not set", "never guessed")),
    "the end as mask token": Wrong((f"target.mask_token_id={END}",), ("end-of-sequence",)),
    "no mask token, and a pad that is the end": Wrong(
        ("target.model={}/broken", "target.mask_token_id=-1"), ("never guessed",), _pad_is_end
    ),
    "a mask token outside the embedding": Wrong(("target.mask_token_id=48",), ("48", "embedding of 48 rows")),
    "a layer that is not there": Wrong(("target.layer_ids=[0, 2]",), ("holds 2", "0 … 1")),
    "more anchors than tokens": Wrong(("training.anchors=65",), ("training.anchors = 65",)),
    "a rate of nan": Wrong(("training.learning_rate=nan",), ("training.learning_rate",)),
    "an absurd block": Wrong(("drafter.block_size=1000000",), ("drafter.block_size",)),
    "an absurd number of layers": Wrong(("drafter.layers=-1",), ("drafter.layers",)),
    "a key that does not exist": Wrong(("training.stepz=3",), ("training.stepz", "training.steps")),
    "roles that do not add up": Wrong(
        ("topology.kind=split", "topology.targets=1", "topology.drafters=1", "launch.workers=4"),
        ("needs 2 processes", "there are 4"),
    ),
    "a sharded target without ranks": Wrong(("target.tensor_parallel=2",), ("target.tensor_parallel = 2",)),
    "a run folder that cannot be made": Wrong(("run.folder={}/train.jsonl",), ("cannot write the run folder",)),
    "a run that is there": Wrong(("run.name=used",), ("already holds a run", "--resume"), _used),
}


@pytest.mark.parametrize("case", WRONG)
def test_training_is_refused_in_one_line(case: str, world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = WRONG[case]
    wrong.prepare(world)
    before = _files(world / "runs")
    overrides = [text.replace("{}", str(world)) for text in wrong.overrides]
    assert cli.main(["train", str(world / "run.toml"), *overrides]) == 2
    error = capfd.readouterr().err
    first, *rest = error.splitlines()
    assert first.startswith("error: ")
    assert len(rest) == 1
    assert rest[0].startswith("  hint: ")
    assert all(word in error for word in wrong.words), error
    assert _files(world / "runs") == before


def _files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*")) if folder.exists() else []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "{}/none.toml"],
        ["train", "{}/train.jsonl"],
        ["train", "{}"],
        ["plan", "{}/run.toml", "target.model={}/none"],
        ["warmup", "{}/run.toml", "data.train={}/none.jsonl"],
        ["data", "show", "{}/run.toml", "data.train={}/none.jsonl"],
        ["export", "--drafter", "{}/none", "--out", "{}/out"],
        ["export", "--drafter", "{}/target", "--out", "{}/out"],
        ["verify", "--drafter", "{}/none"],
        ["verify", "--drafter", "{}/target"],
        ["eval", "--drafter", "{}/none", "--target", "{}/target"],
        ["regenerate", "--sources", "{}/none.jsonl", "--output", "{}/out.jsonl", "--target.model", "{}/target"],
        ["report", "{}/none"],
        ["cache", "unpack", "{}/none.tar"],
        ["cache", "pack", "{}/out.tar", "--root", "{}/caches"],
        ["trian"],
    ],
    ids=" ".join,
)
def test_every_verb_refuses_in_one_line(words: list[str], world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word.replace("{}", str(world)) for word in words]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert "\n  hint: " in error
    assert "Traceback" not in error
    assert not list(world.glob("out*"))


def test_a_drafter_of_another_target_is_one_line_with_both_sizes(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _drafter(world)
    other = _target(world)
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(facts | {"hidden_size": 24}))
    assert cli.main(["eval", "--drafter", f"{world}/drafter", "--target", str(other)]) == 2
    first, hint = capfd.readouterr().err.splitlines()
    assert all(word in first for word in ("hidden size 16", "24", "broken")), first
    assert hint.startswith("  hint: ")


def test_a_resumed_run_whose_data_is_gone_stops_at_once(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(world / "train.jsonl", world / "gone.jsonl")
    words = ["train", str(world / "run.toml"), "run.name=resumed", f"data.train={world}/gone.jsonl"]
    assert cli.main(words) == 0
    # The held-out answers end where the target would have gone on: agreement is low, and that is said.
    assert "of held-out answer tokens are what the target itself would write" in capfd.readouterr().err
    (world / "gone.jsonl").unlink()
    metrics = (world / "runs" / "resumed" / "metrics.jsonl").read_text()
    assert cli.main([*words, "training.steps=9", "--resume"]) == 2
    assert capfd.readouterr().err.startswith("error: no data at ")
    assert (world / "runs" / "resumed" / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize("prepare", [_cut_drafter, _drafter_without_weights, _narrower_drafter])
def test_a_drafter_that_cannot_be_continued_is_refused_before_the_data_is_looked_at(
    prepare: Callable[[Path], None], world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(world)
    words = ["train", str(world / "run.toml"), f"drafter.init={world}/drafter", f"data.train={world}/none.jsonl"]
    assert cli.main(words) == 2
    assert capfd.readouterr().err.startswith("error: drafter.init = ")
