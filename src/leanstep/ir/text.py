"""Plain text for people: tables of fixed columns, and names in a row."""

from collections.abc import Sequence
from itertools import groupby


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines with the cells of each column under one another; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def names_in_a_row(names: Sequence[str], order: Sequence[str], most: int = 3) -> str:
    """Some names of an ordered list, each stretch by its ends: `a.0 … a.3, a.7 (5 calls)`."""
    places = [order.index(name) for name in names]
    stretches = []
    for _, found in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        stretch = [order[place] for _, place in found]
        joint = " … " if len(stretch) > 2 else ", "
        stretches.append(stretch[0] if len(stretch) == 1 else f"{stretch[0]}{joint}{stretch[-1]}")
    if len(stretches) > most:
        stretches[most - 1 : -1] = ["…"]
    text = ", ".join(stretches)
    return f"{text} ({len(names)} calls)" if len(names) > 2 else text


def some_names(names: Sequence[str], most: int = 3) -> str:
    """The first few names of a list: `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
