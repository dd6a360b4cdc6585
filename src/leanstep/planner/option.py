"""One way to run a block call, in numbers that a solver can add up."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from leanstep.effects import Effect, form_effect, module_effect, replay_effect
from leanstep.ir import Engine, Form, Profile
from leanstep.planner.fingerprint import Positions
from leanstep.rebuild.block import BlockGraph
from leanstep.solvers.base import PICOSECONDS

# Python between two kernels of backward: hooks, the schedule, and looking up the sources. Without
# it a plan would drop a kilobyte to save a kilobyte.
REGION_SECONDS = 20e-6

# Times of options are rounded to this share of the step. No op's time is known that well, and
# plans of equal time are seen to be equal: else the search has far more of them to tell apart.
GRAIN = 2e-5


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to run a block call; `seconds` is what it adds to the step.

    The arrays are its effect in numbers: bytes that are added from one position to another, and
    the tops of replays above the level at their positions. A compiled call has a form, beside the
    unplanned one. That need not be the fastest: `seconds` count from the fastest form, for which
    the unplanned one takes `unplanned_seconds`.
    """

    engine: Engine
    dropped: frozenset[int]
    seconds: float
    num_replays: int = 0
    drops_border: bool = False
    reads_border_early: bool = False
    forms: tuple[Form, ...] = ()
    unplanned_seconds: float = 0.0
    shift_starts: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    shift_stops: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    shift_bytes: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    replay_positions: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    replay_bytes: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def extra_seconds(self) -> float:
        """What it adds to the unplanned step; less than nothing where it is faster."""
        return self.seconds - self.unplanned_seconds

    def effect(self, view: BlockGraph) -> Effect:
        """What the option does to the step, op by op."""
        match self.engine:
            case Engine.UNTOUCHED:
                return Effect()
            case Engine.REPLAY:
                return replay_effect(view, self.dropped, border_in=not self.dropped)
            case Engine.MODULE:
                return module_effect(view)
            case Engine.INDUCTOR:
                return form_effect(view, *self.forms)


UNTOUCHED = Option(Engine.UNTOUCHED, frozenset(), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class CallOptions:
    """The options of one call: the first keeps all it may, the last drops all it may.

    `droppable` may be dropped in any combination that contains `forced`; `drop` simulates one.
    `border_options` drop the call's output too, or nothing but take a dropped input.
    """

    options: tuple[Option, ...]
    droppable: frozenset[int]
    forced: frozenset[int]
    drop: Callable[[frozenset[int]], Option | None]
    border_options: tuple[Option, ...] = ()


def alone(option: Option) -> CallOptions:
    """The options of a call that has just one."""
    return CallOptions((option,), frozenset(), frozenset(), lambda dropped: option)


def option_of(profile: Profile, engine: Engine, dropped: Iterable[int], effect: Effect) -> Option:
    """The option that has an effect."""
    num_regions = max(1, len({replay.position for replay in effect.replays}))
    seconds = effect.seconds(profile) + num_regions * REGION_SECONDS
    return Option(
        engine=engine,
        dropped=frozenset(dropped),
        seconds=in_grains(seconds, profile.step_seconds),
        num_replays=len(effect.replays),
        shift_starts=_numbers(shift.start for shift in effect.shifts),
        shift_stops=_numbers(shift.stop for shift in effect.shifts),
        shift_bytes=_numbers(shift.nbytes for shift in effect.shifts),
        replay_positions=_numbers(replay.position for replay in effect.replays),
        replay_bytes=_numbers(replay.peak_bytes for replay in effect.replays),
    )


def in_grains(seconds: float, step_seconds: float, least: int = 1) -> float:
    """The time in whole grains, one at least; a grain is a whole number of picoseconds."""
    grain = max(1, round(GRAIN * step_seconds * PICOSECONDS))
    return max(least, round(seconds * PICOSECONDS / grain)) * grain / PICOSECONDS


def _numbers(numbers: Iterable[int]) -> Positions:
    return np.array(list(numbers), dtype=np.int64)
