"""The public face of leanstep is this list; a change here is a change for users."""

import subprocess
import sys
import types

import pytest

import leanstep

PUBLIC = [
    "BudgetError",
    "Fit",
    "LeanstepError",
    "MaxBatch",
    "Plan",
    "Profile",
    "Sweep",
    "Timeline",
    "Verdict",
    "__version__",
    "apply",
    "cross_entropy",
    "doctor",
    "fit",
    "from_config",
    "frontier",
    "keep",
    "lean",
    "load",
    "max_batch",
    "models",
    "plan",
    "profile",
    "recompute",
    "reduce_gradients",
    "report",
    "segments",
    "simulate",
    "sweep",
    "verify",
]


def test_public_names_are_those_of_the_list() -> None:
    assert list(leanstep.__all__) == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(leanstep, name)

    assert name in dir(leanstep)
    assert value.__doc__


def test_nothing_else_looks_public() -> None:
    others = {
        name
        for name, value in vars(leanstep).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert others <= set(PUBLIC)


def test_models_are_there_before_anything_else_is_used() -> None:
    # In a process of its own: here others have imported them.
    code = "import leanstep; leanstep.models.build('gpt2-tiny')"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = leanstep.no_such_name
