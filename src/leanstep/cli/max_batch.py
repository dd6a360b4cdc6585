"""`leanstep max-batch`: the largest batch, with and without."""

from typing import Annotated

import typer

import leanstep
from leanstep.cli.options import (
    Autocast,
    Device,
    Engine,
    Exact,
    Force,
    Image,
    Json,
    Offload,
    Optimizer,
    OutputPath,
    Seq,
    Solver,
    StudyBudget,
    Target,
)
from leanstep.cli.output import Output
from leanstep.cli.source import Source


def max_batch(
    target: Target,
    budget: StudyBudget = "auto",
    seq: Seq = None,
    image: Image = None,
    autocast: Autocast = None,
    optimizer: Optimizer = None,
    device: Device = None,
    max_slowdown: Annotated[
        str | None, typer.Option(help="The most that a sample may take longer: 20%.")
    ] = None,
    solver: Solver = "auto",
    engine: Engine = "auto",
    offload: Offload = True,
    exact: Exact = True,
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Find the largest batch with and without leanstep, and the samples per second of both.

    Leaves with 3 if not even one row fits.
    """
    out = Output(as_json, output, force)
    source = Source(target, None, seq, image, autocast, optimizer, device)
    found = leanstep.max_batch(
        source.target(),
        budget=budget,
        device=source.imagined,
        max_slowdown=max_slowdown,
        solver=solver,
        engine=engine,
        offload=offload,
        exact=exact,
    )
    out.deliver(found)
    if not found.planned_batch:
        raise typer.Exit(leanstep.BudgetError.exit_code)
