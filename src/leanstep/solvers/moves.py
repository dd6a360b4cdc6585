"""Moves along the calls of a step, and the chain that they make: see `chain.py`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leanstep.solvers.base import Bytes, Call, Choice, Places

# A level of what is not there: below every budget.
NOWHERE = -(2**60)

# A level above every budget: what must not be.
NEVER = 2**60


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The moves from one place of the path on, one array entry each.

    `stops` is where each leads, `calls` and `choices` what it picks, `kinds` what it does to its
    border. `freed` has a row an era and a column a move; `inside` also has an axis, the second, for
    the kinds of the border before.
    """

    calls: tuple[Call, ...]
    choices: tuple[Choice, ...]
    stops: Places
    picoseconds: Bytes
    freed: Bytes
    inside: Bytes
    kinds: Places

    def at(self, places: Places) -> "Moves":
        """Some of the moves."""
        return Moves(
            tuple(self.calls[place] for place in places),
            tuple(self.choices[place] for place in places),
            self.stops[places],
            self.picoseconds[places],
            self.freed[:, places],
            self.inside[:, :, places],
            self.kinds[places],
        )


@dataclass(frozen=True, eq=False)
class Chain:
    """The moves from every place; `gaps[i]` are the highest levels while i calls are open.

    `open_calls` counts the calls that are open in each stretch. `has_all_runs` says that every
    run of calls that can be made one is among the moves; `left_out` are the choices about borders
    that do not fit the picture.
    """

    moves: tuple[Moves, ...]
    gaps: tuple[Bytes, ...]
    highest: Bytes
    slack: Bytes
    open_calls: Places
    has_all_runs: bool = True
    left_out: tuple[Choice, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether everything that the problem lists is among the moves."""
        return self.has_all_runs and not self.left_out

    @property
    def num_eras(self) -> int:
        """How many eras there are: one or two."""
        return len(self.gaps[0])

    @functools.cached_property
    def last_era(self) -> "Chain":
        """The chain with its last era alone: right where the first one asks for nothing more."""
        moves = (replace(m, freed=m.freed[-1:], inside=m.inside[-1:]) for m in self.moves)
        return replace(self, moves=tuple(moves), gaps=tuple(gap[-1:] for gap in self.gaps))

    @functools.cached_property
    def held_back(self) -> Bytes:
        """At each place, how many bytes more can be free in the last era than in the first."""
        most = np.zeros(len(self.moves) + 1, dtype=np.int64)
        for place, moves in enumerate(self.moves):
            later = most[place] + moves.freed[-1] - moves.freed[0]
            np.maximum.at(most, moves.stops, later)
        return most

    def slack_bytes(self, budget_bytes: int) -> int:
        """How far the chain's peak can be above the exact one, where the budget matters."""
        return int(self.slack[self.highest + self.slack > budget_bytes].max(initial=0))

    def peak_bytes(self, path: Sequence[int]) -> int:
        """The chain's level for a path: the number of a move at each place it comes to."""
        freed, place, kind = np.zeros(self.num_eras, dtype=np.int64), 0, 0
        peak = int(self.gaps[0][:, 0].max())
        for number in path:
            moves = self.moves[place]
            peak = max(peak, int((moves.inside[:, kind, number] - freed).max()))
            freed += moves.freed[:, number]
            place, kind = int(moves.stops[number]), int(moves.kinds[number])
            peak = max(peak, int((self.gaps[place][:, kind] - freed).max()))
        return peak

    def picks(self, path: Sequence[int]) -> tuple[tuple[Call, Choice], ...]:
        """The calls of a path, each with its choice."""
        picks, place = [], 0
        for number in path:
            moves = self.moves[place]
            picks.append((moves.calls[number], moves.choices[number]))
            place = int(moves.stops[number])
        return tuple(picks)


def inside_levels(
    choice: Choice, tops: Bytes, others: Bytes, own_era: Places, num_eras: int
) -> Bytes:
    """The highest level in its own stretches under a choice, in each era."""
    inside = np.full(num_eras, NOWHERE, dtype=np.int64)
    added = others + choice.deltas
    own = np.flatnonzero(own_era >= 0)
    np.maximum.at(inside, own_era[own], tops[own] + added[own])
    is_here = own_era[choice.replay_stretches] >= 0
    here = choice.replay_stretches[is_here]
    np.maximum.at(inside, own_era[here], choice.replay_tops[is_here] + added[here])
    return inside


def undominated(moves: Moves) -> Moves:
    """The moves that are better than any other in some way; of equal ones the first."""
    insides = moves.inside.reshape(-1, len(moves.stops))
    order = np.lexsort((insides.max(axis=0), -moves.freed[-1], moves.picoseconds))
    kept: list[int] = []
    for place in order:
        held = np.array(kept, dtype=np.intp)
        frees = (moves.freed[:, held] >= moves.freed[:, [place]]).all(axis=0)
        fits = (insides[:, held] <= insides[:, [place]]).all(axis=0)
        leads = (moves.stops[held] == moves.stops[place]) & (
            moves.kinds[held] == moves.kinds[place]
        )
        if not np.any(frees & fits & leads):
            kept.append(int(place))
    return moves.at(np.array(sorted(kept), dtype=np.intp))


def together(parts: Sequence[Moves]) -> Moves:
    """Some moves and others."""
    return Moves(
        tuple(call for part in parts for call in part.calls),
        tuple(choice for part in parts for choice in part.choices),
        np.concatenate([part.stops for part in parts]),
        np.concatenate([part.picoseconds for part in parts]),
        np.concatenate([part.freed for part in parts], axis=1),
        np.concatenate([part.inside for part in parts], axis=2),
        np.concatenate([part.kinds for part in parts]),
    )
