"""A run folder as one self-contained HTML page: what was trained, how it went, what it gives."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.offline

from paceline.errors import UserError
from paceline.training.metrics import read_metrics

Record = dict[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; background: #f6f7f9; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 32px 0 8px; }
p.lead { color: #55606e; margin: 0 0 20px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 20px; }
.card { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 12px 16px; min-width: 150px; }
.card b { display: block; font-size: 24px; } .card span { color: #55606e; font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
@media (max-width: 820px) { .plots { grid-template-columns: minmax(0, 1fr); } }
.plot, table, pre { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; }
.plot { padding: 8px; min-width: 0; overflow: hidden; } table { border-collapse: collapse; width: 100%; }
td, th { padding: 6px 12px; border-bottom: 1px solid #eceff2; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { padding: 12px; overflow: auto; font-size: 13px; white-space: pre-wrap; }
"""

_LAYOUT = {
    "template": "plotly_white",
    "height": 340,
    "margin": {"l": 60, "r": 20, "t": 44, "b": 50},
    "legend": {"x": 1, "xanchor": "right", "y": 1, "bgcolor": "rgba(255,255,255,0.7)"},
}


@dataclass(frozen=True)
class Run:
    """What the page is made from."""

    name: str
    steps: list[Record]
    evaluations: list[Record]
    config: str
    decoded: list[Record]
    """Prompts decoded with and without the drafter (`decoded.json`, written by the demo), or empty."""


def read_run(folder: Path) -> Run:
    """Raises UserError where the folder is no run."""
    records = read_metrics(folder)
    if not records:
        raise UserError(f"{folder} holds no metrics.jsonl with a record in it", "give the folder of a run")
    config, decoded = folder / "config.toml", folder / "decoded.json"
    return Run(
        name=folder.name,
        steps=[record for record in records if record["event"] == "step"],
        evaluations=[record for record in records if record["event"] == "evaluation"],
        config=config.read_text() if config.exists() else "",
        decoded=json.loads(decoded.read_text()) if decoded.exists() else [],
    )


def write_report(folder: Path) -> Path:
    """Write `report.html` into the run folder and give its path."""
    run = read_run(folder)
    path = folder / "report.html"
    path.write_text(_page(run), encoding="utf-8")
    return path


def _page(run: Run) -> str:
    plots = [plot for plot in (_loss(run), _tau(run), _slots(run), _kinds(run)) if plot is not None]
    parts = [
        f"<h1>{html.escape(run.name)}</h1>",
        "<p class='lead'>τ is tokens committed per verification step: accepted ones and the bonus token of the target. "
        "Plain decoding is τ = 1.</p>",
        f"<div class='cards'>{_cards(run)}</div>",
        f"<div class='plots'>{''.join(map(_figure, plots))}</div>",
        _kind_table(run),
        _decoded(run),
        f"<h2>Configuration</h2><pre>{html.escape(run.config)}</pre>" if run.config else "",
    ]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{html.escape(run.name)}"
    script = f"<script>{plotly.offline.get_plotlyjs()}</script>"
    body = f"<body><main>{''.join(parts)}</main></body>"
    return f"<!doctype html><html lang='en'><head>{head}</title><style>{_STYLE}</style>{script}</head>{body}</html>"


def _cards(run: Run) -> str:
    cards = []
    if run.evaluations:
        best = max(run.evaluations, key=lambda record: record["tau"])
        cards += [
            (f"{run.evaluations[0]['tau']:.2f}", f"held-out τ at step {run.evaluations[0]['step']}"),
            (f"{run.evaluations[-1]['tau']:.2f}", f"held-out τ at step {run.evaluations[-1]['step']}"),
            (f"{best['tau']:.2f}", f"best, at step {best['step']}"),
        ]
    if run.steps:
        seconds = sum(record["seconds"] for record in run.steps)
        cards += [
            (f"{run.steps[-1]['step']:,}", "steps"),
            (f"{seconds / 60:.1f} min", "in training steps"),
            (f"{sum(record['tokens'] for record in run.steps) / max(seconds, 1e-9):,.0f}", "tokens a second"),
        ]
    return "".join(f"<div class='card'><b>{value}</b><span>{label}</span></div>" for value, label in cards)


def _figure(figure: go.Figure) -> str:
    options = {"displayModeBar": False, "responsive": True}
    page = figure.to_html(full_html=False, include_plotlyjs=False, config=options, default_width="100%")
    return f"<div class='plot'>{page}</div>"


