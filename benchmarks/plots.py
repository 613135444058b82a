"""Plots of the records, and of nothing else, as SVG.

    PYTHONPATH=src python benchmarks/plots.py        (needs the dependency group `bench`)

Limits are operations counted for the drawn shape (`bench.count_operations`) over the largest matmul peak among the
records of a plot. A plot whose records are missing is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.batches import BatchShape
from paceline.bench import GEOMETRIES, count_operations, synthetic_batch

HERE = Path(__file__).parent
GEOMETRY = "qwen3-8b"
BLOCK = 16
_TEXT, _QUIET = "#24292f", "#8c959f"
_COLOURS = {"bf16": "#0969da", "float8": "#cf222e"}
_MORE_COLOURS = ("#8c959f", "#bf8700", "#1a7f37", "#0969da", "#cf222e", "#8250df")


@dataclass(frozen=True)
class Point:
    """One measured step of the drafter."""

    tokens: int
    anchors: int
    documents: int
    arithmetic: str
    milliseconds: float
    peak: float
    """Operations a second of a large bf16 product in the same process."""


# --- reading -------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Records by the stem of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def steps_of(records: dict[str, dict[str, Any]]) -> list[Point]:
    """Drafter steps of the one geometry on one kind of device: those of `paceline bench`, and the latest variants."""
    variants = [name for name, record in records.items() if "results" in record and "drafter" in name]
    points = [_bench_step(record) for record in records.values() if _is_step(record)]
    for name in variants[-1:]:
        points += _variants(records[name])
    return sorted(set(points), key=lambda point: (point.tokens, point.anchors, point.milliseconds))


def _is_step(record: dict[str, Any]) -> bool:
    options = record.get("options", {})
    return record.get("kind") == "drafter step" and options.get("geometry") == GEOMETRY


def _bench_step(record: dict[str, Any]) -> Point:
    options = record["options"]
    return Point(
        options["tokens"],
        options["anchors"],
        options["documents"],
        "float8" if options["matmul"] == "float8" else "bf16",
        1e3 * record["step_seconds"],
        1e12 * record["ceilings"]["matmul_tflops"],
    )


def _variants(record: dict[str, Any]) -> list[Point]:
    """Of `h200.py`: `step:float8`, `step:tokens=32768,anchors=2048,documents=1`; other changes are not plotted."""
    found = [facts for wave in record["results"].values() for facts in wave.items()]
    peak = next(facts["matmul TFLOP/s"] for name, facts in found if name.startswith("misc"))
    points = []
    for name, facts in found:
        kind, _, words = name.partition(":")
        given = dict(word.partition("=")[::2] for word in words.split(",") if word not in ("base", "profile"))
        if kind != "step" or given.keys() - {"float8", "tokens", "anchors", "documents", "steps"}:
            continue
        numbers = [int(given.get(key, value)) for key, value in _USUAL.items()]
        points.append(Point(*numbers, "float8" if "float8" in given else "bf16", facts["step ms"], 1e12 * peak))
    return points


_USUAL = {"tokens": 8192, "anchors": 1024, "documents": 2}
"""What `h200.py` times where a variant says nothing else."""


@cache
def operations(tokens: int, anchors: int, documents: int) -> float:
    """Counted for one step."""
    shape = GEOMETRIES[GEOMETRY]
    batch = synthetic_batch(BatchShape(tokens, anchors, BLOCK, 7.0), documents, shape.vocabulary, 0)
    return count_operations(shape, batch).total


def limit(tokens: int, anchors: int, documents: int, peak: float) -> float:
    """Milliseconds that the counted operations take at the peak."""
    return 1e3 * operations(tokens, anchors, documents) / peak


# --- drawing -------------------------------------------------------------------------------------------------------


def against_anchors(points: Sequence[Point]) -> Figure | None:
    """Step time of 8,192 tokens over the number of anchors."""
    chosen = [point for point in points if (point.tokens, point.documents) == (8192, 2)]
    if not chosen:
        return None
    peak = max(point.peak for point in chosen)
    figure, axes = _axes("Drafter step against anchors", "Qwen3-8B's drafter, one H200, 2 × 4,096 tokens, block 16")
    grid = range(256, 2305, 128)
    axes.plot(grid, [limit(8192, anchors, 2, peak) for anchors in grid], color=_QUIET, linewidth=1.5)
    _say(axes, 0.98, 0.06, f"line: counted operations at the bf16 matmul peak, {peak / 1e12:.0f} TFLOP/s")
    for point in _fastest(chosen, lambda point: point.anchors):
        _label(axes, point, point.anchors, _words(point))
    _points(axes, chosen, lambda point: point.anchors)
    axes.set_xlabel("anchors in a batch")
    axes.set_xticks([512, 1024, 1536, 2048], ["512", "1,024", "1,536", "2,048"])
    return _finished(figure, axes, "milliseconds a step")


def against_context(points: Sequence[Point]) -> Figure | None:
    """Step time of 2,048 anchors over the length of the row."""
    chosen = [point for point in points if point.anchors == 2048]
    if len({point.tokens for point in chosen}) < 2:
        return None
    peak = max(point.peak for point in chosen)
    figure, axes = _axes("Drafter step against context", "Qwen3-8B's drafter, one H200, 2,048 anchors, block 16")
    grid = range(4096, 32_769, 4096)
    for words, documents, style in (("one document", lambda _: 1, "-"), ("of 4,096 each", lambda n: n // 4096, "--")):
        counts = [limit(tokens, 2048, documents(tokens), peak) for tokens in grid]
        axes.plot(grid, counts, color=_QUIET, linewidth=1.5, linestyle=style)
        axes.annotate(words, (grid[-1], counts[-1]), xytext=(6, -4), textcoords="offset points", color=_QUIET)
    _say(axes, 0.98, 0.06, f"lines: counted operations at the bf16 matmul peak, {peak / 1e12:.0f} TFLOP/s")
    for point in _fastest(chosen, lambda point: point.tokens):
        documents = "one document" if point.documents == 1 else f"{point.documents} documents"
        _label(axes, point, point.tokens, f"{_words(point)}\n{documents}")
    _points(axes, chosen, lambda point: point.tokens)
    axes.set_xlabel("context tokens in a batch")
    axes.set_xticks([4096, 8192, 16_384, 32_768], ["4,096", "8,192", "16,384", "32,768"])
    axes.set_xlim(2048, 39_500)
    return _finished(figure, axes, "milliseconds a step")


def _fastest(points: Sequence[Point], x: Callable[[Point], int]) -> list[Point]:
    """The fastest point of each place and arithmetic."""
    best: dict[tuple[int, str], Point] = {}
    for point in points:
        key = (x(point), point.arithmetic)
        best[key] = min(best.get(key, point), point, key=lambda one: one.milliseconds)
    return list(best.values())


def _words(point: Point) -> str:
    share = limit(point.tokens, point.anchors, point.documents, point.peak) / point.milliseconds
    return f"{point.milliseconds:.0f} ms, {share:.0%} of the peak"


def _label(axes: Axes, point: Point, x: float, words: str) -> None:
    """To the left of a point, or to the right where a label would leave the plot."""
    left = x > 8192 or point.anchors == x
    axes.annotate(
        words,
        (x, point.milliseconds),
        xytext=(-9, 6) if left else (9, 6),
        textcoords="offset points",
        color=_COLOURS[point.arithmetic],
        ha="right" if left else "left",
        va="center",
    )


def _say(axes: Axes, x: float, y: float, words: str) -> None:
    axes.text(x, y, words, transform=axes.transAxes, ha="right", color=_QUIET)


def _points(axes: Axes, points: Sequence[Point], x: Callable[[Point], int]) -> None:
    for arithmetic, colour in _COLOURS.items():
        some = [point for point in points if point.arithmetic == arithmetic]
        if some:
            places, times = [x(point) for point in some], [point.milliseconds for point in some]
            label = f"measured, {arithmetic}"
            axes.scatter(places, times, s=42, color=colour, label=label, zorder=3, alpha=0.85, linewidths=0)


def tau(records: dict[str, dict[str, Any]]) -> Figure | None:
    """Held-out acceptance length over the steps of each demo run on a GPU."""
    runs = list(_demo_runs(records))
    if not runs:
        return None
    figure, axes = _axes(
        "Held-out acceptance length of the demo", "SmolLM2-135M, exact greedy decoding, bonus included"
    )
    for place, (label, found) in enumerate(runs):
        colour = _MORE_COLOURS[place % len(_MORE_COLOURS)]
        steps = [one["step"] for one in found]
        best = max(found, key=lambda one: one["tau"])
        told = f"{best['tau']:.2f} at step {best['step']:,}: {label}"
        axes.plot(steps, [one["tau"] for one in found], color=colour, marker="o", markersize=3, label=told)
    axes.set_xlabel("optimiser steps")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure = _finished(figure, axes, "τ, tokens committed a decoding step")
    axes.set_ylim(bottom=1)
    return figure


def _demo_runs(records: dict[str, dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(label, evaluations) of every run of the demo on a GPU."""
    for name, record in records.items():
        if record.get("kind") == "train-demo":
            yield f"{_settings(record['config'])} ({name})", record["evaluations"]
        for run in record.get("runs", {}).values() if record.get("kind") == "train-demo, cut short" else ():
            yield f"{run['layers']} layers, γ = {run['gamma']} ({name})", run["evaluations"]


