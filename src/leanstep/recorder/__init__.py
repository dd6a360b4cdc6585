"""Record the whole training step as a graph, while it runs."""

from leanstep.recorder.step import record as record