def _loss(run: Run) -> go.Figure | None:
    if not run.steps:
        return None
    steps = [record["step"] for record in run.steps]
    losses = [record["loss"] for record in run.steps]
    figure = go.Figure()
    figure.add_scatter(x=steps, y=losses, mode="lines", name="each step", line={"width": 1, "color": "#b9c4d0"})
    smooth = _smooth(losses, 0.95)
    figure.add_scatter(x=steps, y=smooth, mode="lines", name="smoothed", line={"width": 2, "color": "#1f5fbf"})
    return figure.update_layout(title="Loss (weighted mean, nats)", xaxis_title="optimiser step", **_LAYOUT)


def _smooth(values: list[float], keep: float) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smooth, average, weight = [], 0.0, 0.0
    for value in values:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        smooth.append(average / weight)
    return smooth


def _tau(run: Run) -> go.Figure | None:
    if not run.evaluations:
        return None
    steps = [record["step"] for record in run.evaluations]
    figure = go.Figure()
    for kind in sorted(run.evaluations[-1].get("by_kind", {})):
        taus = [record["by_kind"].get(kind) for record in run.evaluations]
        figure.add_scatter(x=steps, y=taus, mode="lines", name=kind, line={"width": 1}, opacity=0.6, showlegend=False)
    taus = [record["tau"] for record in run.evaluations]
    line = {"width": 3, "color": "#c2410c"}
    figure.add_scatter(x=steps, y=taus, mode="lines+markers", name="all held-out prompts", line=line)
    title = "Acceptance length τ on held-out prompts"
    low = {"legend": {**_LAYOUT["legend"], "y": 0, "yanchor": "bottom"}}
    return figure.update_layout(title=title, xaxis_title="optimiser step", **(_LAYOUT | low))


def _slots(run: Run) -> go.Figure | None:
    if not run.evaluations:
        return None
    figure = go.Figure()
    for record, colour in ((run.evaluations[0], "#b9c4d0"), (run.evaluations[-1], "#1f5fbf")):
        slots = list(range(1, len(record["by_slot"]) + 1))
        figure.add_bar(x=slots, y=record["by_slot"], name=f"step {record['step']}", marker_color=colour)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure.update_layout(title="Steps that accept at least this many tokens", xaxis_title="slot", **_LAYOUT)


def _kinds(run: Run) -> go.Figure | None:
    by_kind = run.evaluations[-1].get("by_kind", {}) if run.evaluations else {}
    if not by_kind:
        return None
    kinds = sorted(by_kind, key=by_kind.__getitem__)
    figure = go.Figure(go.Bar(x=[by_kind[kind] for kind in kinds], y=kinds, orientation="h", marker_color="#c2410c"))
    return figure.update_layout(title="τ by kind of prompt, last evaluation", xaxis_title="τ", **_LAYOUT)


def _kind_table(run: Run) -> str:
    if not run.evaluations or not run.evaluations[-1].get("by_kind"):
        return ""
    first, last = run.evaluations[0]["by_kind"], run.evaluations[-1]["by_kind"]
    rows = "".join(
        f"<tr><td>{html.escape(kind)}</td><td class='n'>{first.get(kind, float('nan')):.3f}</td>"
        f"<td class='n'>{last[kind]:.3f}</td></tr>"
        for kind in sorted(last)
    )
    head = f"<tr><th>kind of prompt</th><th class='n'>τ at step {run.evaluations[0]['step']}</th>"
    return f"<h2>By kind</h2><table>{head}<th class='n'>τ at step {run.evaluations[-1]['step']}</th></tr>{rows}</table>"


def _decoded(run: Run) -> str:
    if not run.decoded:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(item['drafter'])}</td><td>{html.escape(item['prompt'])}</td>"
        f"<td class='n'>{item['tokens']}</td><td class='n'>{item['steps']}</td><td class='n'>{item['tau']:.2f}</td>"
        f"<td>{'equal' if item['equal'] else 'DIFFERENT'}</td></tr>"
        f"<tr><td></td><td colspan='5'><pre>{html.escape(item['text'])}</pre></td></tr>"
        for item in run.decoded
    )
    head = (
        "<tr><th>drafter</th><th>prompt</th><th class='n'>tokens</th><th class='n'>target steps</th>"
        "<th class='n'>τ</th><th>against plain decoding</th></tr>"
    )
    return f"<h2>Decoded with the drafter</h2><table>{head}{rows}</table>"
