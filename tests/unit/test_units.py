import numpy
import pytest

from leanstep.errors import UnitError
from leanstep.units import (
    check_budget,
    format_budget_up,
    format_bytes,
    format_bytes_apart,
    format_bytes_up,
    format_change,
    format_percent,
    format_seconds,
    parse_budget,
    parse_share,
)

KIB, MIB, GIB, TIB = (1024**power for power in range(1, 5))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GiB", 16 * GIB),
        ("16 GB", 16 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5e9 B", 1_500_000_000),
        ("2 KB", 2000),
        ("3kib", 3 * KIB),
        ("7mb", 7_000_000),
        (" 1 tib ", TIB),
        ("1 TB", 10**12),
        (".5GiB", GIB // 2),
        ("1.GiB", GIB),
        ("+1GiB", GIB),
        ("7741636608 bytes", 7_741_636_608),
        ("1 byte", 1),
        (1, 1),
        (17_179_869_184, 16 * GIB),
        (numpy.int64(512), 512),
        (16e9, 16_000_000_000),
    ],
)
def test_size_is_read_in_bytes(text: str | int | float, num_bytes: int) -> None:
    assert parse_budget(text) == num_bytes
    assert type(parse_budget(text)) is int
    check_budget(text)


def test_size_is_read_exactly_and_rounded_down() -> None:
    assert parse_budget("0.1GiB") == GIB // 10
    assert parse_budget("9007199254740993 B") == 2**53 + 1


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("60%", 600), ("60 %", 600), ("12.55%", 125), ("100%", 1000), ("150%", 1500)],
)
def test_percentage_is_a_share_of_the_unplanned_peak(text: str, num_bytes: int) -> None:
    assert parse_budget(text, unplanned_peak_bytes=1000) == num_bytes


def test_percentage_can_be_checked_before_the_peak_is_known() -> None:
    check_budget("60%")

    with pytest.raises(UnitError, match="share of the unplanned peak, which is not known here"):
        parse_budget("60%")


@pytest.mark.parametrize("text", ["auto", "AUTO", " auto "])
def test_auto_leaves_a_margin_of_the_free_memory(text: str) -> None:
    check_budget(text)

    assert parse_budget(text, free_bytes=64 * GIB) == 62 * GIB
    assert parse_budget(text, free_bytes=GIB) == GIB - 128 * MIB


def test_auto_without_a_gpu_says_so() -> None:
    with pytest.raises(UnitError, match='"auto" needs a GPU'):
        parse_budget("auto")


def test_auto_on_a_full_device_says_so() -> None:
    with pytest.raises(UnitError, match=r"keeps 128\.0 MiB free, and the device has only 100\.0 M"):
        parse_budget("auto", free_bytes=100 * MIB)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("16 bananas", "unknown unit 'bananas'"),
        ("16G", "unknown unit 'G'"),
        ("16", "has no unit"),
        ("", "not a number with a unit"),
        ("GiB", "not a number with a unit"),
        ("1/2 GiB", "not a number with a unit"),
        ("1,5 GiB", "not a number with a unit"),
        ("1e999999999 GiB", "not a number with a unit"),
        ("9" * 5000 + " GiB", "not a number with a unit"),
        ("nan", "not a number with a unit"),
        ("nan GiB", "not a number with a unit"),
        ("inf GiB", "not a number with a unit"),
        ("-1GiB", "not more than zero"),
        ("0 GiB", "not more than zero"),
        ("0%", "not more than zero"),
        ("-5%", "not more than zero"),
        ("1e30 TiB", "more than any device has"),
        (0, "not more than zero"),
        (-1, "not more than zero"),
        (2**64, "more than any device has"),
        (0.0, "not more than zero"),
        (1.5, 'write a unit, as in "1.5GiB"'),
        (0.6, 'or a share, as in "60%"'),
        (float("nan"), "not a whole number"),
        (float("inf"), "not a whole number"),
        (float("-inf"), "not a whole number"),
        (True, "not bool"),
        (None, "not NoneType"),
        (b"16GiB", "not bytes"),
    ],
)
def test_what_is_no_budget_is_refused_in_one_sentence(text: object, complaint: str) -> None:
    with pytest.raises(UnitError) as checked:
        check_budget(text)
    with pytest.raises(UnitError) as parsed:
        parse_budget(text, unplanned_peak_bytes=1000, free_bytes=GIB)

    assert complaint in str(checked.value)
    assert str(parsed.value) == str(checked.value)
    assert '"16GiB"' in str(checked.value) or '"1.5GiB"' in str(checked.value)
    assert "\n" not in str(checked.value)


