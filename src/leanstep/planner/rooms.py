"""The problem with more room: as if what the link could move had left the device at once.

Each call gives up what it keeps, up to what the link takes while its forward runs. A plan made so
mostly needs a little more than is left in truth, since copies are whole and leave when their call
has ended: how much less it has to be asked for is found by trying (`with_host.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from leanstep.ir import Engine, Profile
from leanstep.ir.decision import INPUT
from leanstep.planner.offload import SHARE_OF_RATE, Offloader, link_of
from leanstep.planner.option import Option
from leanstep.planner.segments import Part
from leanstep.solvers.base import Call, Choice, Problem

Hook = Callable[[Part], tuple[Option, Choice]]


@dataclass(frozen=True, slots=True, eq=False)
class Rooms:
    """A problem with more room; `original` choices are those it was made of, by their `id`.

    `hooked` are the options of choices that keep everything and move some of it. What no choice
    changes does not count in it: it is `fixed_bytes` high. `most_bytes` is the most room there is.
    """

    problem: Problem
    original: dict[int, Choice]
    hooked: dict[int, Option]
    fixed_bytes: int
    most_bytes: int
    # Of each selection, worked out once for all budgets.
    offloaders: dict[tuple[int, ...], Offloader] = field(default_factory=dict, repr=False)


def with_rooms(
    profile: Profile, problem: Problem, parts: Sequence[Part], hook: Hook, least_seconds: float
) -> Rooms:
    """Make room for what takes the link at least so many seconds; `hook` keeps all and may move."""
    maker = _Maker(profile, parts, [hook(part) for part in parts], least_seconds)
    calls = tuple(maker.call(place, call) for place, call in enumerate(problem.calls))
    is_touched = np.zeros(len(problem.tops), dtype=bool)
    for choice in (choice for call in calls for choice in call.choices):
        is_touched |= choice.deltas != 0
        is_touched[choice.replay_stretches] = True
    return Rooms(
        replace(problem, tops=np.where(is_touched, problem.tops, 0), calls=calls),
        maker.original,
        maker.hooked,
        int(problem.tops[~is_touched].max(initial=0)),
        sum(maker.most_bytes),
    )


class _Maker:
    """Give room to one call after the other."""

    def __init__(
        self,
        profile: Profile,
        parts: Sequence[Part],
        hooks: Sequence[tuple[Option, Choice]],
        least_seconds: float,
    ) -> None:
        self.parts, self.hooks = parts, hooks
        self.original: dict[int, Choice] = {}
        self.hooked: dict[int, Option] = {}
        self.most_bytes: list[int] = []

        def offloader(number: int) -> Offloader:
            options = [part.options.options[number] for part in parts]
            pairs = zip(options, hooks, strict=True)
            used = [hook if one.engine is Engine.UNTOUCHED else one for one, (hook, _) in pairs]
            picked = list(zip(parts, used, strict=True))
            return Offloader(profile, link_of(profile), picked, least_seconds)

        self.keeping = offloader(0)
        # An input is held for replays, be it that autograd does not save it.
        self.inputs = {one.call: one for one in offloader(-1).candidates if one.key == INPUT}

    def call(self, place: int, call: Call) -> Call:
        """The same call with room."""
        rooms = self._rooms(place, call)
        self.most_bytes.append(max(rooms))
        choices: list[Choice] = []
        for number, (choice, nbytes) in enumerate(zip(call.choices, rooms, strict=True)):
            is_untouched = self.parts[place].options.options[0].engine is Engine.UNTOUCHED
            if number == 0 and is_untouched:
                # Nothing moves without hooks, and these take time.
                option, hooked = self.hooks[place]
                moved = [_with_room(call, hooked, nbytes)] if nbytes else []
                self.hooked.update({id(one): option for one in moved})
                choices += [*moved, choice]
            else:
                choices.append(_with_room(call, choice, nbytes))
                self.original[id(choices[-1])] = choice
        return replace(call, choices=tuple(choices), border_choices=())

    def _rooms(self, place: int, call: Call) -> list[int]:
        """What the link takes while the call's forward runs, of what each choice keeps."""
        part, keeping = self.parts[place], self.keeping
        block, is_last = part.view.block, place == len(self.parts) - 1
        time = keeping.clock[block.stop] - keeping.clock[block.start]
        most = 0 if is_last else int(SHARE_OF_RATE * keeping.link.to_host * time)
        movable = [one for one in keeping.candidates if one.call == place and one.key != INPUT]
        given = self.inputs[place].nbytes if place in self.inputs else 0
        choices = enumerate(call.choices)
        kept = (keeping.kept_bytes(part, movable, number, choice) for number, choice in choices)
        return [min(most, own + given) for own in kept]


def _with_room(call: Call, choice: Choice, nbytes: int) -> Choice:
    deltas = choice.deltas.copy()
    deltas[call.stop : call.first] -= nbytes
    return replace(choice, deltas=deltas)
