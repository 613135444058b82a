"""Which Python this is, and whether another one's packages shine through."""

from __future__ import annotations

from typing import Any

from paceline.doctor.findings import Finding, error, info, ok, warning

SUBJECT = "python"


def check(facts: dict[str, Any]) -> list[Finding]:
    python = facts["python"]
    return [
        ok(SUBJECT, "Python", f"{python['version']} at {python['executable']}"),
        *_activated_elsewhere(facts),
        *_shadowed(facts),
        *_copies(facts),
        *_start_method(python),
    ]


def _activated_elsewhere(facts: dict[str, Any]) -> list[Finding]:
    active = facts["environment"].get("VIRTUAL_ENV") or facts["environment"].get("CONDA_PREFIX")
    if not active or active.rstrip("/") == facts["python"]["prefix"].rstrip("/"):
        return []
    return [
        warning(
            SUBJECT,
            "the activated environment is not the one that runs",
            f"VIRTUAL_ENV or CONDA_PREFIX is {active}, this Python's is {facts['python']['prefix']}",
            "pip installs into the one, the launch runs in the other",
            "deactivate, or start the launch with that environment's own python",
        )
    ]


def _shadowed(facts: dict[str, Any]) -> list[Finding]:
    """torch found outside the environment that runs: through PYTHONPATH or the user's site folder."""
    first = (facts["installs"].get("torch") or [{}])[0].get("place", "")
    user = facts["python"]["user_site"]
    if user and first.startswith(user):
        return [
            warning(
                SUBJECT,
                "torch comes from the user's site folder",
                first,
                "what pip installed for the user stands before the environment's own packages",
                "set PYTHONNOUSERSITE=1, or remove it there: pip uninstall --user torch",
            )
        ]
    paths = [path for path in facts["environment"].get("PYTHONPATH", "").split(":") if path]
    if first and any(first.rstrip("/") == path.rstrip("/") for path in paths):
        return [
            warning(
                SUBJECT,
                "torch comes from PYTHONPATH",
                first,
                "PYTHONPATH stands before the environment's own packages, in every Python that is started",
                "unset PYTHONPATH",
            )
        ]
    return []


def _copies(facts: dict[str, Any]) -> list[Finding]:
    found: list[Finding] = []
    for name, copies in facts["installs"].items():
        if len(copies) > 1:
            shown = "; then ".join(f"{copy['version']} in {copy['place']}" for copy in copies)
            found.append(
                warning(
                    SUBJECT,
                    f"several installs of {name}",
                    shown,
                    "the first on the path is used, and libraries of the others may be loaded with it",
                    "keep one: remove the others, or leave their folders out of the path",
                )
            )
        for copy in copies:
            if " and " in copy["version"]:
                found.append(_half_replaced(name, copy))
    return found


def _half_replaced(name: str, copy: dict[str, str]) -> Finding:
    return error(
        SUBJECT,
        f"{name} was replaced by halves",
        f"metadata of {copy['version']} in {copy['place']}",
        "files of two versions are mixed, which fails in ways that no message explains",
        f"pip uninstall {name} until none is left, then install it again",
    )


def _start_method(python: dict[str, Any]) -> list[Finding]:
    if python["start_method"] != "fork":
        return [ok(SUBJECT, "start method of multiprocessing", python["start_method"])]
    return [
        info(
            SUBJECT,
            "start method of multiprocessing",
            "fork (Python's default here)",
            "a process that is forked while any thread traces inherits the FX-tracing flag for good (torch up to "
            "2.13), and CUDA does not work in it; DataLoader workers and Pool fork unless told otherwise",
            "multiprocessing_context='spawn' in DataLoader, get_context('spawn') elsewhere; Paceline spawns",
        )
    ]
