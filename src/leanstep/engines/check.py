"""See whether a plan belongs to a model: by what the model looks like, or by recording it anew."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from leanstep.engines.randomness import other_random_states
from leanstep.errors import GraphError, PlanError
from leanstep.ir import Decision, Engine, Fact, Identity, Plan
from leanstep.ir.blocks import find_block
from leanstep.rebuild.block import BlockGraph
from leanstep.recorder import record
from leanstep.recorder.blocks import find_blocks
from leanstep.recorder.identity import identity_of
from leanstep.recorder.signatures import Signatures
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep

# An op with one of these lets data decide what runs after it.
_PATHS = frozenset((Fact.HOST_READ, Fact.DYNAMIC_SHAPE))


def check_model(model: torch.nn.Module, plan: Plan) -> None:
    """Raise PlanError unless the model, and torch, look like what the plan was made for.

    What its blocks compute is seen at their first call.
    """
    _check_looks(plan, identity_of(model))
    if other_torch := _other_torch(plan):
        raise PlanError(
            f"the plan may not hold: {other_torch}. Pass batch= (and loss=) to check it against "
            "this model, or plan anew."
        )


def check_step(step: TrainingStep, plan: Plan) -> None:
    """Raise PlanError unless this step has the blocks and values that the plan decides about.

    Runs forward and backward once, and leaves no trace. Where data or chance decide what runs, the
    model's parameters and the batch are all that can be compared.
    """
    found = identity_of(step.model, step.batch)
    _check_looks(plan, found)
    alone = replace(step, optimizer=None)
    with untouched(alone):
        before = other_random_states()
        graph = record(alone, Signatures())
        draws = other_random_states() != before
    if draws or any(_PATHS.intersection(op.facts) for op in graph.ops):
        # Which blocks run, and how large values are, is said by data or by chance: by other
        # weights than the plan saw, it need not be the same.
        return
    # What was a block because the user had marked it is one here too.
    blocks = find_blocks(step.model, graph, {d.path for d in plan.decisions if not d.children})
    reasons = filter(None, (_other_torch(plan), plan.model.mode_difference(found)))
    hint = "".join(f" ({reason})" for reason in reasons)
    decided = []
    for decision in plan.decisions:
        try:
            decided.append(find_block(graph, blocks, decision))
        except GraphError:
            what = f"it decides about {decision.name}, which this step does not run"
            raise _misfit(what, hint) from None
        if unfit := _misfit_in(BlockGraph(graph, decided[-1]), decision):
            raise _misfit(unfit, hint)
    for block in blocks:
        if not any(one.start <= block.start and block.stop <= one.stop for one in decided):
            raise _misfit(f"this step runs {block.name}, about which it says nothing", hint)


def _check_looks(plan: Plan, found: Identity) -> None:
    planned = plan.model
    if different := planned.model_differences(found):
        both = f"it was made for {planned}, this one is {found}: "
        raise PlanError(
            f"the plan is for another model: {both if str(planned) != str(found) else ''}"
            f"{_first(different)}. Plan this model anew."
        )
    if different := planned.batch_differences(found):
        raise PlanError(
            f"the plan is for another batch: {_first(different)}. Plan for this batch anew."
        )


def _first(different: list[str]) -> str:
    more = len(different) - 1
    return f"{different[0]} (and {more} more)" if more else different[0]


def _other_torch(plan: Plan) -> str | None:
    here = torch.__version__
    if not plan.torch_version or _release(plan.torch_version) == _release(here):
        return None
    return f"torch {_release(plan.torch_version)} in the plan, {_release(here)} here"


def _release(version: str) -> str:
    """A version without the build it is of."""
    return version.partition("+")[0]


def _misfit(what: str, hint: str) -> PlanError:
    return PlanError(f"the plan does not fit this step: {what}{hint}. Plan this model anew.")


def _misfit_in(view: BlockGraph, decision: Decision) -> str | None:
    """What a decision says of a block call that is not so."""
    match decision.engine:
        case Engine.UNTOUCHED | Engine.INDUCTOR:
            # What a form keeps is looked up when the block is compiled.
            return None
        case Engine.MODULE:
            return _other_size(decision.name, decision.dropped_bytes, _nbytes(view, view.saved))
        case Engine.REPLAY:
            try:
                dropped = view.storages_named(decision.drop)
            except PlanError as error:
                return str(error)
    found: Counter[str] = Counter()
    for number in dropped:
        found[view.storage_key(number).rpartition(":")[0]] += _nbytes(view, [number])
    sizes = (
        _other_size(f"{row.name} of {decision.name}", row.dropped_bytes, found[row.name])
        for row in decision.rows
    )
    return next(filter(None, sizes), None)


def _nbytes(view: BlockGraph, numbers: Iterable[int]) -> int:
    return sum(view.graph.storages[number].nbytes for number in numbers)


def _other_size(name: str, planned: int, found: int) -> str | None:
    if planned == found:
        return None
    return f"it drops {planned} bytes made by {name}, which makes {found} here"