def _settings(config: dict[str, Any]) -> str:
    gamma, matmul = config["training"]["gamma"], config["training"]["matmul"]
    parts = [f"{config['drafter']['layers']} layers"]
    parts += [f"γ = {gamma}"] if gamma else []
    parts += [matmul] if matmul != "same" else []
    return ", ".join(parts)


def topologies(name: str, record: dict[str, Any]) -> Figure | None:
    """Rate of each topology of a record of `topologies.py`, and who waited."""
    runs = [run for run in record["runs"] if "tokens_per_second" in run]
    if len(runs) < 2:
        return None
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    rates, waits = figure.subplots(1, 2)
    names = [_name_of(run) for run in runs]
    places = range(len(runs))
    rates.bar(places, [run["tokens_per_second"] for run in runs], width=0.6, color=_COLOURS["bf16"])
    rates.set_ylabel("tokens/s")
    rates.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    drafters = [100 * run["waited_share"] for run in runs]
    targets = [_target_waits(run) for run in runs]
    waits.bar([place - 0.2 for place in places], drafters, width=0.36, color=_COLOURS["bf16"], label="drafters")
    waits.bar(
        [place + 0.2 for place in places if targets[place] is not None],
        [100 * share for share in targets if share is not None],
        width=0.36,
        color=_COLOURS["float8"],
        label="targets",
    )
    waits.set_ylabel("% of the time waited")
    waits.set_ylim(0, 100)
    waits.legend(frameon=False, loc="upper left", ncols=2)
    for axes in (rates, waits):
        axes.set_xticks(list(places), names)
        axes.set_xlabel("targets + drafters")
        _plain(axes)
    figure.suptitle(f"Topologies: {name} ({record['machine']['device']})", fontsize=11, color=_TEXT)
    return figure


