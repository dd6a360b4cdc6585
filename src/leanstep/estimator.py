"""A profile for a device that is not there: fake tensors for memory, a roofline for time."""

import dataclasses

import torch

from leanstep.devices import find_device
from leanstep.imagine import Factory, ImaginedMeter, Ingredients, imagined_step, with_rises
from leanstep.ir import Link, Profile
from leanstep.ir.check import check_blocks, check_graph
from leanstep.marks import marks_of
from leanstep.owners import refuse_owners
from leanstep.profiler.recipes import estimated
from leanstep.profiler.roofline import estimate
from leanstep.recorder import record
from leanstep.recorder.blocks import find_blocks
from leanstep.recorder.company import Company
from leanstep.recorder.identity import identity_of
from leanstep.recorder.signatures import Signatures
from leanstep.simulator import simulate
from leanstep.stages import stage


def estimated_profile(
    source: Ingredients | Factory,
    device: str,
    *,
    gradients_kept: bool = False,
    ranks: int | None = None,
) -> Profile:
    """Record a step without memory, as the device would run it, and estimate its ops' times.

    With `ranks` it is the step of the first of so many processes, among which the model is sharded.
    """
    target = find_device(device)
    signatures, company = Signatures(), Company()
    with imagined_step(source, gradients_kept=gradients_kept, ranks=ranks) as step:
        refuse_owners(step.model)
        # Optimizer state is made at the first step; it must be there before the recorded one.
        step.first_run()
        with stage("recording the step"):
            recorded = record(step, signatures, ImaginedMeter(), company=company)
            graph = with_rises(recorded, signatures.specs)
        model = identity_of(step.model, step.batch)
        # A model that exists has its marks; its stand-in may be a copy, which has none.
        marks = marks_of(source.model if isinstance(source, Ingredients) else step.model)
        blocks = find_blocks(step.model, graph, [path for path, _ in marks])
    check_graph(graph)
    check_blocks(graph, blocks)
    worth = signatures.that_write(graph)
    timed = estimate(signatures.specs, worth, target)
    # Batch norm's is left out: on a GPU it is cuDNN's, whose bits only the device can show.
    costs = tuple(
        dataclasses.replace(cost, recipe=estimated(spec, cost.seconds))
        for cost, spec in zip(timed, signatures.specs, strict=True)
    )
    draft = Profile(
        graph=graph,
        blocks=blocks,
        costs=costs,
        step_seconds=sum(costs[op.cost].seconds for op in graph.ops),
        other_bytes=0,
        peak_bytes=0,
        device=target.name if ranks is None else f"{target.name}, one of {ranks:,} ranks",
        torch_version=torch.__version__,
        model=model,
        gradients_kept=gradients_kept,
        marks=marks,
        notes=(
            f"estimated for {target.name}: fake tensors and a roofline; "
            "fit on the device measures and re-plans",
        ),
        company=tuple(company.notes(blocks)),
        estimated=True,
        link=Link(target.link, target.link, target.memory_bytes),
    )
    return dataclasses.replace(draft, peak_bytes=simulate(draft).peak_bytes)
