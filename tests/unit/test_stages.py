"""The line of a terminal that says what is going on: where it is drawn, and that it goes."""

import io
from types import SimpleNamespace

import pytest

from leanstep import stages
from leanstep.stages import each, stage


class Terminal(io.StringIO):
    """A standard error that somebody looks at; 80 columns wide, as it has no file number."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """All that the line has said, one after the other."""
        return [text.removesuffix("\x1b[K") for text in self.getvalue().split("\r")[1:]]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    # Not in sys itself: pytest puts its own there before each test.
    monkeypatch.setattr(stages, "sys", SimpleNamespace(stderr=shown))
    return shown


def test_stages_stand_in_a_line_from_the_outermost_in(terminal):
    with stage("fitting"):
        with stage("planning"):
            pass
        with stage("dry run"):
            pass

    assert terminal.lines == [
        "leanstep: fitting",
        "leanstep: fitting · planning",
        "leanstep: fitting",
        "leanstep: fitting · dry run",
        "leanstep: fitting",
        "",
    ]


def test_a_list_is_counted_in_the_stage_that_is_open(terminal):
    with stage("profiling"):
        assert list(each("abc", "timing ops")) == ["a", "b", "c"]

    assert "leanstep: profiling · timing ops (1 of 3)" in terminal.lines
    # Drawn seldom: three letters take no time.
    assert "leanstep: profiling · timing ops (2 of 3)" not in terminal.lines
    assert terminal.lines[-2:] == ["leanstep: profiling", ""]


def test_without_a_stage_a_list_says_nothing(terminal):
    assert list(each("abc", "timing ops")) == ["a", "b", "c"]
    assert terminal.lines == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_or_ctrl_c_leaves_no_stage_and_no_line(terminal, error):
    with pytest.raises(error), stage("fitting"):
        for _ in each("abc", "timing ops"):
            raise error

    assert terminal.lines[-1] == ""
    with stage("planning"):
        pass
    assert terminal.lines[-2] == "leanstep: planning"


def test_a_line_that_is_too_long_keeps_its_end(terminal):
    with stage("x" * 100), stage("planning"):
        pass

    line = terminal.lines[1]
    assert len(line) == 79 and line.startswith("…") and line.endswith("x · planning")


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_that_nobody_looks_at_is_left_alone(terminal, monkeypatch, name, value):
    monkeypatch.setenv(name, value)

    with stage("fitting"):
        pass

    assert terminal.getvalue() == ""


def test_a_pipe_gets_nothing(capfd):
    with stage("fitting"):
        list(each("abc", "timing ops"))

    assert capfd.readouterr() == ("", "")


def test_a_program_without_standard_error_works(monkeypatch):
    monkeypatch.setattr(stages, "sys", SimpleNamespace(stderr=None))

    with stage("fitting"):
        pass
