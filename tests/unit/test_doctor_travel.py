"""What travels: packing, masking, and reading torch's source and damaged files without torch."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.doctor import travel
from paceline.doctor.travel import common, fx_source, gpus, luggage, probe, process

TRAVELLERS = sorted(path.stem for path in Path(travel.__path__[0]).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", TRAVELLERS)
def test_travellers_read_as_python_3_8_and_need_only_what_travels_with_them(name: str) -> None:
    tree = ast.parse((Path(travel.__path__[0]) / f"{name}.py").read_text(), feature_version=(3, 8))
    allowed = {*luggage.ALWAYS, *luggage.NEEDS.get(name, ())}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            assert str(node.module).rpartition(".")[2] in allowed
        outside_functions = node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and outside_functions:
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert str(module).partition(".")[0] in {*sys.stdlib_module_names, "paceline"}


def test_an_echo_of_the_question_is_no_answer() -> None:
    nonce = luggage.new_nonce()
    assert luggage.unpack(luggage.pack("workers", {"folder": "/x"}, nonce), nonce) is None


def test_the_answer_is_found_among_noise() -> None:
    nonce = luggage.new_nonce()
    mark = nonce[::-1]
    told = f'Welcome!\r\nlast login\r\n<<{mark}>>{{"a": "ż\'\\"$"}}<</{mark}>>\r\nbye'
    assert luggage.unpack(told, nonce) == {"a": "ż'\"$"}
    assert luggage.unpack(told.partition("<</")[0], nonce) is None


def test_a_packed_traveller_needs_no_paceline(tmp_path: Path) -> None:
    nonce = luggage.new_nonce()
    source = luggage.pack("workers", {"folder": "/nowhere/ż", "timeout": 1}, nonce)
    assert source.isascii()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=source, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    answer = luggage.unpack(done.stdout, nonce)
    assert answer is not None
    assert answer["absent"]
    assert answer["folder"] == "/nowhere/ż"


def test_a_fault_of_the_traveller_comes_home() -> None:
    nonce = luggage.new_nonce()
    source = luggage.pack("workers", {}, nonce)
    done = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, check=True)
    answer = luggage.unpack(done.stdout, nonce)
    assert answer is not None
    assert answer["fault"] == "KeyError: 'folder'"
    assert "look" in answer["traceback"] or "main" in answer["traceback"]


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_do_not_leave_the_machine() -> None:
    kept = common.kept_environment(
        {
            "TORCH_LOGS": "recompiles",
            "CUDA_VISIBLE_DEVICES": "0",
            "HF_TOKEN": "hf_abc",
            "PACELINE_API_KEY": "abc",
            "TORCH_PASSWORD": "abc",
            "AWS_SECRET_ACCESS_KEY": "abc",
            "EDITOR": "vi",
            "PYTHON_PROXY": "http://me:hunter2@host:80",
        }
    )
    assert kept == {
        "TORCH_LOGS": "recompiles",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHON_PROXY": "http://***@host:80",
    }


def test_secrets_in_command_lines_are_masked() -> None:
    words = ["train", "--api-key", "abc", "--wandb_token=abc", "--max-tokens", "4096", "https://u:p@host/x"]
    assert common.masked_command(words) == [
        "train",
        "--api-key",
        "***",
        "--wandb_token=***",
        "--max-tokens",
        "4096",
        "https://***@host/x",
    ]


def test_values_of_local_variables_stay_where_they_are() -> None:
    dumped = {
        "thread_name": "t",
        "thread_id": 1,
        "os_thread_id": 2,
        "active": True,
        "owns_gil": False,
        "frames": [
            {
                "name": "Tracer.trace",
                "filename": "/site-packages/torch/fx/_symbolic_trace.py",
                "short_filename": "torch/fx/_symbolic_trace.py",
                "line": 1,
                "locals": [
                    {"name": "password", "repr": "'hunter2'"},
                    {"name": "old_is_fx_tracing_flag", "repr": "False"},
                ],
            }
        ],
    }
    kept = process.without_values(dumped)
    assert "hunter2" not in json.dumps(kept)
    assert kept["frames"][0]["locals"] == ["old_is_fx_tracing_flag"]


# -- torch's source ----------------------------------------------------------------------------------------------------

GLOBAL_OLD = """
_is_fx_tracing_flag = False

def is_fx_tracing():
    return _is_fx_tracing_flag

class Tracer:
    def trace(self):
        global _is_fx_tracing_flag
        _is_fx_tracing_flag = True
"""
CALL_OLD = """
def compile_wrapper():
    if is_fx_tracing():
        if config.error_on_nested_fx_trace:
            raise RuntimeError(
                "Detected that you are using FX to symbolically trace "
                "a dynamo-optimized function. This is not supported at the moment."
            )
"""
PER_THREAD = """
import threading
_is_fx_tracing_tls = threading.local()

def _get_is_fx_tracing():
    return getattr(_is_fx_tracing_tls, "value", False)

