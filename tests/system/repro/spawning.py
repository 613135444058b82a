"""Runs a script of this folder in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def start(script: str, *arguments: object) -> subprocess.Popen:
    """Started, with standard output and error piped as text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def answer(process: subprocess.Popen, seconds: float = 240.0) -> dict:
    """The JSON object that it printed last; fails with its error output where there is none."""
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, f"exit {process.returncode}\n{errors[-3000:]}"
    return json.loads(output.strip().splitlines()[-1])
