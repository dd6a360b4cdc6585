"""Record the whole training step as a graph, while it runs."""

from leanstep.recorder.attic import Attic as Attic
from leanstep.recorder.room import first_run_fits as first_run_fits
from leanstep.recorder.room import in_host_memory as in_host_memory
from leanstep.recorder.run import record as record
