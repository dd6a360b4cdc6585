"""The same tables for a notebook: plain HTML that takes its colours from the page it stands in."""

import html
from collections.abc import Iterable, Sequence

_CELL = "padding:0.15em 0.7em;text-align:{side};white-space:nowrap"


def html_card(title: str, *parts: str) -> str:
    """A title with tables and lines below it."""
    return f"<div><strong>{html.escape(title)}</strong>{''.join(parts)}</div>"


def html_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows of text as a table; the first are headings, numbers go to the right."""
    lines = [_row("th" if number == 0 else "td", row, left) for number, row in enumerate(rows)]
    return f'<table style="margin:0.5em 0">{"".join(lines)}</table>'


def html_lines(lines: Iterable[str]) -> str:
    """Sentences, one below another."""
    return "".join(f"<div><small>{html.escape(line)}</small></div>" for line in lines)


def _row(tag: str, cells: Sequence[str], left: Sequence[int]) -> str:
    texts = []
    for place, cell in enumerate(cells):
        style = _CELL.format(side="left" if place in left else "right")
        texts.append(f'<{tag} style="{style}">{html.escape(cell)}</{tag}>')
    return f"<tr>{''.join(texts)}</tr>"
