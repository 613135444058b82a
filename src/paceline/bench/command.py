"""`paceline bench`: a timed part as one JSON record, and compared with an earlier one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.bench.case import Case, make_case
from paceline.bench.measuring import machine
from paceline.bench.options import PARTS, BenchOptions, options_of
from paceline.errors import UserError

_LOWER_IS_BETTER = {
    "step_seconds": True,
    "beyond_kept_gib": True,
    "plain_tokens_per_second": False,
    "speculative_tokens_per_second": False,
}
"""What is compared, wherever it stands in a record."""

_NOT_OF_THE_WORK = frozenset({"part", "model", "drafter", "prompts", "steps", "warm", "out", "compare", "tolerance"})
"""Options that two records to compare may differ in."""


def run_bench(options: BenchOptions) -> int:
    """Time, print, write, compare. Returns the exit status: 1 when slower than the record compared with."""
    case = make_case(options)
    earlier = _read(options.compare, case) if options.compare else None
    record = record_of(case)
    print(json.dumps(record, indent=1))
    print(summary(record), file=sys.stderr)
    if options.out:
        _write(options.out, record)
    if earlier is None:
        return 0
    if (was := earlier.get("machine", {}).get("device")) != record["machine"]["device"]:
        print(f"{options.compare} was taken on {was}, not on {record['machine']['device']}", file=sys.stderr)
    worse = compare(record, earlier, options.tolerance)
    for line in worse:
        print(f"worse than {options.compare}: {line}", file=sys.stderr)
    return 1 if worse else 0


def summary(record: dict[str, Any]) -> str:
    """What a person wants of a record, in a line (and one for each batch size of decoding)."""
    peak = record["ceilings"]["matmul_tflops"]
    parts = [
        f"{record['kind']}: {1e3 * record['step_seconds']:.4g} ms",
        f"{record['share_of_matmul_peak']:.0%} of this machine's matmul peak ({peak:.3g} TFLOP/s)",
    ]
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    parts += [f"{name} {share:.0%}" for name, share in record.get("shares_of_parts", {}).items()]
    if "waited_share" in record:
        parts.append(f"the drafter waited {record['waited_share']:.1%} of its time")
    if record.get("beyond_kept_gib"):
        parts.append(f"{record['beyond_kept_gib']:.3g} GiB beyond what is kept between steps")
    parts.append(f"first step {record['first_step_seconds']:.3g} s")
    lines = [", ".join(parts)]
    for batch, found in record.get("by_batch", {}).items():
        lines.append(
            f"batch {batch}: {found['speculative_tokens_per_second']:,.0f} tokens/s with the drafter, "
            f"{found['plain_tokens_per_second']:,.0f} without: {found['speedup']:.2f} times, τ {found['tau']:.2f}"
        )
    return "\n".join(lines)


def record_of(case: Case) -> dict[str, Any]:
    """Measure the case's part."""
    part = PARTS[case.options.part]
    facts = importlib.import_module(part.module).measure(case)
    return {
        "kind": part.kind,
        "command": ["paceline", *sys.argv[1:]],
        "options": options_of(case.options),
        "machine": machine(),
        **facts,
    }


def compare(record: dict[str, Any], earlier: dict[str, Any], tolerance: float) -> list[str]:
    """What became worse by more than the tolerance, one line each."""
    before = dict(_figures(earlier))
    worse = []
    for path, now in _figures(record):
        if path not in before:
            continue
        change = now / before[path] - 1
        if (change if _LOWER_IS_BETTER[path[-1]] else 1 / (1 + change) - 1) > tolerance:
            worse.append(f"{'.'.join(path)}: {before[path]:.4g} -> {now:.4g} ({100 * change:+.1f} %)")
    return worse


def _figures(value: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _figures(item, (*above, key))
        elif key in _LOWER_IS_BETTER and item:
            yield (*above, key), float(item)


def _write(out: str, record: dict[str, Any]) -> None:
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the record {out}: {error}", "it is printed above; choose another --out"
        ) from None


def _read(path: str, case: Case) -> dict[str, Any]:
    """A record that this case may be compared with. Raises UserError."""
    try:
        earlier = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the record {path}: {error}", "give a file that `paceline bench` wrote") from None
    if not isinstance(earlier, dict) or not earlier.get("step_seconds"):
        raise UserError(f"{path} holds no step_seconds", "give a file that `paceline bench` wrote")
    kind = PARTS[case.options.part].kind
    if earlier.get("kind") != kind:
        raise UserError(f"{path} is a record of {earlier.get('kind')!r}, not of {kind!r}", "compare like with like")
    mine = json.loads(json.dumps(options_of(case.options)))
    theirs = earlier.get("options", {})
    for name in mine.keys() & theirs.keys() - _NOT_OF_THE_WORK:
        if mine[name] != theirs[name]:
            raise UserError(
                f"{path} was taken with {name} = {theirs[name]!r}, and this run has {mine[name]!r}",
                f"give --{name.replace('_', '-')} the same value",
            )
    return earlier
