"""Train any PyTorch model inside a memory budget, with exactly the numbers it would have had.

`leanstep.fit(model, batch, loss, optimizer=optimizer, budget="16GiB")` does it all; the other
verbs are its stages. Verbs that need torch load when first used, so planning from a saved
profile imports no torch.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from leanstep.errors import BudgetError as BudgetError
from leanstep.errors import LeanstepError as LeanstepError
from leanstep.ir import MaxBatch as MaxBatch
from leanstep.ir import Plan as Plan
from leanstep.ir import Profile as Profile
from leanstep.ir import Sweep as Sweep
from leanstep.ir import Timeline as Timeline
from leanstep.ir import Verdict as Verdict
from leanstep.ir import load as load

if _TYPE_CHECKING:
    from leanstep import models as models
    from leanstep.api import apply as apply
    from leanstep.api import profile as profile
    from leanstep.api import verify as verify
    from leanstep.checkup import doctor as doctor
    from leanstep.cutter import segments as segments
    from leanstep.engines.loss import cross_entropy as cross_entropy
    from leanstep.fitting.fitter import Fit as Fit
    from leanstep.fitting.fitter import fit as fit
    from leanstep.fitting.fitter import from_config as from_config
    from leanstep.lazy.lean import lean as lean
    from leanstep.marks import keep as keep
    from leanstep.marks import recompute as recompute
    from leanstep.planner import frontier as frontier
    from leanstep.planner import plan as plan
    from leanstep.ranks.reduction import reduce_gradients as reduce_gradients
    from leanstep.reporters import report as report
    from leanstep.simulator import simulate as simulate
    from leanstep.study import max_batch as max_batch
    from leanstep.study import sweep as sweep

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "Fit",
    "LeanstepError",
    "MaxBatch",
    "Plan",
    "Profile",
    "Sweep",
    "Timeline",
    "Verdict",
    "__version__",
    "apply",
    "cross_entropy",
    "doctor",
    "fit",
    "from_config",
    "frontier",
    "keep",
    "lean",
    "load",
    "max_batch",
    "models",
    "plan",
    "profile",
    "recompute",
    "reduce_gradients",
    "report",
    "segments",
    "simulate",
    "sweep",
    "verify",
]

_LAZY = {
    "Fit": "leanstep.fitting.fitter",
    "apply": "leanstep.api",
    "cross_entropy": "leanstep.engines.loss",
    "doctor": "leanstep.checkup",
    "fit": "leanstep.fitting.fitter",
    "from_config": "leanstep.fitting.fitter",
    "frontier": "leanstep.planner",
    "keep": "leanstep.marks",
    "lean": "leanstep.lazy.lean",
    "max_batch": "leanstep.study",
    "plan": "leanstep.planner",
    "profile": "leanstep.api",
    "recompute": "leanstep.marks",
    "reduce_gradients": "leanstep.ranks.reduction",
    "report": "leanstep.reporters",
    "segments": "leanstep.cutter",
    "simulate": "leanstep.simulator",
    "sweep": "leanstep.study",
    "verify": "leanstep.api",
}


def __getattr__(name: str) -> object:
    if name == "models":
        return _importlib.import_module("leanstep.models")
    if name not in _LAZY:
        raise AttributeError(f"module 'leanstep' has no attribute {name!r}")
    found: object = getattr(_importlib.import_module(_LAZY[name]), name)
    # Kept, so that the next use does not come here.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
