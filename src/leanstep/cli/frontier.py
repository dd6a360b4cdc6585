"""`leanstep frontier`: peak against time."""

from typing import Annotated

import typer

import leanstep
from leanstep.cli.options import (
    Autocast,
    Batch,
    Device,
    Engine,
    Force,
    Image,
    Json,
    Optimizer,
    OutputPath,
    Ranks,
    Seq,
    TargetOrRun,
)
from leanstep.cli.output import Output
from leanstep.cli.source import Source


def frontier(
    target: TargetOrRun,
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    autocast: Autocast = None,
    optimizer: Optimizer = None,
    device: Device = None,
    ranks: Ranks = None,
    points: Annotated[int, typer.Option(help="How many budgets.")] = 10,
    solver: Annotated[
        list[str] | None, typer.Option(help="A solver; may be given several times.")
    ] = None,
    engine: Engine = "auto",
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Show the extra time under each budget, for every solver; without host memory."""
    out = Output(as_json, output, force)
    known = Source(target, batch, seq, image, autocast, optimizer, device, ranks).profile(engine)
    found = leanstep.frontier(
        known,
        solvers=solver or None,
        points=points,
        engine=engine,
    )
    out.deliver(found)
