"""Read a file of leanstep's, whatever it holds."""

from pathlib import Path

from leanstep.errors import InputError
from leanstep.ir.checkup import Checkup
from leanstep.ir.codec import Saved, kind_in
from leanstep.ir.explanation import Explanation
from leanstep.ir.frontier import Frontier
from leanstep.ir.ladder import Ladder
from leanstep.ir.plan import Plan
from leanstep.ir.profile import Profile
from leanstep.ir.study import MaxBatch, Sweep
from leanstep.ir.verdict import Verdict

_KINDS: dict[str, type[Saved]] = {
    kind.__name__: kind
    for kind in (Checkup, Explanation, Frontier, Ladder, MaxBatch, Plan, Profile, Sweep, Verdict)
}


def load(path: str | Path) -> Saved:
    """Return the profile, plan, verdict, sweep or other result that a file holds.

    Raises:
        InputError: the file is not one that leanstep wrote, or is damaged.
    """
    name = kind_in(Path(path))
    if name not in _KINDS:
        raise InputError(f"{path} holds a {name}, which this leanstep does not know")
    return _KINDS[name].load(path)
