"""Each distinct op is timed once, remembered on disk, and silently."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanstep
from leanstep import api, models
from leanstep.ir import Profile
from leanstep.profiler import measure


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("LEANSTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that are timed, as they are."""
    calls: list[str] = []
    measure_one = module_of_measure()._seconds

    def note(spec: object, device: torch.device) -> float:
        calls.append(str(spec))
        return measure_one(spec, device)

    monkeypatch.setattr(module_of_measure(), "_seconds", note)
    # However busy the machine is.
    monkeypatch.setattr(api, "_TOO_LONG", math.inf)
    return calls


def module_of_measure() -> types.ModuleType:
    # The package shows the function of the same name.
    return sys.modules[measure.__module__]


def profile_net(num_layers: int = 3) -> Profile:
    layers = [part for _ in range(num_layers) for part in (nn.Linear(8, 8), nn.ReLU())]
    return leanstep.profile(nn.Sequential(*layers), torch.randn(4, 8), sum_of_output)


def sum_of_output(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def sum_seconds(profile: Profile) -> float:
    return sum(profile.seconds(index) for index in range(len(profile.graph.ops)))


def test_figures_that_a_busy_machine_has_left_are_found_out(cold: Path) -> None:
    before = sum_seconds(profile_net())
    (path,) = cold.iterdir()
    known = json.loads(path.read_text())
    path.write_text(json.dumps({call: 10_000 * seconds for call, seconds in known.items()}))

    assert sum_seconds(profile_net()) < 100 * before
    # And the next run finds the right ones.
    assert sum(json.loads(path.read_text()).values()) < 100 * sum(known.values())


def test_what_is_timed_again_is_never_the_slower_for_it(cold: Path, monkeypatch) -> None:
    before = profile_net()
    monkeypatch.setattr(module_of_measure(), "_seconds", lambda spec, device: 1e3)
    monkeypatch.setattr(api, "_TOO_LONG", 0.0)

    assert sum_seconds(profile_net()) == sum_seconds(before)


def test_each_distinct_call_is_timed_once(cold: Path, timed: list[str]) -> None:
    profile = profile_net(num_layers=5)

    assert len(timed) == len(set(timed)) > 0
    assert sum("aten.addmm" in call for call in timed) == 1
    assert sum(op.name == "aten.addmm.default" for op in profile.graph.ops) == 5


def test_views_are_not_timed_and_cost_nothing(cold: Path, timed: list[str]) -> None:
    profile = profile_net()

    assert not [call for call in timed if call.startswith(("aten.t.", "aten.detach", "aten.view"))]
    views = [n for n, op in enumerate(profile.graph.ops) if not op.writes]
    assert views and all(profile.seconds(index) == 0.0 for index in views)


def test_a_second_profile_times_nothing_new(cold: Path, timed: list[str]) -> None:
    first = profile_net()
    timed.clear()

    second = profile_net()

    assert timed == []
    assert [cost.seconds for cost in first.costs] == [cost.seconds for cost in second.costs]


def test_a_deeper_model_of_the_same_layers_times_nothing_new(cold: Path, timed: list[str]) -> None:
    profile_net(num_layers=2)
    timed.clear()

    profile_net(num_layers=7)

    assert timed == []


def test_costs_are_kept_in_the_chosen_folder(cold: Path) -> None:
    profile_net()

    (file,) = cold.iterdir()
    assert torch.__version__ in file.name and file.suffix == ".json"
    content = json.loads(file.read_text())
    assert content and all(isinstance(seconds, float) for seconds in content.values())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b'{"aten.addmm": "fast"}'],
)
def test_a_corrupt_cache_is_survived_and_replaced(cold: Path, content: bytes) -> None:
    profile_net()
    (file,) = cold.iterdir()
    file.write_bytes(content)

    profile = profile_net()

    assert all(isinstance(cost.seconds, float) for cost in profile.costs)
    assert "aten.addmm" in file.read_text()


@pytest.mark.parametrize("seconds", ['"fast"', "null", "-1.0", "NaN", "Infinity", "true"])
def test_a_cached_cost_that_is_no_time_is_measured_anew(
    cold: Path, timed: list[str], seconds: str
) -> None:
    profile_net()
    (file,) = cold.iterdir()
    call = next(call for call in timed if "aten.addmm" in call)
    file.write_text(f"{{{json.dumps(call)}: {seconds}}}")
    timed.clear()

    profile = profile_net()

    assert call in timed
    assert all(0.0 <= cost.seconds < 10.0 for cost in profile.costs)


def test_a_folder_that_cannot_be_written_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LEANSTEP_CACHE_DIR", str(tmp_path / "file"))

    assert profile_net().costs


def test_nothing_is_printed_where_nobody_watches(
    cold: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    built = models.build("gpt2-tiny")

    leanstep.profile(built.model, built.batch, built.loss, optimizer=built.optimizer)

    assert capfd.readouterr() == ("", "")


class Masked(nn.Module):
    """Puts gradients back by a mask, which made-up arguments do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y > 0]


def test_an_op_that_cannot_be_timed_alone_is_priced_by_its_bytes_and_noted(cold: Path) -> None:
    model, batch, notes = Masked(), torch.randn(16, 8), []
    for _ in range(2):
        profile = leanstep.profile(model, batch, sum_of_output)
        notes.append(profile.notes)
        (cost,) = {c.seconds for c in profile.costs if c.signature == "aten.index_put.default"}
        assert 0.0 < cost < 1e-3

    # A guess is not remembered as if it had been measured.
    assert notes[0] == notes[1]
    assert notes[0] == ("aten.index_put.default could not be timed alone: priced by its bytes",)


def test_timing_leaves_the_random_state_alone(cold: Path, timed: list[str]) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)
    before = torch.get_rng_state()

    leanstep.profile(model, batch, sum_of_output)

    assert timed
    assert torch.equal(torch.get_rng_state(), before)


def test_ops_that_check_their_input_are_not_tried_on_made_up_ones(
    cold: Path, timed: list[str]
) -> None:
    class Checked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            # On CUDA a failed check ends the process: zeros fail this one,
            torch._assert_async((out.abs() < 1e9).all())
            # and are no pivots for what solves by factors in backward.
            return torch.linalg.solve(torch.eye(8) + 0.01 * self.weight, out.t())

    profile = leanstep.profile(Checked(8, 8), torch.randn(4, 8), sum_of_output)

    risky = ("_assert_async", "lu_solve")
    assert all(any(name in op.name for op in profile.graph.ops) for name in risky)
    assert not any(name in call for name in risky for call in timed)
    assert all("could not be timed alone" in note for note in profile.notes)
