"""Backward in any order: the chain is then a cautious model, and the promises still hold."""

import random
from dataclasses import replace

import numpy as np
import pytest

from leanstep.errors import BudgetError
from leanstep.ir import Phase, Profile
from leanstep.planner import plan, plan_in, prepare
from leanstep.simulator import simulate
from leanstep.solvers.chain import chain_of
from leanstep.testing import random_profile

SEEDS = range(24)


def disordered(seed: int) -> Profile:
    """A chain whose backward asks for saved tensors, and lets go of them, at random places."""
    profile = random_profile(seed, num_blocks=4)
    draw, graph = random.Random(seed), profile.graph
    first = sum(op.phase is Phase.FORWARD for op in graph.ops)
    unpacks, saves, storages = [], list(graph.saves), list(graph.storages)
    for unpack in graph.unpacks:
        position = draw.randrange(first, len(graph.ops))
        release = draw.randint(position + 1, len(graph.ops))
        save = saves[unpack.save]
        saves[unpack.save] = replace(save, release=release)
        unpacks.append(unpack._replace(position=position))
        storage = storages[save.value.storage]
        if storage.birth >= 0:
            storages[save.value.storage] = replace(storage, death=release - 1)
    unpacks.sort(key=lambda unpack: unpack.position)
    graph = replace(graph, unpacks=tuple(unpacks), saves=tuple(saves), storages=tuple(storages))
    profile = replace(profile, graph=graph)
    return replace(profile, peak_bytes=simulate(profile).peak_bytes)


def test_disorder_makes_the_chain_cautious() -> None:
    chains = [chain_of(prepare(disordered(seed)).problem) for seed in SEEDS]

    assert any(chain.slack_bytes(0) > 0 for chain in chains)


@pytest.mark.parametrize("seed", SEEDS)
def test_level_of_the_solver_is_never_below_the_exact_one(seed: int) -> None:
    space = prepare(disordered(seed))
    draw = random.Random(seed)

    chain = chain_of(space.problem)

    for _ in range(50):
        path = tuple(draw.choice(np.flatnonzero(moves.kinds == 0)) for moves in chain.moves)
        exact = space.problem.peak_bytes(choice for _, choice in chain.picks(path))
        assert exact <= chain.peak_bytes(path) <= exact + chain.slack_bytes(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_fits_and_budgets_are_monotone(seed: int) -> None:
    profile = disordered(seed)
    space = prepare(profile)
    with pytest.raises(BudgetError) as caught:
        plan(profile, 1)
    floor_bytes = caught.value.floor_bytes
    stride_bytes = max(1, (profile.peak_bytes - floor_bytes) // 12)

    plans = []
    for budget_bytes in range(floor_bytes, profile.peak_bytes + 1, stride_bytes):
        plans.append(plan_in(space, budget_bytes))
        assert simulate(profile, plans[-1]).peak_bytes == plans[-1].peak_bytes <= budget_bytes

    seconds = [round(found.extra_seconds, 12) for found in plans]
    peaks = [found.peak_bytes for found in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)
    assert all(found.bound_seconds <= found.extra_seconds for found in plans)
