"""Studies as values: what they print, that they come back from a file, and how few trials."""

from pathlib import Path

import pytest

from leanstep.errors import InputError
from leanstep.ir import Checkup, Finding, MaxBatch, Reading, Sweep, Trial, load

GIB = 1 << 30
MEASURED = Reading(8 * GIB, 0.1, measured=True)
OVER = Reading(20 * GIB, 0.2, measured=False)
PLANNED = Reading(12 * GIB, 0.25, measured=True)
TRIALS = (
    Trial(8, MEASURED, MEASURED, equal=True),
    Trial(16, OVER, PLANNED, equal=True),
    Trial(32, OVER, None, floor_bytes=14 * GIB),
    Trial(64, None, None, failure="its process was killed: out of memory?"),
)
SWEEP = Sweep("bert", "NVIDIA H200", 12 * GIB, "optimal", TRIALS, notes=("a note",))


def test_a_row_says_what_was_measured_what_predicted_and_what_does_not_fit() -> None:
    rows = {line.split()[0]: line.split() for line in str(SWEEP).splitlines() if line}

    assert rows["8"] == ["8", *("8.0", "GiB", "100", "ms", "80.0") * 2, "+0.0%"]
    assert rows["16"][1:4] == ["~20.0", "GiB", "over"]
    assert rows["16"][-1] == "+25.0%"
    assert " ".join(rows["32"]).endswith("none below 14.0 GiB – – –")
    assert "failed" in rows["64"]
    said = str(SWEEP)
    assert "~ predicted, not measured" in said
    assert "batch 64: its process was killed" in said
    assert said.endswith("a note")


def test_numbers_within_the_spread_are_not_called_equal() -> None:
    trials = (Trial(8, MEASURED, MEASURED, equal=False),)

    said = str(Sweep("bert", "NVIDIA H200", 12 * GIB, "optimal", trials))

    assert "bit for bit" not in said and "spread" in said


def test_what_was_promised_is_compared_with_what_was_measured() -> None:
    trials = (
        Trial(8, MEASURED, MEASURED, promised=Reading(8 * GIB, 0.09, measured=False)),
        Trial(16, OVER, PLANNED, promised=Reading(15 * GIB, 0.25, measured=False)),
    )

    said = str(Sweep("bert", "NVIDIA H200", 12 * GIB, "optimal", trials))

    assert "predicted against measured: peak +0.0% to +25.0%, step -10.0% to +0.0%" in said
    assert "predicted against" not in str(SWEEP)


def test_the_largest_batches_of_a_sweep_are_those_that_fit() -> None:
    assert SWEEP.largest_untouched == TRIALS[0]
    assert SWEEP.largest_planned == TRIALS[1]


def test_the_largest_batch_is_told_with_its_price() -> None:
    found = MaxBatch("bert", "NVIDIA H200", 12 * GIB, "optimal", 8, 16, TRIALS)

    assert found.gain == 2
    assert found.extra_share == pytest.approx(0.25)
    assert "2.00 × the batch, +25.0% time per sample" in str(found)


def test_a_study_in_which_nothing_fits_has_no_gain_and_prints() -> None:
    found = MaxBatch("bert", "NVIDIA H200", GIB, "optimal", 0, 0, TRIALS[2:])

    assert found.gain == 0 and found.extra_share is None
    assert "without leanstep" in str(found)
    assert "no batch size that was tried fits: raise the budget to 14.0 GiB (or " in str(found)
    assert "no batch size that was tried fits" not in str(SWEEP)


@pytest.mark.parametrize(
    "noun",
    [
        SWEEP,
        MaxBatch("bert", "NVIDIA H200", 12 * GIB, "optimal", 8, 16, TRIALS, max_slowdown=0.2),
        Checkup((Finding("versions", "torch", "2.13.0"),)),
    ],
    ids=lambda noun: type(noun).__name__,
)
def test_any_file_is_read_back_as_what_it_holds(noun: Sweep, tmp_path: Path) -> None:
    noun.save(tmp_path / "noun.json")

    assert load(tmp_path / "noun.json") == noun
    assert (tmp_path / "noun.json").read_text() == noun.to_json() + "\n"


def test_a_file_of_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"leanstep": "Novel", "format": 2, "content": {}}')

    with pytest.raises(InputError, match="holds a Novel"):
        load(tmp_path / "x.json")


def test_a_checkup_ends_with_what_to_do() -> None:
    findings = (
        Finding("versions", "torch", "2.13.0"),
        Finding("engines", "inductor", "no C++ compiler", "install a C++ compiler"),
    )

    assert str(Checkup(findings)).endswith("what to do\n- install a C++ compiler")
    assert str(Checkup(findings[:1])).endswith("nothing to mend")
