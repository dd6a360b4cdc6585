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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leanstep.effects import backward_entry
from leanstep.ir import Category, Engine, Link, Offload, Profile
from leanstep.ir.decision import INPUT
from leanstep.ir.form import save_key
from leanstep.planner.option import Option
from leanstep.planner.options import foreign_readers
from leanstep.planner.segments import Part
from leanstep.rebuild.block import BlockGraph
from leanstep.simulator import by_position, op_seconds
from leanstep.solvers.base import Bytes, Choice

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
class Candidate:
    """A kept storage, and the positions between which nothing on the device needs it."""

    call: int
    key: str
    nbytes: int
    idle: int
    needed: int
    storage: int = -1


@dataclass(frozen=True, slots=True)
class _Away:
    """A copy on the host: the positions where it is gone and back, and what a plan says of it."""

    gone: int
    back: int
    entry: Offload


class _Schedule:
    """When copies go over the link, one after the other; the first out are the last back."""

    def __init__(self, link: Link) -> None:
        self._out, self._in = SHARE_OF_RATE * link.to_host, SHARE_OF_RATE * link.from_host
        self._room = int(SHARE_OF_HOST * link.host_bytes)
        self._free_from, self._free_until = 0.0, np.inf

    def sent(self, candidate: Candidate, made: float) -> float:
        """When it has left the device, if it may from some time on; never where it has no room."""
        if candidate.nbytes > self._room:
            return np.inf
        return max(self._free_from, made) + candidate.nbytes / self._out

    def asked(self, candidate: Candidate, needed: float) -> float:
        """The latest time to ask it back, if it is needed at some time."""
        return min(self._free_until, needed) - candidate.nbytes / self._in

    def add(self, candidate: Candidate, sent: float, asked: float) -> None:
        """It goes and comes back so."""
        self._free_from, self._free_until = sent, asked
        self._room -= candidate.nbytes


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


def link_of(profile: Profile) -> Link:
    """The link, where there is one."""
    assert profile.link is not None, "asked only where there is a link"
    return profile.link


def find_offload(
    profile: Profile, picked: Picked, budget_bytes: int, least_seconds: float
) -> list[tuple[Offload, ...]] | None:
    """What each call moves to the host so that the step fits; None where that is not enough.

    Nothing goes that takes the link less than so many seconds.
    """
    return Offloader(profile, link_of(profile), picked, least_seconds).fitting(budget_bytes)


class Offloader:
    """Find what to move for one selection of options."""

    def __init__(self, profile: Profile, link: Link, picked: Picked, least_seconds: float) -> None:
        self.profile, self.link, self.picked = profile, link, picked
        self.least_bytes = least_seconds * link.to_host
        self.views = [part.view for part, _ in picked]
        found = by_position(profile, [option.effect(part.view) for part, option in picked])
        self.tops: Bytes = found[0]
        seconds: Seconds = found[1]
        # When each position is reached.
        self.clock: Seconds = _scale(profile) * (np.cumsum(seconds) - seconds)
        self.ends = [view.block.stop for view in self.views]
        self.entries = [backward_entry(self.views, place) for place in range(len(self.views))]

    def kept_bytes(
        self, part: Part, movable: Sequence[Candidate], number: int, choice: Choice
    ) -> int:
        """What a choice keeps and the link could take; each form of compiled code keeps its own."""
        if part.view.block.is_compiled:
            own = _kept_by_form(part.view, part.options.options[number], 0)
            return sum(one.nbytes for one in own if self._is_worth_it(one))
        return sum(one.nbytes for one in movable if one.storage not in choice.dropped)

    def _is_worth_it(self, candidate: Candidate) -> bool:
        return candidate.nbytes >= self.least_bytes

    def fitting(
        self, budget_bytes: int, owed: Collection[int] = ()
    ) -> list[tuple[Offload, ...]] | None:
        """The first copies that bring every level under the budget, and one of each call owed.

        Which come first does not depend on the budget: more of it needs no more of them.
        """
        levels, found = self.tops.copy(), [list[Offload]() for _ in self.views]
        schedule, last = _Schedule(self.link), {one.call: one for one in self.candidates}
        for candidate in self.candidates:
            place, highest = candidate.call, int(np.argmax(levels))
            is_owed = place in owed and not found[place] and candidate is last[place]
            if levels[highest] <= budget_bytes and not is_owed:
                continue
            sent, asked, away = self._away(candidate, schedule)
            if away is None or not (is_owed or away.gone <= highest < away.back):
                continue
            levels[away.gone : away.back] -= candidate.nbytes
            schedule.add(candidate, sent, asked)
            found[place].append(away.entry)
        return [tuple(own) for own in found] if int(levels.max()) <= budget_bytes else None

    def _away(self, candidate: Candidate, schedule: _Schedule) -> tuple[float, float, _Away | None]:
        """When a candidate leaves and is asked back; None where no call ends or begins in time."""
        place, needed = candidate.call, candidate.needed
        sent = schedule.sent(candidate, self.clock[self.ends[place]])
        asked = schedule.asked(candidate, self.clock[needed])
        after = range(place + 1, len(self.views))
        at_end = (n for n in (place, *after) if self.clock[self.ends[n]] >= sent)
        release = next(at_end, None)
        entries = self.entries
        in_time = (n for n in after if self.clock[entries[n]] <= asked and entries[n] < needed)
        fetch = next(in_time, None)
        if release is None or fetch is None:
            return sent, asked, None
        entry = Offload(candidate.key, candidate.nbytes, release - place, fetch - place)
        gone = max(self.ends[release], candidate.idle)
        return sent, asked, _Away(gone, entries[fetch], entry)

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """The kept storages that only their own call needs: by calls, the largest of each first.

        Few copies are cheaper than many.
        """
        readers = foreign_readers(self.views)
        found = []
        for call, (part, option) in enumerate(self.picked):
            if option.engine in (Engine.UNTOUCHED, Engine.MODULE) or option.drops_border:
                continue
            kept = _kept(part.view, option, call)
            own = [one for one in kept if one.storage not in readers and self._is_worth_it(one)]
            own += filter(self._is_worth_it, self._inputs(call))
            found += sorted(own, key=lambda one: -one.nbytes)
        # What is late even on an empty link never goes.
        empty = _Schedule(self.link)
        return [one for one in found if self._away(one, empty)[-1] is not None]

    def _inputs(self, call: int) -> Iterator[Candidate]:
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
            yield Candidate(call, INPUT, storage.nbytes, idle, view.first_request, view.input)


def _kept(view: BlockGraph, option: Option, call: int) -> Iterator[Candidate]:
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
            yield Candidate(call, key, storage.nbytes, idle, view.first_request, number)


def _kept_by_form(view: BlockGraph, option: Option, call: int) -> Iterator[Candidate]:
    """What a compiled call saves in one of its forms."""
    idle, needed = view.block.stop, view.first_request
    for number, nbytes in enumerate(option.forms[1].saves):
        if nbytes:
            yield Candidate(call, save_key(number), nbytes, idle, needed)


def _scale(profile: Profile) -> float:
    """How much longer a step takes than its ops one by one: launches, gaps between kernels."""
    by_ops = sum(op_seconds(profile).tolist())
    return profile.step_seconds / by_ops if by_ops else 1.0
