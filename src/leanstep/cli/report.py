"""`leanstep report`: a file that a person looks at."""

import json
from pathlib import Path
from typing import Annotated

import typer

import leanstep
from leanstep.cli.options import Force
from leanstep.cli.output import Output, say_written
from leanstep.cli.source import existing


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.JSON",
            help="Files that profile, plan, fit, frontier, sweep or max-batch wrote, of one model.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="A page (.html), a figure (.png, .svg) or a trace (.json)."
        ),
    ],
    figure: Annotated[
        str | None,
        typer.Option(help="Which figure: memory, peak, lifetimes, frontier or batches."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written, and of what, as JSON.")
    ] = False,
    force: Force = False,
) -> None:
    """Show what was found: one page that opens offline, a figure, or a trace for Perfetto.

    A profile and its plan together show the step before and after.
    """
    Output(as_json, output, force)
    results = [leanstep.load(existing(run)) for run in runs]
    leanstep.report(results, output, figure=figure)
    if as_json:
        shown = [type(result).__name__ for result in results]
        written = {"file": str(output), "num_bytes": output.stat().st_size, "shows": shown}
        typer.echo(json.dumps(written))
    say_written(output)
