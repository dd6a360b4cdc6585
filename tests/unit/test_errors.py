import copy
import pickle

import pytest

from leanstep import errors
from leanstep.errors import BudgetError, InputError, LeanstepError, UnitError
from leanstep.units import parse_budget

GIB = 1024**3
CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]


@pytest.fixture
def refusal() -> BudgetError:
    return BudgetError(
        6 * GIB, 7_745_000_000, op="aten.addmm", module="layers.3.mlp", source="model.py:88"
    )


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_error_is_in_the_tree_that_the_docstring_draws(error: type[LeanstepError]) -> None:
    drawn = [line for line in errors.__doc__.splitlines() if f" {error.__name__} " in line]

    assert issubclass(error, LeanstepError)
    assert error.__doc__
    assert [line.split(error.__name__)[1].split()[0] for line in drawn] == [str(error.exit_code)]


def test_bad_input_is_a_value_error_too() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(UnitError, InputError)


def test_refusal_says_what_where_and_what_to_do(refusal: BudgetError) -> None:
    assert str(refusal) == (
        "no plan fits 6.0 GiB: the least reachable peak is 7.21 GiB, at aten.addmm in layers.3.mlp "
        "(model.py:88). Raise the budget to 7.22 GiB (or 7745000000 bytes), or make the batch "
        "smaller."
    )


def test_refusal_of_a_tiny_budget_counts_in_mib() -> None:
    assert str(BudgetError(2 * 1024**2, 4_404_500)) == (
        "no plan fits 2.0 MiB: the least reachable peak is 4.2 MiB. "
        "Raise the budget to 4.21 MiB (or 4404500 bytes), or make the batch smaller."
    )


def test_floor_that_was_found_by_trying_is_not_called_the_least() -> None:
    error = BudgetError(GIB, 2 * GIB, with_host=True)

    assert "the least peak found with host memory is 2.0 GiB" in str(error)
    assert pickle.loads(pickle.dumps(error)).with_host


def test_refusal_of_a_near_miss_shows_the_bytes_that_differ() -> None:
    text = str(BudgetError(7 * GIB - 1, 7 * GIB))

    assert "no plan fits 7.0 GiB (7516192767 bytes)" in text
    assert "peak is 7.0 GiB (7516192768 bytes)" in text


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({}, "GiB. Raise"),
        ({"op": "aten.mm"}, "GiB, at aten.mm. Raise"),
        ({"module": "head"}, "GiB, in head. Raise"),
        ({"source": "a.py:1"}, "GiB, at a.py:1. Raise"),
        ({"module": "head", "source": "a.py:1"}, "GiB, in head (a.py:1). Raise"),
    ],
)
def test_refusal_names_only_the_place_it_knows(place: dict[str, str], text: str) -> None:
    assert text in str(BudgetError(GIB, 2 * GIB, **place))


def test_budget_that_the_refusal_names_is_enough(refusal: BudgetError) -> None:
    named = str(refusal).split("Raise the budget to ")[1].split(" (")[0]

    assert parse_budget(named) >= refusal.floor_bytes


@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_refusal_survives_a_copy_and_a_pickle(refusal: BudgetError, duplicate) -> None:
    refusal.add_note("on rank 3")

    twin = duplicate(refusal)

    assert str(twin) == str(refusal)
    assert vars(twin) == vars(refusal)
    assert twin.floor_bytes == 7_745_000_000
