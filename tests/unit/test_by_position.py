"""The short form of a timeline says what the timeline says: there is one account of memory."""

import numpy as np
import pytest

import leanstep
from leanstep.simulator import by_position, plan_effects, timeline
from leanstep.testing.chains import random_profile


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
def test_levels_and_seconds_at_each_position_are_those_of_the_timeline(seed):
    profile = random_profile(seed)
    lowest = leanstep.plan(profile, floor_of(profile), offload=False)
    effects = plan_effects(profile, lowest)

    tops, seconds = by_position(profile, effects)

    points = timeline(profile, effects).points
    assert any(point.replayed for point in points), "something runs again"
    for position in range(len(tops)):
        here = [point for point in points if point.position == position]
        assert tops[position] == max((point.peak_bytes for point in here), default=0)
        assert np.isclose(seconds[position], sum(point.seconds for point in here))


def floor_of(profile):
    with pytest.raises(leanstep.BudgetError) as caught:
        leanstep.plan(profile, 1, offload=False)
    return caught.value.floor_bytes
