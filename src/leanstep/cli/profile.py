"""`leanstep profile`: record one training step."""

from leanstep.cli.options import (
    Autocast,
    Batch,
    Device,
    Engine,
    Exact,
    Force,
    Image,
    Json,
    Optimizer,
    OutputPath,
    Ranks,
    Seq,
    Target,
)
from leanstep.cli.output import Output
from leanstep.cli.source import Source


def profile(
    target: Target,
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    autocast: Autocast = None,
    optimizer: Optimizer = None,
    device: Device = None,
    ranks: Ranks = None,
    engine: Engine = "auto",
    exact: Exact = True,
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Record one training step: its ops, memory and times. plan, frontier and report read it."""
    out = Output(as_json, output, force)
    source = Source(target, batch, seq, image, autocast, optimizer, device, ranks)
    out.deliver(source.profile(engine, exact=exact))
