"""Bytes, seconds and shares, from text and to text; the only place that reads or formats them.

Inside leanstep a size is an ``int`` of bytes and a time is a ``float`` of seconds. Text is read
exactly, by fractions: ``"0.1GiB"`` is not a rounded binary number first. A budget is a ceiling, so
what it does not fill to a whole byte is dropped; a figure that a user is told to set is rounded up
(the functions that end in ``_up``), so that typing it back in is always enough.
"""

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import assert_never

from leanstep.errors import UnitError

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL_UNITS = ("B", "KB", "MB", "GB", "TB")
_BYTES_PER_UNIT = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)},
    "byte": 1,
    "bytes": 1,
}
_MIB = 1024**2
_UNIT_LIST = "B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024) or %"

# Lengths are bounded so that a typing error cannot ask for a number of a million digits.
_AMOUNT = re.compile(
    r"(?P<number>[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e[+-]?\d{1,2})?)\s*(?P<unit>[a-z%]*)",
    re.IGNORECASE | re.ASCII,
)
_MOST_BYTES = 2**63 - 1

# What "auto" leaves free: the allocator rounds blocks up and strands some between others.
_AUTO_MARGIN_SHARE = Fraction(1, 32)
_AUTO_MARGIN_LEAST_BYTES = 128 * _MIB


class _Kind(enum.Enum):
    BYTES = "a size"
    SHARE = "a share of the unplanned peak"
    AUTO = "the free memory of the device"


@dataclass(frozen=True, slots=True)
class _Budget:
    """A budget as it was written; ``amount`` is in bytes for a size and 0.6 for 60%."""

    kind: _Kind
    amount: Fraction


