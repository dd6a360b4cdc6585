"""The largest number that fits, in few trials: bisection, led by a line through what is known.

Memory grows with the batch along a line, nearly: two trials tell where it crosses the budget, and
two more that it does so there. Where the line misleads, plain bisection takes over.
"""

from collections.abc import Callable
from itertools import pairwise

# Trials that the line may lead; what it has not found by then is found by halving.
_LED_TRIALS = 8


def largest(
    probe: Callable[[int], tuple[bool, float]], *, start: int = 8, most: int = 1 << 16
) -> int:
    """The largest number from 1 to `most` that fits; 0 if none does.

    `probe` says of a number whether it fits, and its load: above 1 where it does not (0: not
    known).
    """
    fits, too_many = 0, most + 1
    loads: dict[int, float] = {}
    guess, stride, led_trials = min(start, most), 1, 0
    while too_many - fits > 1:
        is_fitting, load = probe(guess)
        if is_fitting:
            fits = guess
        else:
            too_many = guess
        if load:
            loads[guess] = load
        guess = _middle(fits, too_many, most)
        led = _on_line(loads) if led_trials < _LED_TRIALS else None
        if led is not None and led <= fits:
            # The line has been right, or a little low: few steps above are left to try.
            led, stride = min(fits + stride, guess), 2 * stride
        if led is not None and fits < led < too_many:
            guess, led_trials = led, led_trials + 1
    return fits


def _middle(fits: int, too_many: int, most: int) -> int:
    """Half way; twice as far while nothing was too much."""
    return min(2 * fits, most) if too_many > most and fits else (fits + too_many) // 2


def _on_line(loads: dict[int, float]) -> int | None:
    """Where the line through the two known points next to a load of 1 crosses it."""
    points = sorted(loads.items())
    if len(points) < 2:
        return None
    (first, low), (second, high) = min(
        pairwise(points), key=lambda pair: min(abs(1 - load) for _, load in pair)
    )
    if high <= low:
        return None
    return max(1, int(first + (1 - low) * (second - first) / (high - low)))
