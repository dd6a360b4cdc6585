"""Choices that drop the border between a call and the next, as moves of a chain.

The output comes back in the next call's backward pass, so levels there depend on both calls: they
are worked out for each *kind* of border that the move before can have dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leanstep.solvers.base import Bytes, Call, Choice, Places, Problem
from leanstep.solvers.moves import NEVER, Chain, Moves, inside_levels, together

# Kinds of borders of one call: those of the fastest choices.
MOST_KINDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What a dropped border does while the next call runs: bytes added, tops of replays."""

    added: Bytes
    replay_stretches: Places
    replay_tops: Bytes

    def is_like(self, other: "_Kind") -> bool:
        return (
            np.array_equal(self.added, other.added)
            and np.array_equal(self.replay_stretches, other.replay_stretches)
            and np.array_equal(self.replay_tops, other.replay_tops)
        )


def with_borders(
    problem: Problem, chain: Chain, era: Places, is_gap: npt.NDArray[np.bool_]
) -> Chain:
    """The chain with choices that drop borders as further moves."""
    if not any(call.border_choices for call in problem.calls):
        return replace(chain, left_out=())
    all_moves, gaps, before = [], [chain.gaps[0]], [_no_border(problem)]
    left_out: list[Choice] = []
    for index, call in enumerate(problem.calls):
        kinds = [_no_border(problem)]
        own_era = np.where((chain.open_calls == index) & ~is_gap, era, -1)
        parts = [chain.moves[index]]
        for choice in sorted(call.border_choices, key=lambda choice: choice.seconds):
            found = _border_move(problem, chain, call, choice, index, era, own_era, kinds)
            if found is None:
                left_out.append(choice)
            else:
                parts.append(found)
        moves = together(parts)
        inside = _with_kinds(problem, moves, before, own_era, chain.num_eras)
        all_moves.append(replace(moves, inside=inside))
        gap_era = np.where((chain.open_calls == index + 1) & is_gap, era, -1)
        gaps.append(_gap_levels(problem, chain.gaps[index + 1], kinds, gap_era))
        before = kinds
    return replace(chain, moves=tuple(all_moves), gaps=tuple(gaps), left_out=tuple(left_out))


def _no_border(problem: Problem) -> _Kind:
    none = np.zeros(0, dtype=np.intp)
    return _Kind(np.zeros_like(problem.tops), none, none.astype(np.int64))


def _border_move(
    problem: Problem,
    chain: Chain,
    call: Call,
    choice: Choice,
    index: int,
    era: Places,
    own_era: Places,
    kinds: list[_Kind],
) -> Moves | None:
    """A choice as a move, where it fits the picture; a new kind is added to the list."""
    opened = chain.open_calls
    is_far = opened > index + 1 if choice.drops_border else opened > index
    freed = np.zeros(chain.num_eras, dtype=np.int64)
    for number in range(chain.num_eras):
        far = choice.deltas[is_far & (era == number)]
        freed[number] = -int(far[0]) if len(far) else 0
    near = (opened == index + 1) & choice.drops_border
    expected = np.where(is_far | near, -freed[era], 0)
    beyond = np.where(own_era >= 0, 0, choice.deltas - expected)
    replays_near = near[choice.replay_stretches]
    is_orderly = not np.any(beyond[~near]) and bool(
        np.all((own_era[choice.replay_stretches] >= 0) | replays_near)
    )
    if not is_orderly:
        return None
    kind = _kind_number(kinds, choice, np.where(near, beyond, 0), replays_near)
    if kind is None:
        return None
    zeros = np.zeros_like(problem.tops)
    inside = inside_levels(choice, problem.tops, zeros, own_era, chain.num_eras)
    return Moves(
        (call,),
        (choice,),
        np.array([index + 1], dtype=np.intp),
        np.array([choice.picoseconds], dtype=np.int64),
        freed[:, None],
        inside[:, None, None],
        np.array([kind], dtype=np.intp),
    )


def _kind_number(
    kinds: list[_Kind], choice: Choice, added: Bytes, is_near: npt.NDArray[np.bool_]
) -> int | None:
    if not choice.drops_border:
        return 0
    kind = _Kind(added, choice.replay_stretches[is_near], choice.replay_tops[is_near])
    for number, known in enumerate(kinds[1:], start=1):
        if kind.is_like(known):
            return number
    if len(kinds) > MOST_KINDS:
        return None
    kinds.append(kind)
    return len(kinds) - 1


def _with_kinds(
    problem: Problem, moves: Moves, before: Sequence[_Kind], own_era: Places, num_eras: int
) -> Bytes:
    """The insides of moves after each kind of border."""
    rows = [moves.inside[:, 0, :]]
    for kind in before[1:]:
        row = np.full_like(rows[0], NEVER)
        for place, (call, choice) in enumerate(zip(moves.calls, moves.choices, strict=True)):
            is_run = call.span[1] - call.span[0] > 1
            if is_run or not choice.takes_border or choice.reads_border_early:
                continue
            level = inside_levels(choice, problem.tops, kind.added, own_era, num_eras)
            here = kind.replay_stretches[own_era[kind.replay_stretches] >= 0]
            tops = kind.replay_tops[own_era[kind.replay_stretches] >= 0]
            added = choice.deltas[here] + kind.added[here]
            np.maximum.at(level, own_era[here], tops + added)
            row[:, place] = level
        rows.append(row)
    return np.stack(rows, axis=1)


def _gap_levels(problem: Problem, plain: Bytes, kinds: Sequence[_Kind], gap_era: Places) -> Bytes:
    """The levels of a gap after each kind of border."""
    columns = [plain[:, 0]]
    stretches = np.flatnonzero(gap_era >= 0)
    for kind in kinds[1:]:
        level = plain[:, 0].copy()
        np.maximum.at(level, gap_era[stretches], problem.tops[stretches] + kind.added[stretches])
        here = kind.replay_stretches[gap_era[kind.replay_stretches] >= 0]
        tops = kind.replay_tops[gap_era[kind.replay_stretches] >= 0]
        np.maximum.at(level, gap_era[here], tops + kind.added[here])
        columns.append(level)
    return np.stack(columns, axis=1)
