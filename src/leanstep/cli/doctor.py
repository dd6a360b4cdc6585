"""`leanstep doctor`: what there is to work with."""

import leanstep
from leanstep.cli.options import Force, Json, OutputPath
from leanstep.cli.output import Output


def doctor(as_json: Json = False, output: OutputPath = None, force: Force = False) -> None:
    """Show versions, device, solvers and engines, and settings that waste memory."""
    Output(as_json, output, force).deliver(leanstep.doctor())
