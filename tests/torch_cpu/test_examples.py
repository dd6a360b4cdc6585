"""Every example runs, and says itself whether its numbers are those of the untouched model."""

import importlib.util
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOORS = ROOT / "examples" / "doors"
NEEDS = {
    "huggingface": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "lightning_trainer": ("lightning",),
}
PAGES = sorted(p for p in (ROOT / "docs" / "doors").glob("*.md") if p.stem != "index")
ALONE = sorted(p.stem for p in DOORS.glob("*.py") if p.stem not in ("shared", "distributed"))


@pytest.mark.parametrize("name", ALONE)
def test_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.syspath_prepend(DOORS)

    with warnings.catch_warnings():
        # Trainers of others warn of this and that.
        warnings.simplefilter("ignore")
        runpy.run_path(str(DOORS / f"{name}.py"), run_name="__main__")

    assert "equal, bit for bit" in capsys.readouterr().out


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)
def test_example_with_processes_runs() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(DOORS / "distributed.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "ddp, ddp, fitted, by hand, lean: equal, bit for bit" in done.stdout
    assert "fsdp2, fsdp2, lean: equal, bit for bit" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_of_a_door_names_an_example_that_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    named = [p for p in DOORS.glob("*.py") if f"examples/doors/{p.name}" in text]

    assert named
