"""Several processes: one plan, the gradients of the untouched distributed model, no hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from ranks import wide

import leanstep

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "tests" / "support" / "ranks.py"
PIECE_BYTES = 64 << 10

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


def run(folder: Path, world: int, scenarios: list[str]) -> None:
    """Start real processes; each leaves what it returned of each scenario."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RANKS), ",".join(scenarios), str(world)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output


WRONG = [
    ("other_model", "InputError", "ranks 0 and 1 have different models: parameter last.bias"),
    ("other_model_lean", "InputError", "parameter blocks.4.norm.weight is 64 float32 on rank 1"),
    ("too_small", "BudgetError", "no plan fits 1000 B"),
    ("wrapped_first", "InputError", "fit the model before it is wrapped"),
]


def once(tmp_path_factory, world: int, scenarios: list[str]) -> list[dict]:
    """The same for all workers of a test run: the first runs it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    folder = (base.parent if is_worker else base) / f"ranks-{world}"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            folder.mkdir()
            run(folder, world, scenarios)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    right = ["ddp", "by_hand", "ddp_accumulated", "by_hand_accumulated", "ddp_fitted", "ddp_lean"]
    wrong = [scenario for scenario, *_ in WRONG]
    others = ["memory", "fsdp_lean", "fsdp_lean_tight", "fsdp_memory", "ddp_loss", "fsdp_loss"]
    return once(tmp_path_factory, 2, [*right, *wrong, *others, "tensor_parallel_lean"])


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    return once(tmp_path_factory, 4, ["ddp", "by_hand", "ddp_lean"])


def differences(expected: list, got: list) -> list[int]:
    return [
        place
        for place, (a, b) in enumerate(zip(expected, got, strict=True))
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
    ]


@pytest.mark.parametrize("kind", ["", "_accumulated"])
def test_gradients_averaged_by_hand_are_those_of_ddp(two, kind: str) -> None:
    for rank in two:
        assert differences(rank[f"ddp{kind}"], rank[f"by_hand{kind}"]) == []


def test_gradients_of_four_ranks_averaged_by_hand_are_near_those_of_ddp(four) -> None:
    for rank in four:
        # gloo sums in another order at other places of a buffer.
        for theirs, ours in zip(rank["ddp"], rank["by_hand"], strict=True):
            assert (theirs is None) == (ours is None)
            assert theirs is None or torch.allclose(theirs, ours, rtol=1e-4, atol=1e-6)


def test_reduction_by_hand_takes_one_piece_where_ddp_takes_its_buckets(two) -> None:
    for rank in two:
        found = rank["memory"]
        # Parameters that no rank has used have a place in a bucket and no gradient.
        assert found["by hand"] <= found["copies"] - found["gradients"] + PIECE_BYTES
        assert found["by hand"] <= found["views"] + PIECE_BYTES


@pytest.mark.parametrize(
    ("world", "scenario"), [("two", "ddp_fitted"), ("two", "ddp_lean"), ("four", "ddp_lean")]
)
def test_planned_ddp_trains_the_numbers_of_ddp_by_one_plan(request, world, scenario) -> None:
    ranks = request.getfixturevalue(world)
    for rank in ranks:
        ours = rank[scenario]
        assert differences(rank["ddp"], ours["seen"]) == []
        assert ours["decisions"] == ranks[0][scenario]["decisions"]
        assert any(decision["drop"] for decision in ours["decisions"])


@pytest.mark.parametrize("scenario", ["fsdp_lean", "fsdp_lean_tight", "tensor_parallel_lean"])
def test_sharded_models_train_the_same_numbers_and_recompute_no_collective(two, scenario) -> None:
    for rank in two:
        found = rank[scenario]
        assert "error" not in found, found
        assert differences(found["untouched"], found["lean"]) == []
        assert found["dropped"] and found["dropped"] == two[0][scenario]["dropped"]
        assert found["collectives"]
        assert not any("c10d" in key or "fsdp" in key for key in found["dropped"])
        # What is spread over the ranks counts by the part that is here.
        assert found["share"] < 0.7


@pytest.mark.parametrize("scenario", ["ddp_loss", "fsdp_loss"])
def test_losses_in_chunks_train_the_same_numbers_on_every_rank(two, scenario) -> None:
    for rank in two:
        found = rank[scenario]
        assert "error" not in found, found
        assert differences(found["untouched"], found["lean"]) == []
        assert found["loss"] == two[0][scenario]["loss"] != "None"


def test_products_with_gathered_parameters_run_again(two) -> None:
    for rank in two:
        assert "up::aten.mm.default#0:0" in rank["fsdp_lean_tight"]["dropped"]


def test_peak_of_a_sharded_step_is_that_of_the_account_and_of_the_imagined_rank(two) -> None:
    # A thread of gloo's may hold a block's gathered gradients for longer, now and then.
    measured = min(peak for rank in two for peak in rank["fsdp_memory"]["measured"])
    block_bytes = sum(p.nbytes for p in wide()[0][0].parameters())
    imagined = leanstep.profile(wide, device="h200", ranks=2).peak_bytes

    for rank in two:
        # It was too high by the parameters that were taken to stay gathered, and by gloo's buffers.
        recorded = rank["fsdp_memory"]["recorded"]
        assert 0.999 * measured <= recorded <= 1.001 * measured + block_bytes
    # Collectives allocate nothing of their own there.
    assert imagined == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("scenario", "error", "message"), WRONG)
def test_what_is_wrong_on_one_rank_is_told_on_all_of_them(
    two, scenario: str, error: str, message: str
) -> None:
    for rank in two:
        found = rank[scenario]
        assert found["error"] == error
        assert message in found["message"]
        assert found["seconds"] < 30
