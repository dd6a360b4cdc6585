import pytest

from leanstep.units import format_bytes, format_bytes_up, parse_budget

hypothesis = pytest.importorskip("hypothesis")

sizes = hypothesis.strategies.integers(min_value=1, max_value=2**50)


@hypothesis.given(sizes)
def test_size_rounded_up_is_enough_when_typed_back_in(num_bytes: int) -> None:
    assert parse_budget(format_bytes_up(num_bytes)) >= num_bytes


@hypothesis.given(sizes)
def test_written_size_is_within_one_percent(num_bytes: int) -> None:
    for write in (format_bytes, format_bytes_up):
        assert abs(parse_budget(write(num_bytes)) - num_bytes) <= 0.01 * num_bytes + 1


@hypothesis.given(hypothesis.strategies.text(max_size=20))
def test_any_text_is_a_budget_or_a_refusal(text: str) -> None:
    try:
        num_bytes = parse_budget(text, unplanned_peak_bytes=1000, free_bytes=2**34)
    except ValueError as error:
        assert str(error)
    else:
        assert num_bytes >= 1
