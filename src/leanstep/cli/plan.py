"""`leanstep plan`: what to keep and what to drop under a budget."""

import leanstep
from leanstep.cli.options import (
    Autocast,
    Batch,
    Budget,
    Chunks,
    Device,
    Engine,
    Exact,
    Force,
    Image,
    Json,
    Offload,
    Optimizer,
    OutputPath,
    Ranks,
    Seq,
    Solver,
    TargetOrRun,
)
from leanstep.cli.output import Output
from leanstep.cli.source import Source


def plan(
    target: TargetOrRun,
    budget: Budget = "60%",
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    autocast: Autocast = None,
    optimizer: Optimizer = None,
    device: Device = None,
    ranks: Ranks = None,
    solver: Solver = "auto",
    engine: Engine = "auto",
    offload: Offload = True,
    chunks: Chunks = True,
    exact: Exact = True,
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Decide what each block keeps, so that the step fits the budget in the least time.

    Leaves with 3 if no plan fits.
    """
    out = Output(as_json, output, force)
    source = Source(target, batch, seq, image, autocast, optimizer, device, ranks)
    known = source.profile(engine, exact=exact)
    found = leanstep.plan(
        known,
        budget,
        solver=solver,
        engine=engine,
        offload=offload,
        chunks=chunks,
        exact=exact,
    )
    out.deliver(found)
