"""Run a training step for a device that is not there: no memory, and ops in its form."""

from leanstep.imagine.meter import ImaginedMeter as ImaginedMeter
from leanstep.imagine.meter import with_rises as with_rises
from leanstep.imagine.ranks import check_ranks as check_ranks
from leanstep.imagine.steps import Factory as Factory
from leanstep.imagine.steps import Ingredients as Ingredients
from leanstep.imagine.steps import imagined_step as imagined_step
