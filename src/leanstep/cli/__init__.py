"""The command line: each command a thin file over the public verbs."""

from leanstep.cli.app import app as app
from leanstep.cli.app import main as main
