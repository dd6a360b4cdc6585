"""What leanstep itself costs: profiling, planning, applying, and the step in four settings.

    python benchmarks/overhead.py bert-large --batch 1 --seq 128
    python benchmarks/overhead.py bert-large --batch 64 --seq 512 --device cuda --bf16 --fused

Settings: untouched; every block under `replay` with everything kept; 60 % of the unplanned peak
(or the floor, where that is higher); the floor. Settings take turns; times are the fastest of
`--rounds`, ratios are taken within this one run. One JSON object a model, then a table.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

import leanstep
from leanstep import engines, models
from leanstep.api import profile_step
from leanstep.ir import Engine
from leanstep.planner import plan as make_plan
from leanstep.rebuild.block import BlockGraph
from leanstep.step.state import untouched
from leanstep.step.training import make_step
from leanstep.truth import peak_rise_bytes, resident_bytes
from leanstep.units import format_bytes, format_seconds


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--image", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="under bf16 autocast")
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    return parser.parse_args()


def build_step(options):
    sizes = {k: getattr(options, k) for k in ("batch", "seq", "image") if getattr(options, k)}
    model, batch, loss, optimizer = models.build(options.model, device=options.device, **sizes)
    if options.fused:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def autocast_loss(model, batch):
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
            return loss(model, batch)

    return make_step(model, batch, autocast_loss, optimizer)


def timed(function, *args, **kwargs):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return result, time.perf_counter() - start


def floor_bytes(profile):
    try:
        return make_plan(profile, 1).peak_bytes
    except leanstep.BudgetError as error:
        return error.floor_bytes


def unsaved_value(profile, block):
    """A value that autograd does not save: the hooks are in place and find nothing to drop."""
    view = BlockGraph(profile.graph, block)
    saved = {save.value.storage for save in view.saves}
    return tuple(view.storage_key(s) for s in view.births if s not in saved)[:1]


def make_plans(profile):
    """The plans to compare, and the seconds that the one for 60 % took."""
    whole = make_plan(profile, "100%")
    kept = tuple(
        dataclasses.replace(d, engine=Engine.REPLAY, drop=unsaved_value(profile, block))
        for d, block in zip(whole.decisions, profile.blocks, strict=True)
    )
    floor = floor_bytes(profile)
    target = max(floor, int(0.6 * profile.peak_bytes))
    at_target, seconds = timed(make_plan, profile, target)
    share = f"{at_target.budget_bytes / profile.peak_bytes:.0%}"
    plans = {
        "everything kept": dataclasses.replace(whole, decisions=kept),
        f"at {share}": at_target,
        "at the floor": make_plan(profile, floor),
    }
    return plans, seconds


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_step(step):
    synchronize(step.device)
    start = time.perf_counter()
    step.run()
    synchronize(step.device)
    return time.perf_counter() - start


def measure(step, plans, rounds):
    """Peak and seconds of each setting; the settings take turns."""
    seconds = {name: [] for name in ("untouched", *plans)}
    peaks = {}
    with untouched(step):
        step.run()
        resident = resident_bytes(step)
        peaks["untouched"] = resident + peak_rise_bytes(step.run, step.device)
        applied = {}
        for name, plan in plans.items():
            applied[name] = engines.apply(step.model, plan)
            # Recordings agree after a few calls; only then is the usual path measured.
            for _ in range(4):
                step.run()
            peaks[name] = resident + peak_rise_bytes(step.run, step.device)
            applied[name].pause()
        for _ in range(rounds):
            for name, found in seconds.items():
                if name in applied:
                    applied[name].resume()
                step.run()
                found.append(timed_step(step))
                if name in applied:
                    applied[name].pause()
    # The fastest of each: what another process takes is not leanstep's cost.
    return peaks, {name: min(found) for name, found in seconds.items()}


def main():
    options = arguments()
    step = build_step(options)
    profile, profile_seconds = timed(profile_step, step)
    plans, plan_seconds = make_plans(profile)
    handle, apply_seconds = timed(engines.apply, step.model, plans["at the floor"])
    handle.remove()
    peaks, seconds = measure(step, plans, options.rounds)
    own = sum(len(block.saves) for block in profile.blocks)
    hooks = (seconds["everything kept"] - seconds["untouched"]) / max(1, own) * 1e6
    rows = [
        {
            "setting": name,
            "seconds": seconds[name],
            "seconds_ratio": seconds[name] / seconds["untouched"],
            "predicted_seconds_ratio": 1.0
            if name not in plans
            else 1 + plans[name].extra_seconds / seconds["untouched"],
            "peak_bytes": peaks[name],
            "peak_ratio": peaks[name] / peaks["untouched"],
            "predicted_peak_bytes": plans[name].peak_bytes if name in plans else profile.peak_bytes,
            "gap": plans[name].gap if name in plans else 0.0,
        }
        for name in peaks
    ]
    result = {
        "model": options.model,
        "arguments": " ".join(sys.argv[1:]),
        "device": profile.device,
        "torch": torch.__version__,
        "ops": len(profile.graph.ops),
        "blocks": len(profile.blocks),
        "saved_tensors": own,
        "profile_seconds": profile_seconds,
        "plan_seconds": plan_seconds,
        "apply_seconds": apply_seconds,
        "microseconds_per_saved_tensor": hooks,
        "rows": rows,
    }
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    show(result)


def show(result):
    print(f"\n{result['arguments']} · {result['device']} · torch {result['torch']}")
    print(
        f"profile {result['profile_seconds']:.1f} s, plan {result['plan_seconds']:.2f} s, "
        f"apply {result['apply_seconds'] * 1e3:.1f} ms; {result['ops']} ops, "
        f"{result['blocks']} blocks, {result['saved_tensors']} saved tensors, "
        f"{result['microseconds_per_saved_tensor']:.1f} µs a saved tensor\n"
    )
    print("| setting | step | × untouched | predicted × | peak | × untouched | predicted | gap |")
    print("|---|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        print(
            f"| {row['setting']} | {format_seconds(row['seconds'])} | {row['seconds_ratio']:.3f} "
            f"| {row['predicted_seconds_ratio']:.3f} | {format_bytes(row['peak_bytes'])} "
            f"| {row['peak_ratio']:.3f} | {format_bytes(row['predicted_peak_bytes'])} "
            f"| {row['gap']:.2%} |"
        )


if __name__ == "__main__":
    main()
