"""What textbooks say of `checkpoint_sequential`: memory falls to its square root, for one forward.

Chen et al. (2016): of n equal layers cut into k = √n segments, the k inputs of the segments stay
and one segment at a time is whole, so that 2√n of n parts are there at once; every segment but the
last runs forward twice. It is drawn beside what is planned, never planned with: layers are not
equal, a block saves more than its input, and the ends of a model belong to no layer.
"""

import math

from leanstep.ir import Phase, Profile, Reading
from leanstep.simulator import static_bytes


def textbook(profile: Profile) -> Reading | None:
    """Peak and time of the profiled step in √n segments of its n blocks; None with too few."""
    num_blocks = len(profile.blocks)
    # Of four, two times the root is all of them.
    if num_blocks <= 4:
        return None
    fixed = static_bytes(profile)
    moving = max(0, profile.peak_bytes - fixed)
    again = 1 - 1 / math.sqrt(num_blocks)
    return Reading(
        peak_bytes=fixed + int(moving * 2 / math.sqrt(num_blocks)),
        seconds=profile.step_seconds * (1 + again * _forward_share(profile)),
        measured=False,
    )


def _forward_share(profile: Profile) -> float:
    ops = profile.graph.ops
    forward = sum(profile.seconds(i) for i, op in enumerate(ops) if op.phase is Phase.FORWARD)
    whole = sum(profile.seconds(i) for i in range(len(ops)))
    return forward / whole if whole else 0.0
