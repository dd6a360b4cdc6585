"""The public verbs: peak and time against the batch, and the largest batch under a budget."""

from collections.abc import Callable, Iterable, Sequence

import torch

from leanstep.errors import InputError
from leanstep.ir import MaxBatch, Sweep, Trial
from leanstep.models import Target, find_target
from leanstep.planner.options import check_engine
from leanstep.profiler.devices import find_device
from leanstep.solvers.registry import find_solver
from leanstep.study.isolation import alone, can_travel
from leanstep.study.search import largest
from leanstep.study.trials import Conditions, Maker
from leanstep.units import check_budget, parse_budget

Watch = Callable[[Trial], object]

_NOT_ISOLATED = (
    "trials ran in this process, one after the other: a factory that can be imported from a module "
    "gets a process for each"
)


def sweep(
    make: str | Maker,
    batches: Iterable[int],
    *,
    budget: str | int = "auto",
    device: str | None = None,
    solver: str = "auto",
    engine: str = "auto",
    offload: bool = True,
    watch: Watch | None = None,
) -> Sweep:
    """Peak and time of a step for several batch sizes, untouched and planned under a budget.

    Args:
        make: the name of a built-in model, `"package.module:factory"`, or a function of a batch
            size that returns model, batch, loss and optimizer.
        batches: the batch sizes.
        budget: `"24GiB"` or bytes; `"auto"` is the memory of the GPU less a margin.
        device: `"h200"` and the like predict for that device, which need not be there; without it
            every figure is measured here, on CUDA in a process for each batch size.
        solver: as for `plan`.
        engine: as for `fit`.
        offload: as for `fit`.
        watch: called with each trial when it is done.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1:
        raise InputError("batches must be whole numbers of 1 or more, such as [8, 16, 32]")
    conditions, notes = _conditions(make, budget, device, solver, engine, offload=offload)
    trials = tuple(_tried(conditions, batch, watch) for batch in sizes)
    return Sweep(
        model=_name(make),
        device=_device(trials),
        budget_bytes=conditions.budget_bytes,
        solver=find_solver(solver).name,
        trials=trials,
        notes=notes,
    )


def max_batch(
    make: str | Maker,
    *,
    budget: str | int = "auto",
    device: str | None = None,
    most_extra: float | None = None,
    solver: str = "auto",
    engine: str = "auto",
    offload: bool = True,
    start: int = 8,
    most: int = 1 << 16,
    watch: Watch | None = None,
) -> MaxBatch:
    """Find the largest batch under a budget, without a plan and with one, and what it costs.

    Takes what `sweep` takes. With `most_extra=0.2` a sample may take at most 20 % longer than in
    the largest untouched step; without it only memory counts. The search begins at `start`, and
    no batch is larger than `most`.
    """
    if start < 1 or most < start:
        raise InputError(f"start={start} and most={most} must be 1 or more, and in this order")
    conditions, notes = _conditions(make, budget, device, solver, engine, offload=offload)
    limit, done = conditions.budget_bytes, dict[int, Trial]()

    def tried(batch: int) -> Trial:
        if batch not in done:
            done[batch] = _tried(conditions, batch, watch)
        return done[batch]

    def untouched(batch: int) -> tuple[bool, int]:
        trial = tried(batch)
        need = trial.baseline.peak_bytes if trial.baseline else 0
        # A prediction for a step that ran out of memory is no step.
        runs = trial.baseline is not None and (device is not None or trial.baseline.measured)
        return runs and trial.untouched_fits(limit), need

    untouched_batch = largest(untouched, limit, start=start, most=most)
    slowest = _slowest(tried(untouched_batch) if untouched_batch else None, most_extra)

    def planned(batch: int) -> tuple[bool, int]:
        trial = tried(batch)
        fits = trial.planned is not None and trial.planned_sample_seconds <= slowest
        return fits, trial.floor_bytes

    begin = min(most, 2 * untouched_batch) or start
    planned_batch = largest(planned, limit, start=begin, most=most)
    trials = tuple(trial for _, trial in sorted(done.items()))
    return MaxBatch(
        model=_name(make),
        device=_device(trials),
        budget_bytes=limit,
        solver=find_solver(solver).name,
        untouched_batch=untouched_batch,
        planned_batch=planned_batch,
        trials=trials,
        most_extra=most_extra,
        notes=notes,
    )


def _slowest(untouched: Trial | None, most_extra: float | None) -> float:
    """The most seconds that a sample may take."""
    if most_extra is None or untouched is None:
        return float("inf")
    return (1 + most_extra) * untouched.baseline_sample_seconds


def _tried(conditions: Conditions, batch: int, watch: Watch | None) -> Trial:
    trial = conditions.trial(batch)
    if watch is not None:
        watch(trial)
    return trial


def _conditions(
    make: str | Maker,
    budget: str | int,
    device: str | None,
    solver: str,
    engine: str,
    *,
    offload: bool,
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
    if not isinstance(make, str):
        return make
    return find_target(make).on(None) if is_here else find_target(make)


def _budget_bytes(budget: str | int, device: str | None, *, on_gpu: bool) -> int:
    """A budget in bytes; `"auto"` is all of a device that is not here, the free part of one."""
    free_bytes = None
    if device is not None:
        free_bytes = find_device(device).memory_bytes
    elif on_gpu and str(budget).strip().lower() == "auto":
        # Asked in another process: in this one the answer itself would take some of it.
        free_bytes = alone(_free_bytes)
    return parse_budget(budget, free_bytes=free_bytes)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _name(make: str | Maker) -> str:
    if isinstance(make, Target):
        return make.text
    return make if isinstance(make, str) else getattr(make, "__name__", type(make).__name__)


def _device(trials: Sequence[Trial]) -> str:
    return next((trial.device for trial in trials if trial.device), "unknown device")
