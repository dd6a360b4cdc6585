"""What it does to the step when kept values wait in host memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from leanstep.effects.base import Effect, Shift
from leanstep.errors import PlanError
from leanstep.ir import Offload
from leanstep.ir.decision import INPUT
from leanstep.rebuild.block import BlockGraph


def with_offload(
    effect: Effect, views: Sequence[BlockGraph], place: int, entries: Sequence[Offload]
) -> Effect:
    """The effect of a decision, and of what it moves to the host."""
    shifts = (*effect.shifts, *offload_shifts(views, place, entries))
    return replace(effect, shifts=shifts, num_copies=len(entries))


def offload_shifts(
    views: Sequence[BlockGraph], place: int, entries: Iterable[Offload]
) -> Iterator[Shift]:
    """What it does to the step when kept storages of one call wait in host memory."""
    own = views[place]
    for entry in entries:
        gone = views[place + entry.release].block.stop
        number = _offloaded(own, entry)
        if entry.key == INPUT or not own.block.is_compiled:
            gone = max(gone, own.graph.storages[number].natural_death + 1)
        back = backward_entry(views, place + entry.fetch)
        if gone < back:
            yield Shift(gone, back, -entry.nbytes, own.graph.storages[number].category, number)


def _offloaded(view: BlockGraph, entry: Offload) -> int:
    """The storage that an entry is about."""
    if entry.key == INPUT:
        if view.input is None:
            raise PlanError(f"{view.block.name} has no input that can be told from the others")
        return view.input
    if view.block.is_compiled:
        # One storage stands for all that compiled code keeps.
        return view.saves[0].value.storage
    (number,) = view.storages_named([entry.key])
    return number


def backward_entry(views: Sequence[BlockGraph], place: int) -> int:
    """The position where backward comes to a call: when the calls after it are through."""
    first = views[place].first_request
    through = (view.last_release for view in views[place + 1 :])
    return max((position for position in through if position <= first), default=first)
