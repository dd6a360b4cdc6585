"""Choose one option for each block call: one file an algorithm, one interface."""

from leanstep.solvers.base import Choice as Choice
from leanstep.solvers.base import Outcome as Outcome
from leanstep.solvers.base import Problem as Problem
from leanstep.solvers.base import Solution as Solution
from leanstep.solvers.base import Solver as Solver
from leanstep.solvers.registry import find_solver as find_solver
