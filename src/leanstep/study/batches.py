"""The public verbs: peak and time against the batch, and the largest batch under a budget."""

from collections.abc import Callable, Iterable, Sequence

import torch

from leanstep.devices import find_device
from leanstep.errors import InputError, UnitError
from leanstep.ir import MaxBatch, Sweep, Trial
from leanstep.models import Target, find_target
from leanstep.planner.options import check_engine
from leanstep.solvers.registry import find_solver
from leanstep.stages import stage
from leanstep.study.isolation import alone, can_travel
from leanstep.study.search import largest
from leanstep.study.trials import Conditions, Maker
from leanstep.units import check_budget, parse_budget, parse_share

Watch = Callable[[Trial], object]

# The batch size that a study begins with, and the largest that it tries.
_FIRST = 8
_MOST = 1 << 16

_NOT_ISOLATED = (
    "trials ran in this process, one after the other: a factory that can be imported from a module "
    "gets a process for each"
)


class Trials:
    """The trials of one study: no batch size is tried twice."""

    def __init__(self, conditions: Conditions, watch: Watch | None) -> None:
        self._conditions, self._watch = conditions, watch
        self._done: dict[int, Trial] = {}

    def __call__(self, batch: int) -> Trial:
        """Try a batch size, or return what came of it."""
        if batch not in self._done:
            with stage(f"batch {batch}"):
                self._done[batch] = self._conditions.trial(batch)
            if self._watch is not None:
                self._watch(self._done[batch])
        return self._done[batch]

    def by_batch(self) -> tuple[Trial, ...]:
        """All that were made, by rising batch."""
        return tuple(trial for _, trial in sorted(self._done.items()))


def sweep(
    make: str | Maker,
    batches: Iterable[int] | None = None,
    *,
    budget: str | int = "auto",
    device: str | None = None,
    solver: str = "auto",
    engine: str = "auto",
    offload: bool = True,
    exact: bool = True,
    watch: Watch | None = None,
) -> Sweep:
    """Peak and time of a step for several batch sizes, untouched and planned under a budget.

    Args:
        make: the name of a built-in model, `"package.module:factory"`, or a function of a batch
            size that returns model, batch, loss and optimizer.
        batches: the batch sizes; by default powers of two, up to the first that no plan fits.
        budget: `"24GiB"` or bytes; `"auto"` is the memory of the GPU less a margin.
        device: `"h200"` and the like predict for that device, which need not be there; without it
            every figure is measured here, on CUDA in a process for each batch size.
        solver: as for `plan`.
        engine: as for `fit`.
        offload: as for `fit`.
        exact: as for `fit`.
        watch: called with each trial when it is done.
    """
    sizes = None if batches is None else sorted(set(batches))
    if sizes is not None and (not sizes or sizes[0] < 1):
        raise InputError("batches must be whole numbers of 1 or more, such as [8, 16, 32]")
    conditions, notes = _conditions(
        make, budget, device, solver, engine, offload=offload, exact=exact
    )
    tried = Trials(conditions, watch)
    if sizes is None:
        _try_powers(tried, conditions.budget_bytes)
    for batch in sizes or ():
        tried(batch)
    return Sweep(
        model=_name(make),
        device=_device(tried.by_batch()),
        budget_bytes=conditions.budget_bytes,
        solver=find_solver(solver).name,
        trials=tried.by_batch(),
        notes=notes,
    )


def _try_powers(tried: Trials, budget_bytes: int) -> None:
    """Try powers of two around the largest batch that fits untouched, up to one with no plan."""
    first = tried(_FIRST)
    batch = _FIRST // 2
    while first.planned is None and batch and tried(batch).planned is None:
        batch //= 2
    if first.planned is None or first.baseline is None:
        return
    # What does not grow with the batch counts as if it did: at least so many rows fit.
    least = _FIRST * budget_bytes // first.baseline.peak_bytes
    batch = max(2 * _FIRST, 1 << max(0, least.bit_length() - 3))
    while batch <= _MOST and tried(batch).planned is not None:
        batch *= 2