def test_unknown_unit_is_answered_with_every_known_one() -> None:
    with pytest.raises(UnitError) as error:
        check_budget("16 bananas")

    for unit in ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "%"):
        assert f" {unit}" in str(error.value)


@pytest.mark.parametrize(("text", "peak"), [("0.5 B", None), ("0.01%", 1000)])
def test_budget_of_less_than_a_byte_is_refused(text: str, peak: int | None) -> None:
    with pytest.raises(UnitError, match="less than one byte"):
        parse_budget(text, unplanned_peak_bytes=peak)


@pytest.mark.parametrize(
    ("num_bytes", "nearest", "up"),
    [
        (0, "0 B", "0 B"),
        (512, "512 B", "512 B"),
        (1023, "1023 B", "1023 B"),
        (1024, "1.0 KiB", "1.0 KiB"),
        (3 * MIB // 2, "1.5 MiB", "1.5 MiB"),
        (3 * MIB // 2 + 1, "1.5 MiB", "1.51 MiB"),
        (MIB - 1, "1.0 MiB", "1.0 MiB"),
        (int(3.21 * GIB), "3.21 GiB", "3.21 GiB"),
        (5000 * TIB, "5000.0 TiB", "5000.0 TiB"),
    ],
)
def test_size_is_written_in_the_unit_that_suits_it(num_bytes: int, nearest: str, up: str) -> None:
    assert format_bytes(num_bytes) == nearest
    assert format_bytes_up(num_bytes) == up


def test_difference_of_sizes_keeps_its_sign() -> None:
    assert format_bytes(-3 * MIB // 2) == "-1.5 MiB"


def test_sizes_that_round_alike_are_told_apart() -> None:
    assert format_bytes_apart(GIB, 2 * GIB) == ("1.0 GiB", "2.0 GiB")
    assert format_bytes_apart(GIB, GIB) == ("1.0 GiB", "1.0 GiB")
    assert format_bytes_apart(GIB, GIB + 1) == (
        "1.0 GiB (1073741824 bytes)",
        "1.0 GiB (1073741825 bytes)",
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (7_745_000_000, "7.22 GiB (or 7745000000 bytes)"),
        (4_404_500, "4.21 MiB (or 4404500 bytes)"),
        (1000, "1000 B (or 1000 bytes)"),
    ],
)
def test_budget_to_set_is_rounded_up_and_names_the_bytes(num_bytes: int, text: str) -> None:
    assert format_budget_up(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.5e-8, "25.0 ns"),
        (1.234e-4, "123 us"),
        (9.9996e-6, "10.0 us"),
        (0.0013, "1.30 ms"),
        (0.09996, "100 ms"),
        (0.9999, "1.0 s"),
        (2.5, "2.5 s"),
        (12.344, "12.34 s"),
        (59.999, "1 min 0 s"),
        (200.0, "3 min 20 s"),
        (-0.0013, "-1.30 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_time_is_written_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_shares_and_changes() -> None:
    assert format_percent(0.3456) == "34.6%"
    assert format_change(0.33) == "+33.0%"
    assert format_change(-0.3456) == "-34.6%"


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), (" 0.2 ", 0.2), (0.2, 0.2), ("0", 0.0)])
def test_share_is_read_with_or_without_a_percent_sign(text: str | float, share: float) -> None:
    assert parse_share(text, "max_slowdown") == share


@pytest.mark.parametrize("text", ["fast", "20GiB", "-5%", "", "nan"])
def test_what_is_no_share_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(UnitError, match="max_slowdown"):
        parse_share(text, "max_slowdown")
