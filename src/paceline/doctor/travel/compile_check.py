"""Times a small flex_attention in fresh processes: on an empty cache, and again on what the first one left."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from paceline.doctor.travel.common import masked
from paceline.doctor.travel.luggage import NoAnswer, run_child


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: ``timeout``, seconds for each of the two processes; ``device``, optional."""
    folder = tempfile.mkdtemp(prefix="paceline-compile-check-")
    try:
        return {start: _once(argument, folder) for start in ("cold", "warm")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _once(argument: dict[str, Any], folder: str) -> dict[str, Any]:
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    try:
        return run_child("compile_once", argument, float(argument["timeout"]), {**os.environ, **places})
    except NoAnswer as silence:
        words = masked(silence.last_words()) or "nothing was printed"
        return {"fault": "timed out" if silence.returncode is None else f"exit code {silence.returncode}: {words}"}
