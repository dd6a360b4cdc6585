"""Runs of block calls that can be executed as one, and their options.

Neighbours in one call of a Sequential run as one where nothing lies between them: the values that
pass from one to the other are then inside, and may be dropped too. Everything a run does to the
step happens at places where its members may do something, so it fits the stretches of the problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leanstep.ir import Block, Profile
from leanstep.ir.blocks import Sequentials
from leanstep.planner.listing import listed
from leanstep.planner.option import CallOptions, Option
from leanstep.planner.options import OptionFinder
from leanstep.planner.overrides import Rule
from leanstep.planner.problem import Layers
from leanstep.planner.replay_options import hooked
from leanstep.rebuild.block import BlockGraph, views_of
from leanstep.rebuild.recipes import usable_recipes
from leanstep.solvers.base import Call, Choice, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One call, or a run of calls made one: how the graph, the planner and a solver see it."""

    view: BlockGraph
    options: CallOptions
    call: Call


class Parts:
    """Every call of a step, and every run of calls that can be executed as one, when asked for."""

    def __init__(
        self, profile: Profile, engine: str, rules: Sequence[Rule], *, exact: bool = True
    ) -> None:
        self.profile, self._exact = profile, exact
        self._names = Sequentials(profile.graph)
        views = [
            view.with_recipes(usable_recipes(profile, view.block, exact=exact))
            for view in views_of(profile.graph, profile.blocks)
        ]
        self._finder = OptionFinder(profile, views, engine, rules, exact=exact)
        self._layers = Layers(profile, views)
        self._runs: dict[tuple[int, int], Part] = {}
        self.alone = tuple(self._part(view, (i, i + 1)) for i, view in enumerate(views))

    def problem(self) -> Problem:
        """What a solver is given."""
        problem = Problem(
            tops=self._layers.tops,
            calls=tuple(part.call for part in self.alone),
            joints=frozenset(
                place for place in range(1, len(self.alone)) if self._joined(place - 1, place + 1)
            ),
            join=lambda start, stop: self.run(start, stop).call,
        )
        return listed(problem)

    def run(self, start: int, stop: int) -> Part:
        """The calls from one number up to another as one."""
        if stop - start == 1:
            return self.alone[start]
        if (start, stop) not in self._runs:
            block = self._joined(start, stop)
            assert block is not None, "a solver joins only where it may"
            self._runs[start, stop] = self._part(self._view(block), (start, stop))
        return self._runs[start, stop]

    def hook(self, part: Part) -> tuple[Option, Choice]:
        """How a call keeps everything with hooks in place, so that some of it can be moved."""
        option = hooked(self.profile, part.view)
        return option, self._layers.choice(option)

    def _view(self, block: Block) -> BlockGraph:
        recipes = usable_recipes(self.profile, block, exact=self._exact)
        return BlockGraph(self.profile.graph, block, recipes)

    def _joined(self, start: int, stop: int) -> Block | None:
        blocks = self.profile.blocks[start:stop]
        if any(one.covers(block) for one in self.profile.exclusions for block in blocks):
            return None
        if any(block.is_compiled for block in blocks):
            return None
        return self._names.join(blocks)

    def _part(self, view: BlockGraph, span: tuple[int, int]) -> Part:
        options = self._finder.find(view, range(*span))
        return Part(view, options, self._layers.call(view, options, span))
