"""One HTML page for a notebook that was run: nothing outside of the file is needed to read it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from notebooks.runner.execution import Done
from notebooks.runner.outputs import Html, Output, Picture, Table, Text
from notebooks.runner.source import Notebook

_FORMATTER = HtmlFormatter(style="default", nowrap=True)
_LEXERS = {"python": "python", "sql": "sql", "run": "text", "pip": "text"}

_STYLE = """
body { font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif; color: #1d2733; background: #fff;
       max-width: 62rem; margin: 2rem auto 6rem; padding: 0 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; } h2 { font-size: 1.35rem; margin-top: 2.2rem; }
a { color: #0b62b0; }
nav { font-size: .9rem; color: #5c6a7a; }
section { margin: 1rem 0; }
pre, code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
p code, li code, td code { background: #f1f3f6; padding: .1em .3em; border-radius: 3px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.code { background: #f6f8fa; border-left: 3px solid #c9d3de; padding: .6rem .8rem;
        position: relative; }
.code .number { position: absolute; right: .6rem; top: .3rem; font-size: .75rem; color: #7d8a99; }
.code .magic { color: #7d8a99; }
.title { font-weight: 600; margin: .2rem 0; }
.output { padding: .5rem .8rem .2rem; }
.output pre { color: #26323f; }
.output svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .3rem 0; }
th, td { border: 1px solid #d8dfe7; padding: .25rem .55rem; text-align: left; vertical-align: top;
         overflow-wrap: anywhere; }
th { background: #eef2f6; overflow-wrap: normal; }
.number-cell { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.null { color: #98a3af; font-style: italic; }
.note { font-size: .8rem; color: #5c6a7a; }
"""


def render(notebook: Notebook, done: Sequence[Done]) -> str:
    """Return the page of a notebook."""
    markdown = MarkdownIt("commonmark", {"highlight": _highlight}).enable("table")
    body = [_cell(markdown, one) for one in done]
    return _page(notebook.title, ['<nav><a href="index.html">All notebooks</a></nav>', *body])


def render_index(notebooks: Sequence[Notebook]) -> str:
    """Return the page that lists all notebooks."""
    items = [
        f'<li><a href="{escape(one.name)}.html">{escape(one.title)}</a>'
        f" <code>notebooks/{escape(one.name)}.py</code></li>"
        for one in notebooks
    ]
    return _page("Notebooks", ["<h1>Notebooks</h1>", "<ul>", *items, "</ul>"])


def _page(title: str, body: Sequence[str]) -> str:
    style = _STYLE + _FORMATTER.get_style_defs(".code")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _cell(markdown: MarkdownIt, done: Done) -> str:
    cell = done.cell
    if cell.kind == "md":
        return f"<section>{markdown.render(cell.text)}</section>"
    magic = "" if cell.kind == "python" else f'<span class="magic">%{cell.kind}</span> '
    if cell.kind == "sql":
        magic = magic.rstrip() + "\n"
    title = f'<div class="title">{escape(cell.title)}</div>' if cell.title else ""
    code = _highlight(cell.text, _LEXERS[cell.kind], "").rstrip("\n")
    shown = "".join(f'<div class="output">{_output(one)}</div>' for one in done.outputs)
    return (
        f'<section id="cell-{cell.number}">{title}<div class="code">'
        f'<span class="number">{cell.number}</span><pre>{magic}{code}</pre></div>{shown}</section>'
    )


def _highlight(code: str, language: str, attributes: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return str(highlight(code, lexer, _FORMATTER))


def _output(output: Output) -> str:
    match output:
        case Text(text):
            return f"<pre>{escape(text)}</pre>"
        case Picture(svg):
            return svg
        case Html(html):
            return html
        case Table():
            return _table(output)


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = []
    for row in table.rows:
        cells = []
        for value, is_numeric in zip(row, table.is_numeric, strict=True):
            kind = "null" if value == "null" else "number-cell" if is_numeric else ""
            attribute = f' class="{kind}"' if kind else ""
            cells.append(f"<td{attribute}>{escape(value)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = f'<div class="note">{escape(table.note)}</div>' if table.note else ""
    body = "\n".join(rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{note}"
