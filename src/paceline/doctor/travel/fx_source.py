"""How the installed torch asks whether FX is tracing, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import os
import textwrap
from typing import Any

from paceline.doctor.travel.common import read

_PHRASE = "using FX to symbolically trace"
_FLAG = "_is_fx_tracing"


def fx_source(torch_folder: str | None = None) -> dict[str, Any] | None:
    """The check as the installed source has it, read without importing torch.

    ``kind``: "global", "per thread" or "unknown"; ``reader``: the function that `compile_wrapper` asks;
    ``lines``: the places themselves.
    """
    folder = torch_folder or _torch_folder()
    if folder is None:
        return None
    tracing = read(os.path.join(folder, "fx", "_symbolic_trace.py"))
    calling = read(os.path.join(folder, "_dynamo", "eval_frame.py"))
    compiler = read(os.path.join(folder, "compiler", "__init__.py"))
    kind, flag_lines = _flag_kind(tracing)
    reader, call_lines = _check_in(calling)
    _, reader_lines = _function_in(tracing, reader)
    return {
        "kind": kind,
        "reader": reader,
        "compiling_flag_is_global": "global _is_compiling_flag" in compiler,
        "lines": [
            *({"file": "torch/fx/_symbolic_trace.py", **line} for line in [*flag_lines, *reader_lines]),
            *({"file": "torch/_dynamo/eval_frame.py", **line} for line in call_lines),
        ],
    }


def _torch_folder() -> str | None:
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return places[0] if places else None


def _flag_kind(source: str) -> tuple[str, list[dict[str, Any]]]:
    kind, found = "unknown", []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _FLAG in ast.dump(node):
            text = _text(source, node)
            kind = "per thread" if "threading.local" in text or "_tls" in text.lower() else "global"
            found.append({"line": node.lineno, "text": text})
    lines = source.splitlines()
    writes = [n for n, line in enumerate(lines, 1) if _FLAG in line and "=" in line and line.startswith(" ")]
    return kind, [*found, *({"line": n, "text": lines[n - 1].strip()} for n in writes)]


def _check_in(source: str) -> tuple[str, list[dict[str, Any]]]:
    """The ``if`` round torch's message, and the name that it calls."""
    around = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If) and _PHRASE in ast.dump(node)]
    asking = [node for node in around if "fx" in ast.dump(node.test).lower()]
    for node in sorted(asking, key=lambda node: -node.lineno):
        names = [name for call in ast.walk(node.test) if isinstance(call, ast.Call) and "fx" in (name := _called(call))]
        if names:
            return names[0], [{"line": node.lineno, "text": _text(source, node)}]
    return "", []


def _called(call: ast.Call) -> str:
    """The last part of the name that is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _function_in(source: str, name: str) -> tuple[str, list[dict[str, Any]]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return name, [{"line": node.lineno, "text": _text(source, node)}]
    return name, []


def _text(source: str, node: ast.AST) -> str:
    lines = (ast.get_source_segment(source, node, padded=True) or "").splitlines()
    return textwrap.dedent("\n".join(lines[:12]))
