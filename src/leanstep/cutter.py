"""Cut a Sequential into segments that run again in backward: `checkpoint_sequential`, in place.

    cut = leanstep.segments(model.features, 4)
    cut.remove()

As there, n children make k segments of n // k, the last one longer; of every segment but the last
only the input stays. What differs: the loop is unchanged, the result of every call is exact also
with dropout, batch norm and in-place layers (each segment is recorded when it is first called, and
runs by checkpointing only where a second run is sure to be like the first), and `"auto"` finds k.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from leanstep import engines
from leanstep.api import profile as profile_of
from leanstep.api import refuse_fitted
from leanstep.engines import Applied
from leanstep.errors import BudgetError, InputError
from leanstep.ir import Decision, Engine, Plan, Profile, Timeline
from leanstep.recorder.identity import identity_of
from leanstep.simulator import peak_op, simulate
from leanstep.step.training import Loss
from leanstep.units import check_budget, parse_budget


@dataclass(frozen=True)
class Segments:
    """A Sequential that runs in segments; `count` is their number, `remove()` undoes it.

    `peak_bytes` is the predicted peak of the step; 0 where the number was given by hand.
    """

    count: int
    peak_bytes: int
    applied: Applied

    def remove(self) -> None:
        """Give the Sequential back exactly as it was."""
        self.applied.remove()


def segments(
    sequential: nn.Sequential,
    count: int | Literal["auto"],
    *,
    batch: Any = None,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int | None = None,
) -> Segments:
    """Let a Sequential keep only the inputs of its segments for backward, with the same numbers.

    Args:
        sequential: an `nn.Sequential`, alone or anywhere in a model; it is changed in place.
        count: the number of segments; `"auto"` takes the one that costs the least time of those
            that fit the budget, and 1, which changes nothing, where that fits.
        batch: for `"auto"`: what the Sequential is called with.
        loss: for `"auto"`: `loss(sequential, batch)` returns a scalar.
        optimizer: for `"auto"`: counted in the peak.
        budget: for `"auto"`: bounds the peak of the Sequential's whole training step.

    Raises:
        BudgetError: no number of segments fits.
        InputError: an argument cannot be used.
    """
    if isinstance(sequential, nn.Module):
        refuse_fitted(sequential)
    names = _children(sequential)
    if count == "auto":
        if batch is None or budget is None:
            raise InputError('segments(…, "auto") needs batch= and budget= (and a loss)')
        check_budget(budget)
        recorded = profile_of(sequential, batch, loss, optimizer=optimizer)
        return _found(sequential, recorded, budget)
    given = {"batch": batch, "loss": loss, "optimizer": optimizer, "budget": budget}
    if unused := [name for name, value in given.items() if value is not None]:
        raise InputError(f'{unused[0]}= goes with segments(…, "auto"), not with a number')
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(names):
        raise InputError(
            f"{len(names)} layers cannot be cut into {count!r} segments: "
            f'use a number from 1 to {len(names)}, or "auto"'
        )
    plan = replace(_cut(names, count), model=identity_of(sequential))
    return Segments(count, 0, engines.apply(sequential, plan))


def _children(sequential: nn.Sequential) -> list[str]:
    is_plain = isinstance(sequential, nn.Sequential)
    if not is_plain or type(sequential).forward is not nn.Sequential.forward:
        raise InputError(
            f"{type(sequential).__name__} does not call its children one after the other: "
            "segments are for an nn.Sequential"
        )
    # All of them: named_children() leaves out a layer that stands there twice.
    return list(vars(sequential)["_modules"])


def _cut(names: list[str], count: int) -> Plan:
    """The plan that keeps the inputs of so many segments; what it costs is not known."""
    size = len(names) // count
    starts = [place * size for place in range(count)]
    stops = [*starts[1:], len(names)]
    decisions = tuple(
        Decision(
            path="",
            occurrence=0,
            children=tuple(names[start:stop]),
            # The last one's backward follows at once.
            engine=Engine.UNTOUCHED if stop == len(names) else Engine.MODULE,
            drop=(),
            kept_bytes=0,
            dropped_bytes=0,
            extra_seconds=0.0,
            why=f"segment {number} of {count}",
        )
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True), 1)
    )
    return Plan(
        solver=f"{count} segments",
        budget_bytes=0,
        peak_bytes=0,
        unplanned_peak_bytes=0,
        movable_bytes=0,
        step_seconds=0.0,
        extra_seconds=0.0,
        bound_seconds=0.0,
        decisions=decisions,
        model=identity_of(nn.Module()),
        torch_version=torch.__version__,
    )


def _found(sequential: nn.Sequential, recorded: Profile, budget: str | int) -> Segments:
    budget_bytes = parse_budget(budget, unplanned_peak_bytes=recorded.peak_bytes)
    tried = list(_tried(recorded, _children(sequential)))
    fitting = [one for one in tried if one[2].peak_bytes <= budget_bytes]
    if not fitting:
        _, _, lowest = min(tried, key=lambda one: one[2].peak_bytes)
        op = peak_op(recorded, lowest)
        raise BudgetError(
            budget_bytes,
            lowest.peak_bytes,
            op=op.name,
            module=recorded.graph.path(op) or None,
            source=op.source or None,
        )
    count, plan, line = min(fitting, key=lambda one: (one[2].extra_seconds, one[2].peak_bytes))
    plan = replace(
        plan,
        budget_bytes=budget_bytes,
        peak_bytes=line.peak_bytes,
        unplanned_peak_bytes=recorded.peak_bytes,
        model=recorded.model,
    )
    return Segments(count, line.peak_bytes, engines.apply(sequential, plan))


def _tried(recorded: Profile, names: list[str]) -> Iterator[tuple[int, Plan, Timeline]]:
    """Every number of segments, with what the simulator says of it."""
    for count in range(1, len(names) + 1):
        plan = _cut(names, count)
        yield count, plan, simulate(recorded, plan)