def is_fx_symbolic_tracing() -> bool:
    return _get_is_fx_tracing() and not torch.compiler.is_compiling()
"""


def fake_torch(folder: Path, tracing: str, calling: str) -> str:
    for part, text in (("fx/_symbolic_trace.py", tracing), ("_dynamo/eval_frame.py", calling)):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_text(text)
    return str(folder)


def test_the_global_flag_of_older_versions(tmp_path: Path) -> None:
    found = fx_source.fx_source(fake_torch(tmp_path, GLOBAL_OLD, CALL_OLD))
    assert found is not None
    assert (found["kind"], found["reader"], found["compiling_flag_is_global"]) == ("global", "is_fx_tracing", False)
    texts = [line["text"] for line in found["lines"]]
    assert "_is_fx_tracing_flag = False" in texts
    assert any(text.startswith("def is_fx_tracing") for text in texts)
    assert found["lines"][-1]["file"] == "torch/_dynamo/eval_frame.py"
    assert found["lines"][-1]["line"] == 3


def test_the_flag_of_each_thread(tmp_path: Path) -> None:
    calling = CALL_OLD.replace("is_fx_tracing()", "torch.fx._symbolic_trace.is_fx_symbolic_tracing() and not x")
    found = fx_source.fx_source(fake_torch(tmp_path, PER_THREAD, calling))
    assert found is not None
    assert (found["kind"], found["reader"]) == ("per thread", "is_fx_symbolic_tracing")


def test_a_torch_that_keeps_it_elsewhere(tmp_path: Path) -> None:
    found = fx_source.fx_source(fake_torch(tmp_path, "x = 1\n", "y = 2\n"))
    assert found is not None
    assert (found["kind"], found["reader"]) == ("unknown", "")


def test_the_installed_torch_is_read_as_it_behaves() -> None:
    import torch.fx._symbolic_trace as installed

    found = fx_source.fx_source()
    assert found is not None
    assert found["kind"] == ("per thread" if "_get_is_fx_tracing" in vars(installed) else "global")
    assert found["reader"] in vars(installed)


# -- files, versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.py", b"x = 1\n", None),
        ("a.py", b'x = """cut', "not Python"),
        ("a.py", b"", "empty"),
        ("__init__.py", b"", None),
        ("a.json", b'{"a": 1}', None),
        ("a.json", b"null", None),
        ("a.json", b'{"a": ', "not JSON"),
        ("a.so", b"\0" * 100, "not an object file"),
        ("a.txt", b"", None),
        ("fxgraph/ab/key/entry", pickle.dumps({"graph": 1}), None),
        ("fxgraph/ab/key/entry", pickle.dumps({"graph": 1})[:-3], "not a pickle"),
        ("fxgraph/ab/key/.12.34.tmp", b"half", None),
    ],
)
def test_damaged_files_are_seen(tmp_path: Path, name: str, data: bytes, reason: str | None) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(data)
    found = probe.damage(str(tmp_path / name))
    assert found is None if reason is None else (found or "").startswith(reason)


def test_a_shared_library_that_was_cut(tmp_path: Path) -> None:
    import _ctypes

    whole = Path(_ctypes.__file__).read_bytes()
    (tmp_path / "a.so").write_bytes(whole)
    assert probe.damage(str(tmp_path / "a.so")) is None
    (tmp_path / "a.so").write_bytes(whole[: len(whole) // 2])
    assert probe.damage(str(tmp_path / "a.so")) == "cut short"


def test_installs_in_the_order_in_which_they_would_be_found(tmp_path: Path) -> None:
    for place, versions in (("one", ["2.11.0+cu128"]), ("two", ["2.12.0", "2.13.0"]), ("none", [])):
        for version in versions:
            (tmp_path / place / f"torch-{version}.dist-info").mkdir(parents=True)
            (tmp_path / place / "torch").mkdir(exist_ok=True)
            (tmp_path / place / "torch" / "__init__.py").touch()
    path = [str(tmp_path / name) for name in ("none", "two", "one", "two")]
    assert probe.installs(path)["torch"] == [
        {"place": path[1], "version": "2.12.0 and 2.13.0"},
        {"place": path[2], "version": "2.11.0+cu128"},
    ]


def test_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        'if [ "$#" = 0 ]; then echo "| NVIDIA-SMI 580.159   CUDA Version: 13.0     |"; exit; fi\n'
        'echo "0, NVIDIA H200, 9.0, 143771, 143000, 580.159"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gpus._gpus_by_smi()
    assert (found["driver"], found["cuda"]) == ("580.159", "13.0")
    assert found["devices"][0]["capability"] == [9, 0]
    assert found["devices"][0]["free"] == 143000 << 20


def test_mounts() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\ntmpfs /data/tmp tmpfs rw,noexec 0 0\n"
    assert common.mount_of("/data/cache", mounts)["kind"] == "nfs4"
    assert common.mount_of("/data/tmp/x", mounts)["options"] == "rw,noexec"
    assert common.mount_of("/database", mounts)["kind"] == "ext4"
