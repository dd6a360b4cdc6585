"""Cheap replays: rebuild one output of an op from its inputs and its other outputs.

A dropped value is normally rebuilt by running the op that made it again. Some ops leave small
results behind that hold the costly part of their work: dropout its mask, batch norm the mean and
inverse deviation of each channel. While those are kept, the large output comes back in one
elementwise pass, without drawing random numbers again and without a reduction.

This table says what a recipe reads and writes; `recorder/recipes.py` says how torch is called. A
recipe is used where a dry run on the device has shown its bits to be those of the op, or where the
user allowed inexact ones.

Left out, because nothing in torch is cheaper than running the op again: layer norm and RMS norm
read each row once, keep it near, and have no kernel that starts from saved statistics; group norm
likewise. Dropout on the CPU is `bernoulli_`, `div_` and `mul`: an ordinary rerun of `mul` from the
kept noise is all it takes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from leanstep.ir import Block, Graph, Op, Profile, RecipeCost, Value
from leanstep.rebuild.program import Rerun


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which output is rebuilt, and from which other outputs; all inputs of the op are read too.

    The rest is for profiles made without a device, where nothing can be tried. `exact_by_design`:
    the same arithmetic in the same order on CUDA. `time_share`: the bytes it moves, of the op's.
    """

    output: int
    siblings: tuple[int, ...]
    exact_by_design: bool = False
    time_share: float = 1.0


RECIPES: dict[str, Recipe] = {
    # input * mask * scale: on CUDA the arithmetic of the forward kernel.
    "aten.native_dropout.default": Recipe(output=0, siblings=(1,), exact_by_design=True),
    # The elementwise half of the forward: on CUDA the very kernel it ends with. None on the CPU.
    "aten.native_batch_norm.default": Recipe(
        output=0, siblings=(1, 2), exact_by_design=True, time_share=2 / 3
    ),
    # The same formula as cuDNN's; whether its bits are the same, the device has to say.
    "aten.cudnn_batch_norm.default": Recipe(output=0, siblings=(1, 2), time_share=2 / 3),
}


def usable_recipes(profile: Profile, block: Block, *, exact: bool) -> dict[int, RecipeCost]:
    """The ops of a call whose recipe may be used, with what it costs.

    One that takes longer than the op is of no use; one with other bits only where that is allowed.
    """
    found = {}
    for index in range(block.start, block.stop):
        recipe = profile.costs[profile.graph.ops[index].cost].recipe
        if recipe is None or (exact and not recipe.exact):
            continue
        if recipe.seconds <= profile.seconds(index):
            found[index] = recipe
    return found


def cheap_rerun(graph: Graph, op: Op, full: Rerun) -> Rerun | None:
    """An op's recipe as something to run again: it stands for `full`, which runs the op itself."""
    recipe = RECIPES.get(op.name)
    born = [value for value in full.writes if graph.storages[value.storage].birth == full.index]
    if recipe is None or len(born) <= max(recipe.output, *recipe.siblings):
        return None
    drawn_from = (v.storage for v in full.reads if graph.is_generator(v.storage))
    return cheaper(full, recipe, born, without=drawn_from)


def cheaper(full: Rerun, recipe: Recipe, outputs: list[Value], *, without: Iterable[int]) -> Rerun:
    """A recipe with values for its numbers; `without` are storages that only the op reads."""
    unread = frozenset(without)
    siblings = tuple(outputs[place] for place in recipe.siblings)
    inputs = tuple(value for value in full.reads if value.storage not in unread)
    return Rerun(full.index, inputs + siblings, (outputs[recipe.output],), siblings)
