"""One machine's facts, changed one at a time, and what is made of each change."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from rich.console import Console

from paceline.doctor import foreign, render, trials
from paceline.doctor.checks import fx, judge
from paceline.doctor.checks.numbers import release, size, version
from paceline.doctor.findings import Finding, Level, error, exit_code, info, ok, warning

GIB = 1 << 30

HEALTHY: dict[str, Any] = {
    "host": "box",
    "python": {
        "version": "3.12.3",
        "executable": "/venv/bin/python",
        "prefix": "/venv",
        "base_prefix": "/usr",
        "path": ["/venv/lib"],
        "user_site": None,
        "header": "/usr/include/Python.h",
        "start_method": "spawn",
    },
    "environment": {"PATH": "/usr/bin"},
    "installs": {"torch": [{"place": "/venv/lib", "version": "2.11.0"}], "triton": [], "transformers": []},
    "packages": {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "nvidia-nccl-cu13": "2.28.9"},
    "requires": {"torch": ["triton==3.6.0; platform_system == 'Linux'", "nvidia-nccl-cu13==2.28.9"], "paceline": []},
    "fx": {
        "kind": "per thread",
        "reader": "is_fx_symbolic_tracing",
        "compiling_flag_is_global": False,
        "lines": [
            {"file": "torch/fx/_symbolic_trace.py", "line": 44, "text": "_is_fx_tracing_tls = threading.local()"}
        ],
    },
    "tools": {
        "cc": {"place": "/usr/bin/gcc", "version": "gcc 12"},
        "c++": {"place": "/usr/bin/g++", "version": "g++ 12"},
        "clang": None,
        "nvcc": {"place": "/usr/local/cuda/bin/nvcc", "version": "Cuda compilation tools, release 13.0, V13.0.88"},
        "ptxas": None,
        "TRITON_PTXAS_PATH": None,
    },
    "gpus": {
        "source": "NVML",
        "driver": "580.159",
        "cuda": "13.0",
        "devices": [
            {
                "index": i,
                "name": "NVIDIA H200",
                "capability": [9, 0],
                "total": 140 * GIB,
                "free": 139 * GIB,
                "mode": 0,
                "holders": [],
            }
            for i in range(2)
        ],
        "no_peer": [],
    },
    "limits": {"open_files": [65536, 65536]},
    "places": {
        "shared memory": {
            "path": "/dev/shm",
            "total": 64 * GIB,
            "free": 64 * GIB,
            "kind": "tmpfs",
            "noexec": False,
            "writable": True,
        },
        "temporary files": {
            "path": "/tmp",
            "total": 64 * GIB,
            "free": 64 * GIB,
            "kind": "ext4",
            "noexec": False,
            "writable": True,
        },
    },
    "caches": [
        {
            "owner": "torch",
            "path": "/tmp/cache",
            "exists": True,
            "free": 64 * GIB,
            "kind": "ext4",
            "noexec": False,
            "writable": True,
            "files": 40,
            "bytes": 1 << 20,
            "damaged": [],
            "all_looked_at": True,
        }
    ],
    "cpu": {"count": 16, "allowed": 16, "quota": None},
    "memory": {"total": 128 * GIB, "available": 100 * GIB, "limit": None, "used_of_limit": None},
    "ports": {"port": "29500", "chosen": False, "free": True, "own_name": "127.0.0.1", "interfaces": ["lo", "eth0"]},
    "torch": {
        "version": "2.11.0+cu130",
        "cuda_build": "13.0",
        "import_seconds": 2.0,
        "cuda": {
            "available": True,
            "count": 2,
            "devices": [{"name": "NVIDIA H200", "capability": [9, 0]}],
            "built_for": ["sm_80", "sm_90", "sm_100", "sm_120"],
            "nccl": "2.28.9",
        },
        "triton": {"version": "3.6.0", "ptxas": "Cuda compilation tools, release 12.9, V12.9.86"},
        "dynamo": {
            "settings": {"error_on_nested_fx_trace": True, "recompile_limit": 8},
            "holds_in_threads": True,
            "thread_saw": 64,
            "set": 64,
        },
        "inductor": {
            "fx_graph_cache": True,
            "autograd_cache": True,
            "force_disable_caches": False,
            "compile_threads": 16,
        },
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(HEALTHY)
    *way, last = path.split("/")
    place: Any = facts
    for key in way:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    return facts


def serious(facts: dict[str, Any]) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level >= Level.WARNING]


def test_a_healthy_machine_has_nothing_but_good_news() -> None:
    assert [finding for finding in judge(HEALTHY) if finding.level is not Level.OK] == []


@pytest.mark.parametrize(
    ("path", "value", "level", "what", "told"),
    [
        ("torch/version", "2.9.1", Level.WARNING, "torch", "2.9.1"),
        ("packages/triton", "3.5.0", Level.ERROR, "triton", "3.5.0; this torch asks for 3.6.0"),
        ("packages/transformers", "4.57.0", Level.WARNING, "transformers", "4.57.0"),
        ("packages/nvidia-nccl-cu13", "2.27.3", Level.WARNING, "NCCL", "2.27.3"),
        ("torch/cuda/nccl", "2.21.5", Level.WARNING, "NCCL", "2.21.5 is loaded"),
        ("gpus/cuda", "12.4", Level.ERROR, "driver", "good for CUDA 12.4"),
        ("tools/nvcc/version", "release 12.4, V12.4", Level.WARNING, "CUDA toolkit", "nvcc 12.4"),
        ("environment/TRITON_PTXAS_PATH", "/nope", Level.ERROR, "ptxas", "/nope is no program"),
        ("torch/absent", True, Level.ERROR, "torch", "not installed"),
        ("python/header", None, Level.ERROR, "no Python.h", "3.12.3"),
        ("tools/c++", None, Level.OK, "", ""),
        ("environment/VIRTUAL_ENV", "/other", Level.WARNING, "the activated environment", "/other"),
        ("environment/PYTHONPATH", "/x:/venv/lib", Level.WARNING, "torch comes from PYTHONPATH", "/venv/lib"),
        ("python/user_site", "/venv/lib", Level.WARNING, "torch comes from the user's site", "/venv/lib"),
        ("installs/torch/0/version", "2.11.0 and 2.13.0", Level.ERROR, "torch was replaced by halves", "2.13.0"),
        ("gpus/devices/0/free", 20 * GIB, Level.WARNING, "GPU 0", "20.0 GiB of 140 GiB free"),
        ("gpus/devices/0/mode", 2, Level.ERROR, "GPU 0", "H200"),
        ("torch/cuda", {"available": False, "why": "old"}, Level.ERROR, "torch sees no GPU", "old"),
        ("torch/cuda/built_for", ["sm_80", "sm_100"], Level.ERROR, "NVIDIA H200", "9.0"),
        ("environment/TORCHDYNAMO_DISABLE", "1", Level.ERROR, "TORCHDYNAMO_DISABLE", "1"),
        ("environment/CUDA_LAUNCH_BLOCKING", "1", Level.WARNING, "CUDA_LAUNCH_BLOCKING", "1"),
        ("environment/TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "30", Level.WARNING, "TORCH_NCCL_HEARTBEAT", "30"),
        ("torch/inductor/force_disable_caches", True, Level.WARNING, "Inductor's caches", "off"),
        ("torch/dynamo/settings/error_on_nested_fx_trace", False, Level.WARNING, "error_on_nested", "off"),
        ("caches/0/kind", "nfs4", Level.WARNING, "on a network file system", "nfs4"),
        ("caches/0/noexec", True, Level.ERROR, "mounted noexec", "/tmp/cache"),
        ("caches/0/free", 1 << 20, Level.ERROR, "little space", "1.0 MiB"),
        ("caches/0/damaged", [{"file": "x.py", "reason": "empty"}], Level.ERROR, "damaged files", "x.py (empty)"),
        (
            "caches/0/damaged", [{"file": "fxgraph/ab/key/x", "reason": "cut"}], Level.WARNING, "damaged files",
            "fxgraph/ab/key/x (cut)",
        ),
        ("places/shared memory/free", 64 << 20, Level.ERROR, "little shared memory", "64.0 MiB"),
        ("limits/open_files", [256, 4096], Level.WARNING, "open files", "256"),
        ("cpu/allowed", 1, Level.WARNING, "processors", "1 of 16"),
        ("environment/OMP_NUM_THREADS", "64", Level.WARNING, "processors", "OMP_NUM_THREADS=64"),
        ("memory/available", 1 * GIB, Level.WARNING, "memory", "1.0 GiB of 128 GiB"),
        ("ports/own_name", None, Level.WARNING, "own name", "resolved"),
        ("environment/NCCL_SOCKET_IFNAME", "ib0", Level.ERROR, "NCCL_SOCKET_IFNAME", "lo, eth0"),
    ],
)  # fmt: skip
def test_each_change_is_found_and_alone(path: str, value: Any, level: Level, what: str, told: str) -> None:
    found = serious(changed(path, value))
    if level is Level.OK:
        assert found == []
        return
    (only,) = found
    assert only.level is level
    assert only.what.startswith(what)
    assert told in only.value
    assert only.why
    assert only.remedy


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("gpus/no_peer", [[0, 1]], "no peer access"),
        ("python/start_method", "fork", "start method of multiprocessing"),
        ("fx/kind", "global", "the flag"),
        ("torch/dynamo/holds_in_threads", False, "Dynamo's settings in other threads"),
        ("tools/nvcc/version", "release 13.1, V13.1", "CUDA toolkit"),
        ("limits/open_files", [1024, 4096], "open files"),
        ("caches/0/files", 0, "torch's default"),
        ("environment/NCCL_TIMEOUT", "1800", "NCCL_TIMEOUT"),
    ],
)
def test_what_is_worth_knowing_is_information(path: str, value: Any, what: str) -> None:
    assert [f.what for f in judge(changed(path, value)) if f.level is not Level.OK] == [what]


def caches_of(files: int, **changes: object) -> list[Finding]:
    """What is said of Paceline's own cache and of torch's, in that order."""
    owners = ({**HEALTHY["caches"][0], "files": files, **changes, "owner": owner} for owner in ("paceline", "torch"))
    facts = changed("caches", list(owners))
    facts["packages"]["paceline"] = "0.1"
    return [finding for finding in judge(facts) if finding.subject == "compile cache"]


@pytest.mark.parametrize("files", [0, 40])
def test_whose_cache_it_is_stands_in_each_line(files: int) -> None:
    own, torchs = caches_of(files)
    assert (own.what, torchs.what) == ("Paceline's own", "torch's default")
    assert "for its runs" in own.value
    assert "for programs other than Paceline" in torchs.value
    assert ("nothing compiled yet" in own.value) == (files == 0)


def test_no_cache_of_paceline_is_missed_where_it_is_not_installed() -> None:
    absent = {**HEALTHY["caches"][0], "owner": "paceline", "exists": False, "files": 0}
    assert not [finding for finding in judge(changed("caches", [absent])) if finding.subject == "compile cache"]


def test_damage_in_paceline_s_own_cache_needs_no_hand() -> None:
    _, own, _, torchs = caches_of(40, damaged=[{"file": "x.py", "reason": "empty"}])
    assert own.level is Level.INFO
    assert "the next run removes them" in own.why
    assert torchs.level is Level.ERROR
    assert "rm -r /tmp/cache" in torchs.remedy


def test_a_remedy_names_the_setting_that_moves_that_cache() -> None:
    _, own, _, torchs = caches_of(40, writable=False)
    assert own.remedy.startswith("compiling.cache")
    assert torchs.remedy.startswith("TORCHINDUCTOR_CACHE_DIR")


def test_several_installs_are_listed_in_order() -> None:
    copies = [{"place": "/a", "version": "2.11.0"}, {"place": "/b", "version": "2.13.0"}]
    (found,) = serious(changed("installs/torch", copies))
    assert found.value == "2.11.0 in /a; then 2.13.0 in /b"


def test_a_torch_that_cannot_be_imported_stands_for_all_that_it_would_have_told() -> None:
    (found,) = serious(changed("torch", {"code": 1, "fault": "libcudart.so.13: not found", "timeout": 60}))
    assert found.what == "torch cannot be imported"
    (late,) = serious(changed("torch", {"code": None, "fault": "", "timeout": 60}))
    assert "60 s" in late.value


def test_the_source_is_shown_with_its_places() -> None:
    assert fx.source(HEALTHY)[0] == "torch/fx/_symbolic_trace.py:44"


def test_numbers() -> None:
    assert version("2.11.0+cu128") == (2, 11, 0)
    assert version(None) == ()
    assert release("Cuda compilation tools, release 12.9, V12.9.86") == (12, 9)
    assert [size(n) for n in (12, 2048, 1536 << 20, 300 << 30)] == ["12 B", "2 KiB", "1.5 GiB", "300 GiB"]


# -- a process, the trials ---------------------------------------------------------------------------------------------

PROCESS: dict[str, Any] = {
    "pid": 7,
    "host": "box",
    "name": "python",
    "state": "S (sleeping)",
    "command": ["python", "train.py"],
    "executable": "/usr/bin/python3.12",
    "kernel": False,
    "python": True,
    "python_below": [],
    "uid": ["1000"],
    "environment": {},
    "memory": {"resident": GIB, "peak": GIB, "limit": None, "used_of_limit": None, "killed": 0},
    "tasks": [{"id": 7, "name": "python", "state": "S", "wchan": "futex"}],
    "files": {"count": 5, "limit": 1024, "kinds": {}, "devices": [], "caches": [], "deleted": [], "tcp": []},
    "forked": [],
    "torch": {"folders": ["/venv/torch"], "versions": ["2.11.0"]},
    "samples": [],
    "spy_fault": "Permission Denied: Try running again with elevated permissions",
    "spy_kind": "refused",
    "rights": {"uid": 1000, "may_trace": False, "ptrace_scope": 1, "container": False},
}


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({}, "ptrace_scope"),
        ({"uid": ["0"]}, "as root"),
        ({"uid": ["1001"], "rights": {**PROCESS["rights"], "uid": 0}}, "--cap-add SYS_PTRACE"),
        ({"spy_kind": "timed out"}, "look again"),
        ({"spy_kind": "not python"}, "pip install -U py-spy"),
        ({"rights": {**PROCESS["rights"], "container": True}}, "--cap-add SYS_PTRACE"),
        ({"rights": {**PROCESS["rights"], "may_trace": True}}, "seccomp"),
        ({"spy_kind": "absent"}, "pip install py-spy"),
    ],
)
def test_refused_stacks_name_the_remedy_that_fits(change: dict[str, Any], remedy: str) -> None:
    (found,) = [one for one in foreign.judge({**PROCESS, **change}) if one.level >= Level.WARNING]
    assert found.what == "no stacks"
    assert remedy in found.remedy


def only_serious(**change: object) -> Finding:
    (found,) = [one for one in foreign.judge({**PROCESS, **change}) if one.level >= Level.WARNING]
    return found


SHELL = {"python": False, "executable": "/usr/bin/bash", "name": "bash", "command": ["bash", "run.sh"]}


@pytest.mark.parametrize("kind", ["not python", "refused", "absent", "other"])
def test_what_is_no_python_process_is_called_so_whatever_py_spy_says(kind: str) -> None:
    found = only_serious(**SHELL, spy_kind=kind)
    assert found.what == "not a Python process"
    assert "/usr/bin/bash" in found.value
    assert "pgrep -af python" in found.remedy
    assert "ptrace" not in found.remedy + found.why


def test_the_python_below_a_shell_is_named() -> None:
    found = only_serious(**SHELL, python_below=[{"pid": 812, "command": "python train.py"}])
    assert "--pid 812 (python train.py)" in found.remedy


@pytest.mark.parametrize(("name", "said"), [("process_api", True), ("python3.12", False)])
def test_a_refused_look_says_that_it_may_not_even_be_python(name: str, said: bool) -> None:
    found = only_serious(python=None, name=name, command=[f"/opt/{name}"], spy_kind="refused")
    assert found.what == "no stacks"
    assert ("whether it is Python" in found.value) == said
    assert ("if it is no Python process" in found.remedy) == said


def test_what_may_not_be_seen_is_not_called_absent() -> None:
    hidden = {"torch": {"refused": True, "folders": [], "versions": []}, "files": {"refused": True}}
    told = {one.what: one.value for one in foreign.judge({**PROCESS, **hidden}) if one.level is Level.INFO}
    assert "may not see" in told["torch"]
    assert "may not be read" in told["open files"]


def test_a_thread_of_the_kernel_and_a_zombie_have_no_stacks_and_no_blame() -> None:
    memory = {**PROCESS["memory"], "resident": None}
    found = foreign.judge({**PROCESS, "kernel": True, "python": False, "memory": memory})
    assert [one.what for one in found if one.level > Level.OK] == ["no stacks"]
    zombie = only_serious(state="Z (zombie)", python=False)
    assert zombie.what == "state"


def test_a_process_that_ends_meanwhile() -> None:
    (found,) = foreign.judge({"absent": True, "ended": True, "pid": 7, "host": "box"})
    assert (found.level, found.what) == (Level.ERROR, "ended")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state": "T (stopped)"}, "state"),
        ({"forked": [8, 9]}, "forked children"),
        ({"memory": {**PROCESS["memory"], "limit": GIB, "used_of_limit": GIB, "killed": 2}}, "memory"),
        ({"files": {**PROCESS["files"], "count": 1000}}, "open files"),
        ({"torch": {"folders": ["/a", "/b"], "versions": []}}, "torch"),
        ({"environment": {"TORCHDYNAMO_DISABLE": "1"}}, "TORCHDYNAMO_DISABLE"),
        (
            {"tasks": [{"id": 7, "name": "python", "state": "D", "wchan": "nfs_wait"}]},
            "threads in uninterruptible sleep",
        ),
    ],
)
def test_what_proc_tells(change: dict[str, Any], what: str) -> None:
    found = [one.what for one in foreign.judge({**PROCESS, **change}) if one.level >= Level.WARNING]
    assert what in found


def test_no_such_process() -> None:
    (found,) = foreign.judge({"absent": True, "pid": 7, "host": "box"})
    assert found.level is Level.ERROR


def test_race_check_in_words() -> None:
    hazards = {
        "call during a trace": {"hit": True, "seen": "RuntimeError"},
        "fork during a trace": {"hit": False, "seen": "fine"},
    }
    hit, clean = trials.race_findings({"torch": "2.11.0", "hazards": hazards})
    assert (hit.level, clean.level) == (Level.WARNING, Level.OK)


def test_compile_check_in_words() -> None:
    once = {
        "device": "cpu", "backward": False, "seconds": {"import torch": 1.0, "first call": 9.0, "second call": 0.1},
        "largest_error": 1e-6, "traces": 9, "hits": 0, "misses": 1,
    }  # fmt: skip
    warm = {**once, "traces": 0, "hits": 1, "misses": 0}
    assert [f.level for f in trials.compile_findings({"cold": once, "warm": warm})] == [Level.OK, Level.OK]
    assert [f.what for f in trials.compile_findings({"cold": once, "warm": once})][-1] == "the cache is not used"
    assert exit_code(trials.compile_findings({"cold": {**once, "largest_error": float("nan")}, "warm": warm})) == 2
    assert exit_code(trials.compile_findings({"cold": {"fault": "timed out"}, "warm": warm})) == 2


# -- the report --------------------------------------------------------------------------------------------------------

REPORT = [
    ok("host", "memory", "lots"),
    info("host", "port", "in use"),
    warning("FX tracing", "[brackets]", "a value " * 30, "because", "do this"),
    error("FX tracing", "bad", "", "because", "do that"),
]


def test_exit_codes() -> None:
    assert [exit_code(REPORT[:n]) for n in (0, 1, 2, 3, 4)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_its_terminal_and_keeps_every_word(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=width, color_system=None)
    render.show(console, REPORT, "title")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert text.split().count("value") == 30
    for word in ("[brackets]", "→ do this", "1 error, 1 warning"):
        assert word in text


def test_plain_lines_when_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    render.show(Console(force_terminal=False), REPORT, "title")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["title", "ok      host: memory: lots", "info    host: port: in use"]
    assert lines[-1] == "4 things looked at: 1 error, 1 warning"
    assert sum(line.startswith("        do: ") for line in lines) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_of_source_are_not_broken(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    line = "    if [is_fx_tracing()] and " + "x" * 200
    render.show_lines(Console(force_terminal=terminal, width=80, color_system=None), [line, "next"])
    assert capsys.readouterr().out.splitlines() == [line, "next"]


def test_json() -> None:
    body = json.loads(render.as_json(REPORT, {"machine": {"host": "ż"}}))
    assert body["worst"] == "error"
    assert body["findings"][0] == {
        "level": "ok", "subject": "host", "what": "memory", "value": "lots", "why": "", "remedy": "",
    }  # fmt: skip
