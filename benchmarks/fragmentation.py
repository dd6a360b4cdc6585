"""What the allocator takes from the device beyond the peak, with and without leanstep.

    python benchmarks/fragmentation.py bert-large --batch 64 --budgets 60% --json rows.jsonl
    python benchmarks/fragmentation.py bert-tiny --device cpu                  # a try without a GPU

Allocated and reserved bytes at the peak of the untouched step, with every block checkpointed, and
fitted by leanstep to each budget (a share of the unplanned peak, or bytes such as 16GiB). Each runs
in a process of its own, since a pool remembers all that was ever asked of it; once as it is and
once with `expandable_segments:True`. One JSON row each, then a table.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import leanstep
from leanstep import models
from leanstep.truth import peak_rise_bytes
from leanstep.units import format_bytes, format_seconds

# Recordings are made in the first calls, and take memory of their own.
WARM_STEPS, MEASURED_STEPS = 6, 3
SETTINGS = {"as it is": "", "expandable": "expandable_segments:True"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--image", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budgets", nargs="*", default=["60%"])
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(options):
    sizes = {k: v for k in ("batch", "seq", "image") if (v := getattr(options, k))}
    is_cuda = options.device == "cuda"
    return models.build(
        options.model, device=options.device, autocast="bf16", fused=is_cuda, **sizes
    )


def make_jobs(options, folder):
    """What the processes shall run: plans go to them as files."""
    model, batch, loss, optimizer = build(options)
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer)
    paths = [block.path for block in profile.blocks if not block.children]
    jobs = {"untouched": {}, "checkpoint every block": {"checkpointed": list(dict.fromkeys(paths))}}
    for budget in options.budgets:
        try:
            plan = leanstep.plan(profile, budget)
        except leanstep.BudgetError as error:
            print(f"{budget}: {error}")
            continue
        path = folder / f"plan-{len(jobs)}.json"
        plan.save(path)
        jobs[f"leanstep at {budget}"] = {"plan": str(path), "budget_bytes": plan.budget_bytes}
    return jobs


def run_child(options):
    """Train for a few steps as one job says, and print what the allocator saw."""
    job = json.loads(options.child)
    model, batch, loss, optimizer = build(options)
    for path in job.get("checkpointed", ()):
        block = model.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if "plan" in job:
        leanstep.apply(model, leanstep.Plan.load(job["plan"]))

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_STEPS):
        step()
    if options.device != "cuda":
        rise = peak_rise_bytes(step, torch.device(options.device))
        print(json.dumps({"allocated_bytes": rise, "reserved_bytes": None, "seconds": None}))
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(MEASURED_STEPS):
        step()
    torch.cuda.synchronize()
    found = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": (time.perf_counter() - start) / MEASURED_STEPS,
    }
    print(json.dumps(found))


def start_child(job, setting):
    command = [sys.executable, *sys.argv, "--child", json.dumps(job)]
    # Under either name torch would read it.
    known = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    if setting:
        environment["PYTORCH_ALLOC_CONF"] = setting
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    options = arguments()
    if options.child:
        run_child(options)
        return
    is_cuda = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(options, Path(folder))
        if is_cuda:
            torch.cuda.empty_cache()
        rows = []
        for method, job in jobs.items():
            for setting in SETTINGS if is_cuda else ("as it is",):
                row = {
                    "model": options.model,
                    "arguments": " ".join(sys.argv[1:]),
                    "device": torch.cuda.get_device_name() if is_cuda else "CPU",
                    "torch": torch.__version__,
                    "method": method,
                    "segments": setting,
                    "budget_bytes": job.get("budget_bytes"),
                    **start_child(job, SETTINGS[setting]),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    show(rows)


def show(rows):
    print("\n| method | segments | allocated | reserved | gaps | step |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"| {row['method']} | {row['segments']} | failed: {row['failed'][:80]} | | | |")
            continue
        allocated, reserved = row["allocated_bytes"], row["reserved_bytes"]
        seen = ("–", "–", "–")
        if reserved is not None:
            gaps, step = reserved / allocated - 1, format_seconds(row["seconds"])
            seen = (format_bytes(reserved), f"{gaps:+.1%}", step)
        cells = (row["method"], row["segments"], format_bytes(allocated), *seen)
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
