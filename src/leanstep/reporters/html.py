"""The report as one HTML file that opens offline: data, our script and plotly's, all inside.

The page is drawn by `page/*.js` from the JSON of `ReportData`; nothing here knows how it looks.
"""

import html
import json
from importlib.resources import files
from pathlib import Path

from leanstep.errors import InputError
from leanstep.ir.codec import to_plain
from leanstep.reporters.data import ReportData

# In the order of the page.
SCRIPTS = (
    *("format.js", "theme.js", "memory.js", "alive.js", "peak.js", "lifetimes.js"),
    *("ladder.js", "decisions.js", "study.js", "main.js"),
)


def write_html(data: ReportData, path: Path) -> None:
    """Write the page; needs plotly (`pip install leanstep[report]`)."""
    path.write_text(page(data), encoding="utf-8")


def page(data: ReportData) -> str:
    """The text of the page."""
    folder = files("leanstep.reporters") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    parts = {
        "TITLE": html.escape(f"{data.title} · leanstep"),
        "STYLE": read("page.css"),
        "PLOTLY": _plotly(),
        "DATA": _json(data),
        "SCRIPT": "\n".join(map(read, SCRIPTS)),
    }
    before, *marked = read("page.html").split("{{")
    text = [before]
    # Each marker is filled once: what is filled in is never searched for markers.
    for piece in marked:
        name, _, rest = piece.partition("}}")
        text += [parts[name], rest]
    return "".join(text)


def _json(data: ReportData) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(to_plain(data), separators=(",", ":")).replace("<", "\\u003c")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise InputError(
            "the page is drawn by plotly, which is not installed: pip install leanstep[report]"
        ) from error
    return str(get_plotlyjs())
