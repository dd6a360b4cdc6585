"""The solvers by name: those listed here, and those of installed packages.

A package adds one through the entry-point group `leanstep.solvers`: a name, and what to load for
it, a solver or a function without arguments that makes one. It is loaded when it is asked for.
"""

from importlib.metadata import EntryPoint, entry_points

from leanstep.errors import InputError, unknown_name
from leanstep.solvers.base import Solver
from leanstep.solvers.chain_dp import ChainDP
from leanstep.solvers.chen_sqrt import ChenSqrt
from leanstep.solvers.exhaustive import Exhaustive
from leanstep.solvers.keep_all import KeepAll
from leanstep.solvers.milp import Milp
from leanstep.solvers.mu_two import MuTwo
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.uniform import Uniform

DEFAULT = "optimal"

# Those that a comparison asks: fast at any size.
CURVED = ("optimal", "chain_dp", "mu_two", "chen_sqrt", "uniform")

GROUP = "leanstep.solvers"

SOLVERS: tuple[Solver, ...] = (
    Optimal(),
    ChainDP(),
    MuTwo(),
    MuTwo(corrected=False, name="mu_two_paper"),
    ChenSqrt(),
    Uniform(),
    KeepAll(),
    Milp(),
    Exhaustive(),
)


def find_solver(solver: str | Solver) -> Solver:
    """Return the solver with a name, "auto" being the default one; one given is returned."""
    if not isinstance(solver, str):
        return _checked(solver, "the solver given")
    by_name = {one.name: one for one in SOLVERS}
    wanted = DEFAULT if solver == "auto" else solver
    if wanted in by_name:
        return by_name[wanted]
    plug_ins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if wanted in plug_ins:
        return _loaded(plug_ins[wanted])
    names = ["auto", *by_name, *sorted(plug_ins)]
    raise unknown_name("solver", solver, names)


def solver_names() -> tuple[str, ...]:
    """The names of all solvers, those of installed packages last."""
    plug_ins = sorted(entry.name for entry in entry_points(group=GROUP))
    return (*(solver.name for solver in SOLVERS), *plug_ins)


def _loaded(entry: EntryPoint) -> Solver:
    owner = entry.dist.name if entry.dist is not None else entry.value
    name = f"the solver {entry.name!r} of {owner}"
    try:
        loaded = entry.load()
        made = loaded() if callable(loaded) else loaded
    except Exception as error:
        # Whatever a plug-in raises, the user has to know whose it is.
        raise InputError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(made, name)


def _checked(solver: object, name: str) -> Solver:
    missing = [part for part in ("name", "solve", "lowest") if not hasattr(solver, part)]
    if missing or isinstance(solver, type):
        what = "is a class, not an object" if isinstance(solver, type) else f"has no {missing[0]!r}"
        raise InputError(f"{name} {what}: see docs/solvers.md for what a solver is")
    return solver  # type: ignore[return-value]  # it has all that the protocol asks for
