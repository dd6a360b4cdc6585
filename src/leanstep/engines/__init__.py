"""Run a model under a plan: the same forward, with autograd holding less."""

from leanstep.engines.apply import Applied as Applied
from leanstep.engines.apply import apply as apply
from leanstep.engines.rehearsal import rehearse as rehearse
