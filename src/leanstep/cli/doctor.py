"""`leanstep doctor`: what there is to work with."""

import leanstep
from leanstep.cli.options import Force, Json, OutputPath
from leanstep.cli.output import Output


def doctor(as_json: Json = False, output: OutputPath = None, force: Force = False) -> None:
    """Show versions, device, solvers, engines, built-in models, settings that waste memory."""
    Output(as_json, output, force).deliver(leanstep.doctor())
