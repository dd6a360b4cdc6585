"""What every test starts from: one thread, fixed seeds, a cache of its own."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

try:
    import torch
except ModuleNotFoundError:  # tests/unit and tests/rules run without it
    torch = None

try:
    from hypothesis import settings
except ModuleNotFoundError:  # the reference GPU machine has none; such tests skip themselves
    pass
else:
    # The same examples on every run: a failure in CI is a failure here.
    settings.register_profile("leanstep", derandomize=True, deadline=None)
    settings.load_profile("leanstep")

if torch is not None:
    torch.set_num_threads(1)

SEED = 20


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep leanstep's disk cache out of the developer's home, and cold at the start of a run."""
    path = tmp_path_factory.mktemp("leanstep-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANSTEP_CACHE_DIR", str(path))
        yield path


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    if torch is not None:
        torch.manual_seed(SEED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch is not None and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