def max_batch(
    make: str | Maker,
    *,
    budget: str | int = "auto",
    device: str | None = None,
    max_slowdown: str | float | None = None,
    solver: str = "auto",
    engine: str = "auto",
    offload: bool = True,
    exact: bool = True,
    start: int = _FIRST,
    most: int = _MOST,
    watch: Watch | None = None,
) -> MaxBatch:
    """Find the largest batch under a budget, without a plan and with one, and what it costs.

    Takes what `sweep` takes. With `max_slowdown="20%"` (or 0.2) a sample may take at most 20 %
    longer than in the largest untouched step; without it only memory counts. The search begins at
    `start`, and no batch is larger than `most`.
    """
    if start < 1 or most < start:
        raise InputError(f"start={start} and most={most} must be 1 or more, and in this order")
    share = None if max_slowdown is None else parse_share(max_slowdown, "max_slowdown")
    conditions, notes = _conditions(
        make, budget, device, solver, engine, offload=offload, exact=exact
    )
    limit, tried = conditions.budget_bytes, Trials(conditions, watch)

    def untouched(batch: int) -> tuple[bool, float]:
        trial = tried(batch)
        need = trial.baseline.peak_bytes if trial.baseline else 0
        # A prediction for a step that ran out of memory is no step.
        runs = trial.baseline is not None and (device is not None or trial.baseline.measured)
        return runs and trial.untouched_fits(limit), need / limit

    untouched_batch = largest(untouched, start=start, most=most)
    slowest = _slowest(tried(untouched_batch) if untouched_batch else None, share)

    def planned(batch: int) -> tuple[bool, float]:
        trial = tried(batch)
        if trial.planned is None:
            return False, trial.floor_bytes / limit
        load = trial.planned_sample_seconds / slowest
        # How much room a plan leaves is not known: time and memory are not on one line.
        return load <= 1, load if load > 1 else 0.0

    begin = min(most, 2 * untouched_batch) or start
    planned_batch = largest(planned, start=begin, most=most)
    return MaxBatch(
        model=_name(make),
        device=_device(tried.by_batch()),
        budget_bytes=limit,
        solver=find_solver(solver).name,
        untouched_batch=untouched_batch,
        planned_batch=planned_batch,
        trials=tried.by_batch(),
        max_slowdown=share,
        notes=notes,
    )


def _slowest(untouched: Trial | None, max_slowdown: float | None) -> float:
    """The most seconds that a sample may take."""
    if max_slowdown is None or untouched is None:
        return float("inf")
    return (1 + max_slowdown) * untouched.baseline_sample_seconds


def _conditions(
    make: str | Maker,
    budget: str | int,
    device: str | None,
    solver: str,
    engine: str,
    *,
    offload: bool,
    exact: bool,
) -> tuple[Conditions, tuple[str, ...]]:
    check_budget(budget)
    check_engine(engine)
    find_solver(solver)
    maker = _maker(make, is_here=device is None)
    on_gpu = device is None and torch.cuda.is_available()
    isolated = on_gpu and can_travel(maker)
    conditions = Conditions(
        make=maker,
        budget_bytes=_budget_bytes(budget, device, on_gpu=on_gpu),
        device=device,
        solver=solver,
        engine=engine,
        offload=offload,
        exact=exact,
        isolated=isolated,
    )
    notes = [_NOT_ISOLATED] if on_gpu and not isolated else []
    if device is not None:
        notes.append(
            f"estimated for {find_device(device).name}: fake tensors and a roofline; workspaces of "
            "its libraries and what a CUDA context takes are not in it"
        )
    return conditions, tuple(notes)


def _maker(make: str | Maker, *, is_here: bool) -> Maker:
    if isinstance(make, torch.nn.Module) or not (isinstance(make, str) or callable(make)):
        raise InputError(
            f"a study takes a function of a batch size, not {type(make).__name__}: it returns "
            "model, batch, loss and optimizer"
        )
    if not isinstance(make, str):
        return make
    return find_target(make).on(None) if is_here else find_target(make)


def _budget_bytes(budget: str | int, device: str | None, *, on_gpu: bool) -> int:
    """A budget in bytes; `"auto"` is all of a device that is not here, the free part of one."""
    free_bytes = None
    is_auto = str(budget).strip().lower() == "auto"
    if device is not None:
        free_bytes = find_device(device).memory_bytes
    elif on_gpu and is_auto:
        # Asked in another process: in this one the answer itself would take some of it.
        free_bytes = alone(_free_bytes)
    elif is_auto:
        raise UnitError(
            'budget "auto" is the memory of a GPU, and none is here; write a size, as in "16GiB", '
            'or name a device that figures are estimated for, such as "h200"'
        )
    return parse_budget(budget, free_bytes=free_bytes)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _name(make: str | Maker) -> str:
    if isinstance(make, Target):
        return make.text
    return make if isinstance(make, str) else getattr(make, "__name__", type(make).__name__)


def _device(trials: Sequence[Trial]) -> str:
    return next((trial.device for trial in trials if trial.device), "unknown device")
