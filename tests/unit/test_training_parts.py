"""What a run builds, and what it spares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.training.parts import with_feature_cache


def test_a_run_without_a_step_left_keeps_no_features() -> None:
    """They take minutes, or hours, and only steps read them."""
    run: Any = SimpleNamespace(
        config=SimpleNamespace(target=SimpleNamespace(feature_cache="memory")),
        schedule=SimpleNamespace(start=600),
        total=600,
    )
    target: Any = object()
    assert with_feature_cache(run, target) is target
