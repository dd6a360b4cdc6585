"""What it does to the step when a compiled call runs in another form."""

from collections.abc import Collection, Iterator

from leanstep.effects.base import Effect, Shift
from leanstep.ir import Category, Form
from leanstep.rebuild.block import BlockGraph


def form_effect(view: BlockGraph, unplanned: Form, form: Form) -> Effect:
    """What it does to the step when a compiled call runs in another form than the unplanned one.

    The graph has the call's forward and backward as one op each, with the rises of the unplanned
    form, and one storage for all that this form keeps.
    """
    if form == unplanned:
        return Effect()
    (save,), (unpack,), forward = view.saves, view.unpacks, view.block.start
    backward, number = unpack.position, save.value.storage
    kept = form.kept_bytes - unplanned.kept_bytes
    shifts = (
        _rise_shift(forward, form.forward_rise_bytes - unplanned.forward_rise_bytes),
        Shift(forward + 1, backward + 1, kept, Category.ACTIVATION, number),
        _rise_shift(backward, form.backward_rise_bytes - unplanned.backward_rise_bytes),
    )
    held = set[int]()
    if form.holds_arguments and not unplanned.holds_arguments:
        held.update(value.storage for value in view.graph.ops[forward].reads)
    if form.holds_outputs and not unplanned.holds_outputs:
        held.update(value.storage for value in view.graph.ops[forward].writes)
    return Effect(
        (*shifts, *_held_longer(view, held, backward)),
        added_seconds=form.seconds - unplanned.seconds,
    )


def _held_longer(view: BlockGraph, numbers: Collection[int], backward: int) -> Iterator[Shift]:
    """What would be gone before a call's backward, and is held until then."""
    for number in sorted(numbers):
        storage = view.graph.storages[number]
        if storage.death < backward:
            yield Shift(storage.death + 1, backward + 1, storage.nbytes, storage.category, number)


def _rise_shift(op: int, nbytes: int) -> Shift:
    return Shift(op, op + 1, nbytes, Category.TEMPORARY)
