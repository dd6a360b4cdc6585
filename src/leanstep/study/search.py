"""The largest number that fits, in few trials: bisection, led by a line through what is known.

Memory grows with the batch along a line, nearly: two trials tell where it crosses the budget, and
two more that it does so there. Where the line misleads, plain bisection takes over.
"""

from collections.abc import Callable
from itertools import pairwise

# Trials that the line may lead; what it has not found by then is found by halving.
_LED_TRIALS = 7


def largest(
    probe: Callable[[int], tuple[bool, int]], limit: int, *, start: int = 8, most: int = 1 << 16
) -> int:
    """The largest number from 1 to `most` that fits; 0 if none does.

    `probe` says of a number whether it fits, and how much it needs of `limit` (0: not known).
    """
    fits, too_many = 0, most + 1
    needs: dict[int, int] = {}
    guess = min(start, most)
    for trial in range(2 * most.bit_length() + _LED_TRIALS):
        is_fitting, need = probe(guess)
        if is_fitting:
            fits = guess
        else:
            too_many = guess
        if need:
            needs[guess] = need
        if too_many - fits <= 1:
            break
        led = _on_line(needs, limit) if trial < _LED_TRIALS else None
        # The number found last is the line's own answer: whether the next fits is the question.
        led = fits + 1 if led == fits else led
        guess = led if led and fits < led < too_many else _middle(fits, too_many, most)
    return fits


def _middle(fits: int, too_many: int, most: int) -> int:
    """Half way; twice as far while nothing was too much."""
    return min(2 * fits, most) if too_many > most and fits else (fits + too_many) // 2


def _on_line(needs: dict[int, int], limit: int) -> int | None:
    """Where the line through the two known points next to the limit crosses it."""
    points = sorted(needs.items())
    if len(points) < 2:
        return None
    (first, low), (second, high) = min(
        pairwise(points), key=lambda pair: min(abs(limit - need) for _, need in pair)
    )
    if high <= low:
        return None
    return max(1, first + (limit - low) * (second - first) // (high - low))
