"""A function in a process of its own: whatever becomes of it, its memory is given back."""

import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def alone(
    function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result | None:
    """Run a function in a fresh process; None if that was killed. What it raises, this raises."""
    # Not forked: a GPU that the parent has used cannot be used in a fork.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            return None


def can_travel(function: object) -> bool:
    """Whether another process can be told to run a function.

    One of the main program cannot: the other process has another one.
    """
    if getattr(function, "__module__", "") == "__main__":
        return False
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
