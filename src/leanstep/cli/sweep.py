"""`leanstep sweep`: peak and time against the batch."""

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


def sweep(
    target: Target,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch", "-b", help="Batch sizes: 1,2,4,8. Without it powers of two, until none fits."
        ),
    ] = None,
    budget: StudyBudget = "auto",
    seq: Seq = None,
    image: Image = None,
    autocast: Autocast = None,
    optimizer: Optimizer = None,
    device: Device = None,
    solver: Solver = "auto",
    engine: Engine = "auto",
    offload: Offload = True,
    exact: Exact = True,
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Show peak and step time for several batch sizes, with and without leanstep.

    Leaves with 3 if none fits.
    """
    out = Output(as_json, output, force)
    batches = None if batch is None else _numbers(batch)
    source = Source(target, None, seq, image, autocast, optimizer, device)
    found = leanstep.sweep(
        source.target(),
        batches,
        budget=budget,
        device=source.imagined,
        solver=solver,
        engine=engine,
        offload=offload,
        exact=exact,
    )
    out.deliver(found)
    if found.largest_planned is None:
        raise typer.Exit(leanstep.BudgetError.exit_code)


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--batch {text!r} is not a list such as 1,2,4,8") from None
