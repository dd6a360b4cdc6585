"""Move kept activations to host memory while the device computes, and back in time.

A copy over the link takes the device no time, so bytes that wait in host memory are bytes of
budget: the step is planned for a larger one, and what that keeps too much is offloaded. Which bytes
go does not matter for the peak; when they are gone and back does. Copies leave call by call, as
each has ended, and come back as late as they can.

Bytes are let go only where forward has come to the end of a block call, after waiting for their
copy, and asked back where backward comes to one. So the levels are sure whatever the link does; a
link that is slower than measured costs time, not memory.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leanstep.effects import backward_entry, offload_shifts
from leanstep.ir import Category, Engine, Link, Offload, Profile
from leanstep.ir.decision import INPUT
from leanstep.ir.form import save_key
from leanstep.planner.option import Option
from leanstep.planner.options import foreign_readers
from leanstep.planner.segments import Part
from leanstep.rebuild.block import BlockGraph
from leanstep.simulator import shifted, timeline
from leanstep.solvers.base import Bytes, Call, Choice, Problem, Solution

# A copy costs the CPU about this long, whatever its size: where there is a choice, it shall keep
# the link busy as long.
LEAST_SECONDS = 1e-4

# What of the measured rate is counted on: other traffic, and steps that run faster than measured.
SHARE_OF_RATE = 0.92

# What of the host's free memory may be pinned.
SHARE_OF_HOST = 0.5

Picked = Sequence[tuple[Part, Option]]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A kept storage, and the positions between which nothing on the device needs it."""

    call: int
    key: str
    nbytes: int
    idle: int
    needed: int
    storage: int = -1


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A candidate on its way out: the call at whose end it is gone, and from which position on."""

    candidate: _Candidate
    release_call: int
    gone: int


def capacity_bytes(profile: Profile) -> int:
    """The most that can have left the device when forward ends."""
    if profile.link is None:
        return 0
    graph = profile.graph
    forward = sum(
        profile.seconds(index) for index, op in enumerate(graph.ops) if op.phase == "forward"
    )
    by_time = profile.link.to_host * forward * _scale(profile)
    return int(min(by_time, SHARE_OF_HOST * profile.link.host_bytes))


def roomier(
    profile: Profile, problem: Problem, parts: Sequence[Part], share: float, least_seconds: float
) -> tuple[Problem, Callable[[Solution], Solution]]:
    """The problem as if each call had moved so much of the link's share to the host at once.

    A call's share is what the link takes while its forward runs. The other thing returned turns a
    solution of it into one of the problem itself; whether that really fits is another question.
    """
    link, most = _link(profile), [(part, part.options.options[0]) for part in parts]
    own = _Offloader(profile, link, most, least_seconds)
    # An input is held for replays, be it that autograd does not save it.
    fewest = [(part, part.options.options[-1]) for part in parts]
    least = _Offloader(profile, link, fewest, least_seconds)
    inputs = {one.call: one for one in least.candidates if one.key == INPUT}
    origins: dict[int, Choice] = {}

    def roomier_call(place: int) -> Call:
        part, call = parts[place], problem.calls[place]
        time = own.clock[part.view.block.stop] - own.clock[part.view.block.start]
        is_last = place == len(parts) - 1
        room = 0 if is_last else int(share * SHARE_OF_RATE * own.link.to_host * time)
        movable = [one for one in own.candidates if one.call == place and one.key != INPUT]
        given = inputs[place].nbytes if place in inputs else 0
        choices = tuple(
            _with_room(
                call, choice, min(room, own.kept_bytes(part, movable, number, choice) + given)
            )
            for number, choice in enumerate(call.choices)
        )
        origins.update({id(new): old for new, old in zip(choices, call.choices, strict=True)})
        return replace(call, choices=choices, border_choices=())

    calls = tuple(roomier_call(place) for place in range(len(parts)))
    by_span = {call.span: call for call in problem.calls}

    def back(solution: Solution) -> Solution:
        picks = tuple(origins.get(id(pick), pick) for pick in solution.picks)
        joined = solution.problem and problem.with_calls(
            by_span.get(call.span, call) for call in solution.problem.calls
        )
        return replace(solution, picks=picks, problem=joined)

    return replace(problem, calls=calls), back


def _with_room(call: Call, choice: Choice, nbytes: int) -> Choice:
    deltas = choice.deltas.copy()
    deltas[call.stop : call.first] -= nbytes
    return replace(choice, deltas=deltas)


def _link(profile: Profile) -> Link:
    assert profile.link is not None, "asked only where there is a link"
    return profile.link


def find_offload(
    profile: Profile, picked: Picked, budget_bytes: int, least_seconds: float
) -> list[tuple[Offload, ...]] | None:
    """What each call moves to the host so that the step fits; None where that is not enough.

    Nothing goes that takes the link less than so many seconds.
    """
    return _Offloader(profile, _link(profile), picked, least_seconds).fitting(budget_bytes)


class _Offloader:
    """Find what to move for one selection of options."""

    def __init__(self, profile: Profile, link: Link, picked: Picked, least_seconds: float) -> None:
        self.profile, self.link, self.picked = profile, link, picked
        self.least_bytes = least_seconds * link.to_host
        self.views = [part.view for part, _ in picked]
        line = timeline(profile, [option.effect(part.view) for part, option in picked])
        num_positions = len(profile.graph.ops) + 1
        self.tops: Bytes = np.zeros(num_positions, dtype=np.int64)
        seconds = np.zeros(num_positions)
        for point in line.points:
            self.tops[point.position] = max(self.tops[point.position], point.peak_bytes)
            seconds[point.position] += point.seconds
        # When each position is reached.
        self.clock: Seconds = _scale(profile) * (np.cumsum(seconds) - seconds)
        self.ends = [view.block.stop for view in self.views]
        self.entries = [backward_entry(self.views, place) for place in range(len(self.views))]

    def kept_bytes(
        self, part: Part, movable: Sequence[_Candidate], number: int, choice: Choice
    ) -> int:
        """What a choice keeps and the link could take; each form of compiled code keeps its own."""
        if part.view.block.is_compiled:
            own = _kept_by_form(part.view, part.options.options[number], 0)
            return sum(one.nbytes for one in own if self._is_worth_it(one))
        return sum(one.nbytes for one in movable if one.storage not in choice.dropped)

    def _is_worth_it(self, candidate: _Candidate) -> bool:
        return candidate.nbytes >= self.least_bytes

    def fitting(self, budget_bytes: int) -> list[tuple[Offload, ...]] | None:
        """The offloads that bring every level under the budget."""
        late: set[_Candidate] = set()
        while True:
            leaving = self._leaving(budget_bytes, late)
            if leaving is None:
                return None
            fetches = self._fetches(leaving)
            pairs = zip(leaving, fetches, strict=True)
            too_late = {one.candidate for one, fetch in pairs if not fetch}
            if not too_late:
                break
            late |= too_late
        found = self._by_call(leaving, fetches)
        shifts = (
            shift
            for place, own in enumerate(found)
            for shift in offload_shifts(self.views, place, own)
        )
        levels = shifted(self.tops, shifts)
        return found if int(levels.max()) <= budget_bytes else None

    def _leaving(self, budget_bytes: int, late: set[_Candidate]) -> list[_Leaving] | None:
        """The copies to the host that suffice, in their order; `late` ones would be back late."""
        missing = self.tops - budget_bytes
        rate = SHARE_OF_RATE * self.link.to_host
        room = int(SHARE_OF_HOST * self.link.host_bytes)
        free_at, chosen = 0.0, []
        for candidate in self.candidates:
            most = int(np.argmax(missing))
            if missing[most] <= 0:
                break
            if candidate in late or candidate.nbytes > room:
                continue
            done_at = max(free_at, self.clock[self.ends[candidate.call]]) + candidate.nbytes / rate
            one = self._leaving_at(candidate, done_at)
            back = self.entries[candidate.call + 1] if one else 0
            if one is None or not one.gone <= most < back:
                continue
            missing[one.gone : back] -= candidate.nbytes
            free_at, room = done_at, room - candidate.nbytes
            chosen.append(one)
        return chosen if int(missing.max()) <= 0 else None

    def _leaving_at(self, candidate: _Candidate, done_at: float) -> _Leaving | None:
        """The first call at whose end a copy is done; none if that is the last."""
        for call in range(candidate.call, len(self.views)):
            if self.clock[self.ends[call]] >= done_at:
                is_last = candidate.call + 1 == len(self.views)
                gone = max(self.ends[call], candidate.idle)
                return None if is_last else _Leaving(candidate, call, gone)
        return None

    def _fetches(self, leaving: Sequence[_Leaving]) -> list[int]:
        """How many calls before its own each copy is asked back; 0 where it would be late."""
        rate = SHARE_OF_RATE * self.link.from_host
        order = sorted(range(len(leaving)), key=lambda i: -leaving[i].candidate.needed)
        fetches, start = [0] * len(leaving), np.inf
        for number in order:
            one = leaving[number].candidate
            deadline = min(start, float(self.clock[one.needed]))
            start = deadline - one.nbytes / rate
            for call in range(one.call + 1, len(self.views)):
                if self.clock[self.entries[call]] <= start and self.entries[call] < one.needed:
                    fetches[number] = call - one.call
                    break
            else:
                start = deadline
        return fetches

    def _by_call(
        self, leaving: Sequence[_Leaving], fetches: Sequence[int]
    ) -> list[tuple[Offload, ...]]:
        found: list[list[Offload]] = [[] for _ in self.views]
        for one, fetch in zip(leaving, fetches, strict=True):
            own = one.candidate
            release = one.release_call - own.call
            found[own.call].append(Offload(own.key, own.nbytes, release, fetch))
        return [tuple(own) for own in found]

    @functools.cached_property
    def candidates(self) -> list[_Candidate]:
        """The kept storages that only their own call needs: by calls, the largest of each first.

        Few copies are cheaper than many.
        """
        readers = foreign_readers(self.views)
        found = []
        for call, (part, option) in enumerate(self.picked):
            if option.engine is Engine.MODULE or option.drops_border:
                continue
            kept = _kept(part.view, option, call)
            own = [one for one in kept if one.storage not in readers and self._is_worth_it(one)]
            own += filter(self._is_worth_it, self._inputs(call))
            found += sorted(own, key=lambda one: -one.nbytes)
        return found

    def _inputs(self, call: int) -> Iterator[_Candidate]:
        """The input of a call, where this call alone holds it for backward."""
        (_, option), view = self.picked[call], self.views[call]
        before = self.picked[call - 1][1] if call else None
        if view.input is None or (before is not None and before.drops_border):
            return
        if option.engine is Engine.INDUCTOR:
            is_held = option.forms[1].holds_arguments
            is_held &= before is None or not any(form.holds_outputs for form in before.forms[1:])
        else:
            sources = view.program(option.dropped).all_sources
            is_held = view.saves_input or any(v.storage == view.input for v in sources)
        storage = view.graph.storages[view.input]
        idle = storage.natural_death + 1
        if is_held and idle < view.first_request and not view.shares_input(self.views):
            yield _Candidate(call, INPUT, storage.nbytes, idle, view.first_request, view.input)


def _kept(view: BlockGraph, option: Option, call: int) -> Iterator[_Candidate]:
    if option.engine is Engine.INDUCTOR:
        yield from _kept_by_form(view, option, call)
        return
    storages = view.graph.storages
    for number in view.settled:
        storage = storages[number]
        if number in option.dropped or storage.category is not Category.ACTIVATION:
            continue
        idle = storage.natural_death + 1
        if idle < view.first_request:
            key = view.storage_key(number)
            yield _Candidate(call, key, storage.nbytes, idle, view.first_request, number)


def _kept_by_form(view: BlockGraph, option: Option, call: int) -> Iterator[_Candidate]:
    """What a compiled call saves in one of its forms."""
    idle, needed = view.block.stop, view.first_request
    for number, nbytes in enumerate(option.forms[1].saves):
        if nbytes:
            yield _Candidate(call, save_key(number), nbytes, idle, needed)


def _scale(profile: Profile) -> float:
    """How much longer a step takes than its ops one by one: launches, gaps between kernels."""
    by_ops = sum(profile.seconds(index) for index in range(len(profile.graph.ops)))
    return profile.step_seconds / by_ops if by_ops else 1.0
