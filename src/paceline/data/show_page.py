"""The HTML form of `paceline data show`: one file, no script, nothing fetched."""

from __future__ import annotations

from html import escape

from paceline.data.rows import REASONS, excerpt
from paceline.data.show import Facts, Piece, Shown, numbers

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ccc; padding: .7rem; line-height: 1.6; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
td.bar { width: 24rem; } td.bar div { background: #3a7d44; height: .9rem; }
.learnt { background: #d9f2dd; } .context { color: #666; } .special { font-weight: 600; outline: 1px dotted #999; }
.cut, .complaint { color: #a40000; } .complaint { border: 2px solid #a40000; padding: .7rem; white-space: pre-wrap; }
td { overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #16181a; color: #e4e4e4; } .context { color: #9a9a9a; }
  .learnt { background: #1d4a27; } }
"""


def page(facts: Facts) -> str:
    """The whole page as text."""
    complaint = f'<p class="complaint">A run would refuse this data: {escape(facts.complaint)}</p>'
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Data</title>',
        f"<style>{_STYLE}</style></head><body><h1>Data</h1>",
        complaint if facts.complaint else "",
        _numbers(facts),
        _list(facts.lines),
        _lengths(facts),
        _reasons(facts),
        '<h2>Documents</h2><p><span class="learnt">learnt</span>, <span class="context">context</span>, '
        '<span class="special">special token</span></p>',
        *(_document(item) for item in facts.documents),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _numbers(facts: Facts) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in numbers(facts))
    return f"<table>{''.join(rows)}</table>"


def _list(lines: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _lengths(facts: Facts) -> str:
    most = max((count for _, _, count in facts.lengths), default=1) or 1
    rows = (
        f"<tr><td>{low:,} to {high:,}</td><td>{count:,}</td>"
        f'<td class="bar"><div style="width:{100 * count / most:.1f}%"></div></td></tr>'
        for low, high, count in facts.lengths
    )
    return f"<h2>Length of documents</h2><table><tr><th>tokens<th>documents<th></tr>{''.join(rows)}</table>"


def _reasons(facts: Facts) -> str:
    if not facts.set_aside.reasons:
        return ""
    rows = (
        f"<tr><td>{reason.count:,}</td><td><b>{escape(name)}</b><br>{escape(REASONS[name])}</td>"
        f"<td>{'<br>'.join(escape(place) for place in reason.places[:20])}</td>"
        f"<td>{escape(excerpt(reason.example))}</td></tr>"
        for name, reason in sorted(facts.set_aside.reasons.items(), key=lambda item: -item[1].count)
    )
    head = "<tr><th>rows<th>reason<th>where (first 20)<th>example</tr>"
    return f"<h2>Set aside</h2><table>{head}{''.join(rows)}</table>"


def _document(item: Shown) -> str:
    cut = ' <span class="cut">… cut</span>' if item.cut else ""
    return f"<h3>{escape(item.title)}</h3><pre>{''.join(map(_piece, item.pieces))}{cut}</pre>"


def _piece(piece: Piece) -> str:
    names = ("learnt" if piece.supervised else "context") + (" special" if piece.special else "")
    return f'<span class="{names}">{escape(piece.text)}</span>'