def parse_budget(
    text: str | int | float,
    *,
    unplanned_peak_bytes: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """Return a budget in bytes.

    Args:
        text: ``"16GiB"``, ``"16 GB"``, ``"60%"`` of the unplanned peak, ``"auto"`` for the free
            memory of the device less a margin, or a whole number of bytes.
        unplanned_peak_bytes: the peak that a percentage refers to.
        free_bytes: the free memory of the device, which ``"auto"`` refers to.

    Raises:
        UnitError: the text is no budget, or refers to something that is not known.
    """
    budget = _read(text)
    match budget.kind:
        case _Kind.BYTES:
            num_bytes = int(budget.amount)
        case _Kind.SHARE:
            if unplanned_peak_bytes is None:
                raise UnitError(
                    f"budget {text!r} is a share of the unplanned peak, which is not known here; "
                    'write a size, as in "16GiB"'
                )
            num_bytes = int(budget.amount * unplanned_peak_bytes)
        case _Kind.AUTO:
            num_bytes = _free_less_margin(free_bytes)
        case _:
            assert_never(budget.kind)
    if num_bytes < 1:
        raise UnitError(f'budget {text!r} is less than one byte; write a size, as in "16GiB"')
    return num_bytes


def check_budget(text: str | int | float) -> None:
    """Raise UnitError unless the text is a budget, before a peak or a device is known."""
    _read(text)


def parse_share(text: str | float, what: str) -> float:
    """Return a share of one: ``"20%"``, ``"0.2"`` and ``0.2`` are all 0.2.

    Raises:
        UnitError: the text is no share, or is below zero.
    """
    found = _AMOUNT.fullmatch(str(text).strip())
    if found is None or found["unit"] not in ("", "%"):
        raise UnitError(f'{what} {text!r} is not a share; write it as in "20%" or 0.2')
    share = Fraction(found["number"]) / (100 if found["unit"] else 1)
    if share < 0:
        raise UnitError(f'{what} {text!r} is below zero; write it as in "20%" or 0.2')
    return float(share)


def _read(text: object) -> _Budget:
    if isinstance(text, str):
        return _read_text(text)
    if isinstance(text, bool) or not isinstance(text, (Integral, float)):
        raise UnitError(
            f"a budget is text or a whole number of bytes, not {type(text).__name__}; "
            'write it as in "16GiB" or "60%"'
        )
    if isinstance(text, float) and not text.is_integer():
        raise UnitError(
            f"budget {text!r} is not a whole number of bytes; "
            'write a unit, as in "1.5GiB", or a share, as in "60%"'
        )
    return _Budget(_Kind.BYTES, _checked(Fraction(int(text)), text))


def _read_text(text: str) -> _Budget:
    stripped = text.strip()
    if stripped.lower() == "auto":
        return _Budget(_Kind.AUTO, Fraction(0))
    found = _AMOUNT.fullmatch(stripped)
    if found is None:
        raise UnitError(
            f"budget {text!r} is not a number with a unit ({_UNIT_LIST}); "
            'write it as in "16GiB", "60%" or "auto"'
        )
    unit = found["unit"].lower()
    amount = Fraction(found["number"])
    if unit == "%":
        return _Budget(_Kind.SHARE, _checked(amount / 100, text))
    if unit not in _BYTES_PER_UNIT:
        fault = f"has the unknown unit {found['unit']!r}" if unit else "has no unit"
        raise UnitError(f'budget {text!r} {fault}; write {_UNIT_LIST}, as in "16GiB"')
    return _Budget(_Kind.BYTES, _checked(amount * _BYTES_PER_UNIT[unit], text))


def _checked(amount: Fraction, text: object) -> Fraction:
    if amount <= 0:
        raise UnitError(f'budget {text!r} is not more than zero; write a size, as in "16GiB"')
    if amount > _MOST_BYTES:
        raise UnitError(f'budget {text!r} is more than any device has; write it as in "16GiB"')
    return amount


def _free_less_margin(free_bytes: int | None) -> int:
    if free_bytes is None:
        raise UnitError(
            'budget "auto" needs a GPU, whose free memory can be asked for; '
            'write a size, as in "16GiB", or a share, as in "60%"'
        )
    margin_bytes = max(_AUTO_MARGIN_LEAST_BYTES, math.ceil(free_bytes * _AUTO_MARGIN_SHARE))
    if free_bytes <= margin_bytes:
        raise UnitError(
            f'budget "auto" keeps {format_bytes(margin_bytes)} free, and the device has only '
            f"{format_bytes(free_bytes)}; end what else runs there, or write a size"
        )
    return free_bytes - margin_bytes


def format_bytes(num_bytes: int) -> str:
    """Return a size in the unit that suits it, to the nearest digit: ``3.21 GiB``, ``512 B``."""
    sign = "-" if num_bytes < 0 else ""
    return sign + _in_binary_unit(abs(num_bytes), _hundredths_nearest)


def format_bytes_up(num_bytes: int) -> str:
    """Return a size in the unit that suits it, never less than it is."""
    return _in_binary_unit(num_bytes, _hundredths_up)


def format_bytes_apart(first_bytes: int, second_bytes: int) -> tuple[str, str]:
    """Return two sizes that a reader can tell apart; with exact bytes where rounding hides it."""
    first, second = format_bytes(first_bytes), format_bytes(second_bytes)
    if first == second and first_bytes != second_bytes:
        return f"{first} ({first_bytes} bytes)", f"{second} ({second_bytes} bytes)"
    return first, second


def format_budget_up(num_bytes: int) -> str:
    """Return a budget for a user to set: rounded up, and the exact bytes in brackets."""
    return f"{format_bytes_up(num_bytes)} (or {num_bytes} bytes)"


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it: ``1.30 ms``, ``2.5 s``, ``3 min 20 s``."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if not math.isfinite(seconds):
        return f"{seconds} s"
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        # 999.5 would print as 1000: it belongs to the next unit.
        if seconds * scale < 999.5:
            return f"{_three_digits(seconds * scale)} {unit}" if seconds else "0 s"
    if seconds < 59.995:
        whole, decimals = f"{seconds:.2f}".split(".")
        return f"{whole}.{_trim(decimals)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_percent(share: float) -> str:
    """Return a share of one as a percentage: 0.346 is ``34.6%``."""
    return f"{share * 100:.1f}%"


def format_change(share: float) -> str:
    """Return a change as a signed percentage: -0.346 is ``-34.6%``."""
    return f"{share * 100:+.1f}%"


def format_rate(per_second: float) -> str:
    """Return how many a second: ``1070``, ``38.2``, ``0.51``."""
    return _three_digits(per_second)


def _in_binary_unit(num_bytes: int, hundredths: Callable[[int, int], int]) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = 1
    # Judged after rounding: 1023.999 KiB is 1.0 MiB, not 1024.0 KiB.
    while hundredths(num_bytes, 1024**power) >= 1024 * 100 and _BINARY_UNITS[power] != "TiB":
        power += 1
    whole, rest = divmod(hundredths(num_bytes, 1024**power), 100)
    return f"{whole}.{_trim(f'{rest:02d}')} {_BINARY_UNITS[power]}"


def _hundredths_nearest(num_bytes: int, unit_bytes: int) -> int:
    return (num_bytes * 100 + unit_bytes // 2) // unit_bytes


def _hundredths_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes * 100 // unit_bytes)


def _trim(decimals: str) -> str:
    """Drop the zeros at the end of some decimals, all but the first of them."""
    return decimals.rstrip("0") or "0"


def _three_digits(number: float) -> str:
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
