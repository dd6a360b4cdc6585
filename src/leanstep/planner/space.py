"""The space of plans for a step: every option of every block call, and the problem they make.

Made once for a profile, and asked for many budgets. A step whose loss can be computed in chunks has
two: one for each way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from leanstep.chunks import find_loss, in_chunks
from leanstep.ir import Kind, LossInChunks, Profile
from leanstep.ir.exclusion import left_out
from leanstep.planner.option import CallOptions, Option
from leanstep.planner.options import check_engine, check_profiled
from leanstep.planner.overrides import Rule, parse_rules, unmet
from leanstep.planner.rooms import Rooms, with_rooms
from leanstep.planner.segments import Part, Parts
from leanstep.rebuild.block import BlockGraph
from leanstep.solvers.base import Choice, Problem, Solution, Solver


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Everything that can be decided about a profiled step.

    With a `loss` the step is the one that computes it in chunks, and `untouched` the recorded one.
    """

    profile: Profile
    untouched: Profile
    engine: str
    rules: tuple[Rule, ...]
    parts: Parts
    problem: Problem
    exact: bool = True
    loss: LossInChunks | None = None
    # Worked out once for all budgets: each takes as long as a plan.
    _rooms: dict[float, Rooms] = field(default_factory=dict, repr=False)
    _chunked: "list[Space | None]" = field(default_factory=list, repr=False)

    @property
    def chunked(self) -> "Space | None":
        """The same for the step with its loss in chunks, where that is possible."""
        if not self._chunked:
            loss = None if self.loss else find_loss(self.profile)
            self._chunked.append(None if loss is None else self._with(loss))
        return self._chunked[0]

    def _with(self, loss: LossInChunks) -> "Space":
        chunked = in_chunks(self.profile, loss)
        space = prepared(chunked, self.engine, self.rules, exact=self.exact)
        return replace(space, untouched=self.untouched, loss=loss)

    @property
    def both(self) -> "tuple[Space, ...]":
        """With the loss as a whole and, where that is possible, in chunks."""
        return (self,) if self.chunked is None else (self, self.chunked)

    def floor_bytes(self, solver: Solver) -> int:
        """The least peak that a solver finds without the host."""
        lowest = [(own.problem, solver.lowest(own.problem)) for own in self.both]
        return min((one.problem or problem).peak_bytes(one.picks) for problem, one in lowest)

    @property
    def loss_seconds(self) -> float:
        """What the loss takes longer than in the recorded step."""
        return 0.0 if self.loss is None else self.loss.extra_seconds

    def roomier(self, least_seconds: float) -> Rooms:
        """The problem as if what the link could move were gone to the host."""
        if least_seconds not in self._rooms:
            self._rooms[least_seconds] = with_rooms(
                self.profile, self.problem, self.parts.alone, self.parts.hook, least_seconds
            )
        return self._rooms[least_seconds]

    @property
    def views(self) -> tuple[BlockGraph, ...]:
        """The block calls of the step."""
        return tuple(part.view for part in self.parts.alone)

    @property
    def options(self) -> tuple[CallOptions, ...]:
        """The options of each block call."""
        return tuple(part.options for part in self.parts.alone)

    @property
    def unplanned_seconds(self) -> float:
        """What the unplanned step takes beyond the fastest form of every compiled call."""
        return sum(call.options[0].unplanned_seconds for call in self.options)

    def picked(self, solution: Solution) -> list[tuple[Part, Option]]:
        """The calls that a solution is about, each with the option picked for it."""
        problem = solution.problem or self.problem
        parts = [self.parts.run(*call.span) for call in problem.calls]
        pairs = zip(parts, solution.picks, strict=True)
        return [(part, _option(part, pick)) for part, pick in pairs]

    def picked_in(self, rooms: Rooms, solution: Solution) -> list[tuple[Part, Option]]:
        """The same for a solution of the problem with more room."""
        calls = (solution.problem or rooms.problem).calls
        found = []
        for call, pick in zip(calls, solution.picks, strict=True):
            part = self.parts.run(*call.span)
            hooked = rooms.hooked.get(id(pick))
            found.append((part, hooked or _option(part, rooms.original.get(id(pick), pick))))
        return found

    @property
    def notes(self) -> list[str]:
        """What the user should know about overrides and about blocks that are left out."""
        droppable = [call.droppable for call in self.options]
        return [
            *unmet(self.views, droppable, self.rules),
            *left_out(self.profile.exclusions),
            *_inexact(self.profile.kinds),
        ]


def _inexact(kinds: Sequence[Kind]) -> Iterator[str]:
    """What exactness costs a compiled step: forms that gave other bits."""
    if count := sum(kind.num_inexact for kind in kinds):
        yield (
            f"left out for other bits than the unplanned compiled step's: {count} compiled forms; "
            "exact=False allows them"
        )


def _option(part: Part, pick: Choice) -> Option:
    options = (*part.options.options, *part.options.border_options)
    choices = (*part.call.choices, *part.call.border_choices)
    for option, choice in zip(options, choices, strict=True):
        if choice is pick:
            return option
    option_for_set = part.options.drop(pick.dropped)
    assert option_for_set is not None, "a solver picks what a call gave it"
    return option_for_set


def prepare(
    profile: Profile,
    engine: str = "auto",
    overrides: Mapping[str, str] | None = None,
    *,
    exact: bool = True,
) -> Space:
    """Find every option of every block call; `plan_in` then answers budgets quickly."""
    check_engine(engine)
    check_profiled(profile, engine)
    return prepared(profile, engine, parse_rules(profile, overrides), exact=exact)


def prepared(profile: Profile, engine: str, rules: tuple[Rule, ...], *, exact: bool) -> Space:
    """The same by rules."""
    parts = Parts(profile, engine, rules, exact=exact)
    return Space(profile, profile, engine, rules, parts, parts.problem(), exact)
