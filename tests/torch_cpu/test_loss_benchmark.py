"""`benchmarks/loss_in_chunks.py` in small: what it times is what it says."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def loss_in_chunks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import loss_in_chunks

    yield loss_in_chunks
    sys.modules.pop("loss_in_chunks", None)


def test_every_way_is_timed_and_has_the_bits_of_the_whole(loss_in_chunks, monkeypatch, capsys):
    sizes = ["--rows", "256", "--words", "100", "--rounds", "1", "--chunks", "4"]
    monkeypatch.setattr(sys, "argv", ["loss_in_chunks.py", "time", "--device", "cpu", *sizes])

    loss_in_chunks.main()

    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["whole", "ours", "4"]
    assert all(line.endswith("same bits") for line in lines)
