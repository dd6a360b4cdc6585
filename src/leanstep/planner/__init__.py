"""Decide what each block call drops, so that the step fits a budget in the least time."""

from leanstep.planner.curve import frontier as frontier
from leanstep.planner.ladder import ladder as ladder
from leanstep.planner.space import prepare as prepare
from leanstep.planner.whole import plan as plan
from leanstep.planner.whole import plan_in as plan_in
