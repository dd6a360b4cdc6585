"""`leanstep explain`: a plan in words."""

from pathlib import Path
from typing import Annotated

import typer

import leanstep
from leanstep.cli.options import Force, Json, OutputPath
from leanstep.cli.output import Output
from leanstep.cli.source import existing


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A file that plan wrote.")],
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Say op by op what a plan keeps, drops and pays, and why the peak is where it is."""
    out = Output(as_json, output, force)
    out.deliver(leanstep.Plan.load(existing(plan)).explain())
