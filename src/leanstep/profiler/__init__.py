"""Time every distinct op of a recording on the device at hand."""

from leanstep.profiler.measure import measure as measure
from leanstep.profiler.recipes import with_recipes as with_recipes
