"""What the replay engine costs the CPU: microseconds a call, a saved tensor and a replayed op.

    python benchmarks/replay_overhead.py
    python benchmarks/replay_overhead.py --device cuda --dropout 0.1 --bf16

The model has BERT-large's 24 layers at a width where kernels cost next to nothing, so that what is
left is Python and dispatch. Four settings take turns in one process:

- untouched;
- calls: blocks that save nothing (all is frozen), planned against untouched;
- hooks: every block under `replay`, everything kept;
- replay: every layer keeps its inputs and rebuilds all that backward asks for.

On the CPU the time that the replayed ops take by themselves is left out; on CUDA they are issued
and not waited for. Each runs to its steady state first (recordings are audited at the calls 1, 2,
4, 8, ...), and the fastest step of each counts. One JSON object, then a table.
"""

import argparse
import cProfile
import dataclasses
import gc
import json
import pstats
import time
from contextlib import nullcontext

import torch

from leanstep import engines
from leanstep.api import profile_step
from leanstep.effects import decision_effect
from leanstep.ir import Engine
from leanstep.models.transformer import Bert, BertSizes
from leanstep.planner import plan as make_plan
from leanstep.rebuild.block import BlockGraph
from leanstep.step.training import make_step

# Steps until all audits lie behind that could fall into the measured ones: 64 to 128.
WARM_STEPS = 70
MEASURED_STEPS = 50


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true", help="under bf16 autocast")
    parser.add_argument("--compiler", action="store_true", help="load torch's compiler first")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--profile", choices=("calls", "hooks", "replay"), help="where time goes")
    return parser.parse_args()


def build_step(options):
    sizes = BertSizes(
        width=16,
        depth=options.depth,
        heads=2,
        inner=32,
        vocabulary=32,
        positions=8,
        dropout=options.dropout,
    )
    model = Bert(sizes).to(options.device)
    tokens = torch.randint(32, (2, 8), device=options.device)

    def loss(model, batch):
        cast = torch.autocast(options.device, torch.bfloat16) if options.bf16 else nullcontext()
        with cast:
            return model(batch, labels=batch)

    return make_step(model, tokens, loss, None)


def everything_kept(profile, plan):
    """Hooks in place that find nothing to drop: each block is told to drop what nobody saves."""
    decisions = []
    for decision, block in zip(plan.decisions, profile.blocks, strict=True):
        view = BlockGraph(profile.graph, block)
        saved = {save.value.storage for save in view.saves}
        drop = tuple(view.storage_key(s) for s in view.births if s not in saved)[:1]
        decisions.append(dataclasses.replace(decision, engine=Engine.REPLAY, drop=drop, recipes=()))
    return dataclasses.replace(plan, decisions=tuple(decisions))


def count_replays(profile, plan):
    """How many ops run again, and what they take by themselves."""
    views = (BlockGraph(profile.graph, block) for block in profile.blocks)
    pairs = zip(views, plan.decisions, strict=True)
    effects = [decision_effect(profile, view, decision) for view, decision in pairs]
    return sum(len(e.replays) for e in effects), sum(e.seconds(profile) for e in effects)


def timed(run, device):
    """The seconds that a run takes the CPU; other processes do not count."""
    if device.type == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    # Not synchronized: what counts is how long the CPU takes to issue the step.
    return time.perf_counter() - start


class Settings:
    """The settings of one model, each with what to run and the plan it needs in force."""

    def __init__(self, step, profile, plan):
        self.step = step
        self.plans = {"hooks": everything_kept(profile, plan), "replay": plan}
        self.applied = {}
        for name, own in self.plans.items():
            self.applied[name] = engines.apply(step.model, own)
            self.applied[name].pause()

    def run(self, name):
        frozen = name.endswith("calls")
        plan = {"calls": "hooks", "hooks": "hooks", "replay": "replay"}.get(name)
        if frozen:
            self.step.model.requires_grad_(False)
        if plan:
            self.applied[plan].resume()
        run = self.call if frozen else self.step.run
        seconds = timed(run, self.step.device)
        if plan:
            self.applied[plan].pause()
        self.step.model.requires_grad_(True)
        return seconds

    def call(self):
        self.step.model(self.step.batch)


NAMES = ("untouched", "untouched calls", "calls", "hooks", "replay")


def measure(settings):
    for name in NAMES:
        for _ in range(WARM_STEPS):
            settings.run(name)
    found = {name: [] for name in NAMES}
    for _ in range(MEASURED_STEPS):
        for name in NAMES:
            found[name].append(settings.run(name))
    return {name: min(seconds) for name, seconds in found.items()}


def show_profile(settings, name):
    for _ in range(WARM_STEPS):
        settings.run(name)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(MEASURED_STEPS):
        settings.run(name)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main():
    options = arguments()
    torch.manual_seed(0)
    if options.compiler:
        torch.compiler.set_stance("default")
    step = build_step(options)
    profile = profile_step(step)
    plan = make_plan(profile, "100%", overrides={"layers.*": "recompute"})
    settings = Settings(step, profile, plan)
    # What was made so far is not looked at by the collector again: its size is not ours to pay for.
    gc.freeze()
    if options.profile:
        show_profile(settings, options.profile)
        return
    seconds = measure(settings)
    calls = len(plan.decisions)
    saves = sum(len(block.saves) for block in profile.blocks)
    replays, bare_seconds = count_replays(profile, plan)
    bare_seconds = 0.0 if options.device == "cuda" else bare_seconds
    a_call = (seconds["calls"] - seconds["untouched calls"]) / calls
    a_save = (seconds["hooks"] - seconds["untouched"] - a_call * calls) / saves
    a_replay = (seconds["replay"] - seconds["hooks"] - bare_seconds) / replays
    an_op = seconds["untouched"] / len(profile.graph.ops)
    result = {
        "device": profile.device,
        "torch": torch.__version__,
        "dropout": options.dropout,
        "bf16": options.bf16,
        "calls": calls,
        "saved_tensors": saves,
        "replayed_ops": replays,
        "microseconds_an_op_untouched": an_op * 1e6,
        "microseconds_a_call": a_call * 1e6,
        "microseconds_a_saved_tensor": a_save * 1e6,
        "microseconds_a_replayed_op": a_replay * 1e6,
        # The two constants of `leanstep.ir.profile`.
        "a_call_in_ops": (seconds["hooks"] - seconds["untouched"]) / calls / an_op,
        "a_replay_in_ops": (seconds["replay"] - seconds["hooks"]) / replays / an_op,
        "milliseconds": {name: value * 1e3 for name, value in seconds.items()},
    }
    print(json.dumps(result))
    show(result)


def show(result):
    print(f"\n{result['device']} · torch {result['torch']} · dropout {result['dropout']}")
    print(f"  {result['microseconds_an_op_untouched']:6.1f} µs an op of the untouched step")
    for what, count in (
        ("call", "calls"),
        ("saved_tensor", "saved_tensors"),
        ("replayed_op", "replayed_ops"),
    ):
        each = result[f"microseconds_a_{what}"]
        print(f"  {each:6.1f} µs a {what.replace('_', ' ')} ({result[count]} in a step)")
    print(
        f"  in ops of the untouched step: a call with its saves {result['a_call_in_ops']:.1f}, "
        f"a replayed op {result['a_replay_in_ops']:.1f}"
    )
    base = result["milliseconds"]["untouched"]
    for name, value in result["milliseconds"].items():
        print(f"  {name:16} {value:7.2f} ms ({value / base:.2f} × untouched)")


if __name__ == "__main__":
    main()
