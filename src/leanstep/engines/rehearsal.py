"""Run a planned step once before it is trusted; find the blocks that do not repeat themselves."""

import torch

from leanstep.engines.apply import Applied
from leanstep.engines.observer import Observer
from leanstep.ir import Engine, Exclusion
from leanstep.ir.graph import block_name
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep

# Whole modules are recorded twice before they are run again.
_RUNS = 3


def rehearse(step: TrainingStep, applied: Applied) -> tuple[Exclusion, ...]:
    """Run forward and backward under the plan, which leaves no trace; name who failed, and why."""
    observer = Observer(compares=applied.plan.exact)
    has_modules = any(decision.engine is Engine.MODULE for decision in applied.plan.decisions)
    with untouched(step), applied.observed_by(observer):
        try:
            for _ in range(_RUNS if has_modules else 1):
                step.compute_loss().backward()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not observer.current:
                raise
            first_line = str(error).partition("\n")[0]
            observer.doubt(
                observer.current,
                f"in a dry run it raised {type(error).__name__}: {first_line}",
            )
    observer.close()
    found = (
        Exclusion(decision.path, decision.children, decision.engine, reason)
        for decision in applied.plan.changed
        if (reason := observer.doubts.get(block_name(decision.path, decision.children)))
    )
    return tuple(dict.fromkeys(found))
