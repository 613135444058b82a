"""A whole compiled run compiles nothing after its warm-up, and its drafter takes no other shape."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from pipeline_world import config_of, make_world, records

from paceline import config as configuration
from paceline.config import CompilingConfig

PROGRAM = """
import sys
from cases_programs import two_hundred_compiled_steps
from paceline import config
from paceline.pipeline.process import World
sys.exit(two_hundred_compiled_steps(config.load(sys.argv[1]), World(), False))
"""


def test_two_hundred_steps_compile_nothing_and_twenty_shapes_are_refused(tmp_path: Path) -> None:
    make_world(tmp_path)
    config = config_of(tmp_path, steps=200, every=0)
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, global_batch=1),
        evaluation=dataclasses.replace(config.evaluation, every=50),
        compiling=CompilingConfig(cache=str(tmp_path / "cache")),
    )
    path = tmp_path / "config.toml"
    path.write_text(configuration.dump(config))
    # A process of its own: forbidding to compile is for good.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = [record for record in records(tmp_path / "runs" / "run") if record["event"] == "step"]
    assert len(steps) == 200
    counted = json.loads((tmp_path / "runs" / "run" / "counted.json").read_text())
    nothing = counted["run"]
    assert not any(letter.isdigit() and letter != "0" for letter in nothing), nothing
    assert counted["offers"] == nothing
    assert len(counted["refused"]) == 20
    assert all("compiled" in words and "size" in words for words in counted["refused"]), counted["refused"][0]
