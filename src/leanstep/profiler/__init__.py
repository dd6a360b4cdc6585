"""Time every distinct op of a recording on the device at hand."""

from leanstep.profiler.measure import measure as measure
