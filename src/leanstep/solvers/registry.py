"""The solvers by name."""

from leanstep.errors import InputError
from leanstep.solvers.base import Solver
from leanstep.solvers.keep_all import KeepAll
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.uniform import Uniform

DEFAULT = "optimal"

# Those that a comparison asks: fast at any size.
CURVED = ("optimal", "uniform")

SOLVERS: tuple[Solver, ...] = (Optimal(), Uniform(), KeepAll())


def find_solver(name: str) -> Solver:
    """Return the solver with a name; "auto" is the default one."""
    by_name = {solver.name: solver for solver in SOLVERS}
    wanted = DEFAULT if name == "auto" else name
    if wanted not in by_name:
        raise InputError(f"no solver is called {name!r}; there are auto, {', '.join(by_name)}")
    return by_name[wanted]