def _name_of(run: dict[str, Any]) -> str:
    """Its topology; of an automatic one what was chosen, too."""
    chosen = next((row.split() for row in run.get("table", []) if row.endswith("<- chosen")), None)
    if chosen is None:
        return run["topology"]
    return "auto:\n" + (chosen[0] if chosen[0] == "colocated" else f"{chosen[1]}+{chosen[4]}")


def _target_waits(run: dict[str, Any]) -> float | None:
    """Mean share of their time in which targets of a split did not work; None where they share a device."""
    shares = [target["busy_share"] for target in run["targets"].values()]
    return 1 - statistics.fmean(shares) if shares else None


def _axes(title: str, beneath: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, color=_TEXT)
    axes.text(0, 1.02, beneath, transform=axes.transAxes, fontsize=9.5, color=_QUIET)
    return figure, axes


def _finished(figure: Figure, axes: Axes, y: str) -> Figure:
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.08)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left" if y.startswith("milli") else "lower right")
    _plain(axes)
    return figure


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--out", type=Path, default=HERE / "plots")
    parser.add_argument("--form", default="svg", help="svg, or png to look at")
    options = parser.parse_args()
    # The same records give the same bytes.
    mpl.rcParams.update({"svg.hashsalt": "paceline", "font.size": 10, "axes.edgecolor": _QUIET, "text.color": _TEXT})
    records = read(options.records)
    points = steps_of(records)
    plots = {
        "step-anchors": against_anchors(points),
        "step-context": against_context(points),
        "demo-tau": tau(records),
        **{name: topologies(name, record) for name, record in records.items() if record.get("kind") == "topologies"},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, figure in plots.items():
        if figure is None:
            print(f"{name}: too few records", file=sys.stderr)
            continue
        path = options.out / f"{name}.{options.form}"
        figure.savefig(path, dpi=110, facecolor="white", metadata={"Date": None} if options.form == "svg" else None)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
