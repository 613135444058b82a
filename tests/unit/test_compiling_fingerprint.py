"""Fingerprints: what they notice, how they say it, and that reading one disturbs nothing."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.compiling.fingerprint import Fingerprint, announce_change, previous, remember, take

WORDS = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=12)
FINGERPRINTS = st.builds(
    Fingerprint,
    **{name: WORDS for name in ("torch", "triton", "cuda", "driver", "gpu", "cpu", "python", "code")},
    flags=st.dictionaries(WORDS, WORDS, max_size=3),
)


@given(FINGERPRINTS)
def test_json_round_trip_keeps_the_key(fingerprint: Fingerprint) -> None:
    copy = Fingerprint(**json.loads(json.dumps(dataclasses.asdict(fingerprint))))
    assert (copy, copy.key) == (fingerprint, fingerprint.key)
    assert copy.differences(fingerprint) == []


@given(FINGERPRINTS, FINGERPRINTS)
def test_keys_differ_exactly_where_differences_are_named(one: Fingerprint, other: Fingerprint) -> None:
    assert bool(one.differences(other)) == (one.key != other.key)


def test_differences_are_words(here: Fingerprint) -> None:
    old = dataclasses.replace(here, torch="2.11.0+cu128", flags={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    new = dataclasses.replace(here, torch="2.11.0+cu130", flags={})
    assert old.differences(new) == ["torch 2.11.0+cu128 -> 2.11.0+cu130", "TORCHINDUCTOR_MAX_AUTOTUNE 1 -> unset"]
    assert announce_change(old, new, 40.2) == (
        "torch 2.11.0+cu128 -> 2.11.0+cu130; TORCHINDUCTOR_MAX_AUTOTUNE 1 -> unset: compiling anew, expect 40 s"
    )


def test_the_last_start_is_remembered_in_the_run(tmp_path: Path, here: Fingerprint) -> None:
    assert previous(tmp_path) is None
    remember(tmp_path, here)
    assert previous(tmp_path) == here
    assert announce_change(previous(tmp_path), here) is None


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "fingerprint.json").write_text('{"torch": "2')
    assert previous(tmp_path) is None


def test_source_of_compiled_modules_counts_wherever_it_lies(tmp_path: Path) -> None:
    for checkout in ("a", "b"):
        (tmp_path / checkout / "room").mkdir(parents=True)
        (tmp_path / checkout / "room" / "model.py").write_text("x = 1\n")
    one, same = (take(files=[tmp_path / checkout / "room" / "model.py"], modules=()) for checkout in ("a", "b"))
    assert one == same
    (tmp_path / "b" / "room" / "model.py").write_text("x = 2\n")
    changed = take(files=[tmp_path / "b" / "room" / "model.py"], modules=())
    assert one.differences(changed) == ["source of the compiled modules changed"]


def test_flags_of_the_environment_count_but_places_do_not(monkeypatch: pytest.MonkeyPatch, here: Fingerprint) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/else")
    assert take(modules=()).key == here.key
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert here.differences(take(modules=())) == ["TORCHINDUCTOR_MAX_AUTOTUNE unset -> 1"]


def test_taking_one_imports_no_inductor_and_leaves_the_environment_alone() -> None:
    program = """
import os, sys
before = dict(os.environ)
import paceline.compiling.cache
from paceline.compiling.fingerprint import take
take()
assert dict(os.environ) == before
assert not [name for name in sys.modules if name.startswith("torch._inductor.codecache")]
import torch
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


@pytest.fixture
def here() -> Fingerprint:
    return take(modules=())
