"""Judges the facts of one machine: each check is a pure function from the probe's facts to findings."""

from __future__ import annotations

from typing import Any

from paceline.doctor.checks import caches, fx, gpus, host, python, settings, versions
from paceline.doctor.findings import Finding

CHECKS = (
    python.check,
    versions.check,
    gpus.check,
    fx.check,
    settings.check,
    caches.check,
    host.check,
)


def judge(facts: dict[str, Any]) -> list[Finding]:
    """All findings on what the probe brought back, in the order of the report."""
    return [finding for check in CHECKS for finding in check(facts)]
