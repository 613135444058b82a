"""Dynamo's settings, made to hold in every thread.

From torch 2.12 on, a value that is assigned to ``torch._dynamo.config`` is a context variable: worker threads and the
autograd engine's own threads see the default again (recompile_limit 64 -> 8; pytorch issue 186537). So the default
itself is set as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch._dynamo.config as dynamo_config


@dataclass(frozen=True)
class DynamoSettings:
    """The settings that decide whether a launch survives; their defaults are what Paceline runs with."""

    recompile_limit: int = 64
    """Per code object, shared by every ``torch.compile`` of it; torch's default of 8 falls back to eager silently."""
    accumulated_recompile_limit: int = 512
    fail_on_recompile_limit_hit: bool = True
    """A fast path that is lost is an error."""
    error_on_nested_fx_trace: bool = True
    """Turned off, the race is still there, and what does not die runs eager."""
    automatic_dynamic_shapes: bool = False
    """Shapes are constants of the run."""
    suppress_errors: bool = False


def settings() -> DynamoSettings:
    """What this thread sees."""
    names = asdict(DynamoSettings())
    return replace(DynamoSettings(), **{name: getattr(dynamo_config, name) for name in names})


def apply_settings(wanted: DynamoSettings | None = None) -> None:
    """Make these hold in this thread and in every other, those of the autograd engine included.

    Call it once, early, in the main thread. Other threads that assigned a value themselves keep theirs.
    """
    for name, value in asdict(wanted or DynamoSettings()).items():
        setattr(dynamo_config, name, value)
        _entries()[name].default = value


def _entries() -> Mapping[str, Any]:
    return vars(dynamo_config)["_config"]
