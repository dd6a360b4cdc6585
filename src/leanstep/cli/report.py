"""`leanstep report`: a file that a person looks at."""

from pathlib import Path
from typing import Annotated

import typer

import leanstep
from leanstep.cli.options import Force
from leanstep.cli.output import Output, say_written
from leanstep.cli.source import existing


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.JSON", help="A file that profile or sweep wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A file: .png or .svg.")],
    plan: Annotated[
        Path | None, typer.Option(help="A file that plan wrote for the profile: before and after.")
    ] = None,
    force: Force = False,
) -> None:
    """Draw memory over the step of a profile, or peak and time against batch of a sweep."""
    Output(False, output, force)
    decided = None if plan is None else leanstep.Plan.load(existing(plan))
    leanstep.report(leanstep.load(existing(run)), output, plan=decided)
    say_written(output)
