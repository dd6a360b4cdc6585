"""Studies of batch sizes: many trials of one model, each alone."""

from leanstep.study.batches import max_batch as max_batch
from leanstep.study.batches import sweep as sweep
