"""Small synthetic profiles, and a check for authors of solvers; needs no torch."""

from leanstep.testing.chains import Layer as Layer
from leanstep.testing.chains import chain_profile as chain_profile
from leanstep.testing.chains import random_profile as random_profile
from leanstep.testing.checks import check_solver as check_solver
from leanstep.testing.dags import dag_profile as dag_profile
