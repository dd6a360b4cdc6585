"""leanstep beside what a user can have without it: one model, one call, time and peak of each.

    python benchmarks/gpu.py run bert-large --json rows.jsonl
    python benchmarks/gpu.py run resnet152 --peers checkpoint --shares 80 60 --json rows.jsonl
    python benchmarks/gpu.py run bert-tiny --device cpu --peers checkpoint    # a try without a GPU
    python benchmarks/gpu.py show rows.jsonl --figure time-against-peak.png

Every peer's peak is given to leanstep as its budget. Each method gets a few warm steps, then the
median of several; eager runs first and last. Rows are appended, so models and peers can be run one
at a time; a ratio is taken only between rows of one call. With `--rounds 6` a peer and ours (each
of the variants) take turns, that often: where a step waits for the host, and the host is busy
besides, one after the other is not side by side.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpu_peers import PEERS, switched_off
from gpu_rows import SIZES, line, show
from torch.utils._pytree import tree_map

import leanstep
from leanstep import models

# Calls 1 to 4, 6, 10 and 18 of a block are recorded: what is timed lies between.
WARM, TIMED = 10, 6


def channels_last(leaf):
    is_images = isinstance(leaf, torch.Tensor) and leaf.dim() == 4
    return leaf.contiguous(memory_format=torch.channels_last) if is_images else leaf


class Bench:
    """One model on the device, and the rows that are measured of it."""

    def __init__(self, options):
        self.options, self.device = options, torch.device(options.device)
        sizes = self.sizes()
        self.model, self.batch, self.loss, self.optimizer = self.build(sizes)
        if "image" in sizes:
            # As anyone who cares for speed has it: half the time of the other layout on an H200.
            self.model.to(memory_format=torch.channels_last)
            self.batch = tree_map(channels_last, self.batch)
        is_cuda = self.device.type == "cuda"
        self.common = {
            "call": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "model": options.model,
            "sizes": sizes,
            "device": torch.cuda.get_device_name() if is_cuda else "CPU",
            "torch": torch.__version__,
            "command": " ".join(sys.argv),
        }
        self.rows, self.profiles, self.forward_issued = [], {}, 0.0

    def sizes(self):
        given = {k: v for k in ("batch", "seq", "image") if (v := getattr(self.options, k))}
        return {**SIZES.get(self.options.model, {}), **given}

    def build(self, sizes):
        choices = {"device": self.options.device, "fused": self.device.type == "cuda"}
        return models.build(self.options.model, autocast="bf16", **choices, **sizes)

    def step(self):
        start = time.perf_counter()
        loss = self.loss(self.model, self.batch)
        self.forward_issued = time.perf_counter() - start
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, method, **facts):
        """Time and peak of the step as it is now; a row that fails says why."""
        row = {**self.common, "method": method, **facts}
        try:
            row.update(self._measured())
            row.update(self.kernels())
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error).partition("\n")[0]
        self.tidy()
        return self.note(row)

    def note(self, row):
        self.rows.append(row)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(line(row, self.rows[0]), flush=True)
        return row

    def _measured(self):
        warm_seconds = self.warmed(self.options.warm)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = self.figures(self.timed(self.options.timed))
        if self.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return {"warm_seconds": warm_seconds, **found}

    def warmed(self, count):
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        self.synchronize()
        return time.perf_counter() - start

    def timed(self, count):
        """Of each step, the seconds until forward and all of it is issued, and until it is done."""
        times = []
        for _ in range(count):
            self.synchronize()
            start = time.perf_counter()
            self.step()
            issued = time.perf_counter() - start
            self.synchronize()
            times.append((self.forward_issued, issued, time.perf_counter() - start))
        return times

    def figures(self, times):
        forward_issued, issued, seconds = zip(*times, strict=True)
        return {
            "seconds": statistics.median(seconds),
            # Near to the time of the step, the host cannot keep the device busy.
            "issue_seconds": statistics.median(issued),
            "forward_issue_seconds": statistics.median(forward_issued),
            "all_seconds": seconds,
        }

    def kernels(self):
        """The seconds that the device works in one step, by the kind of kernel, if asked for."""
        if not self.options.kernels or self.device.type != "cuda":
            return {}
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            self.step()
            self.synchronize()
        seconds = dict.fromkeys(KERNELS, 0.0)
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kind = kernel_kind(event.name)
                seconds[kind] += event.time_range.elapsed_us() / 1e6
        return {"kernels": seconds}

    def tidy(self):
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self):
        options = self.options
        self.measure("eager")
        profile, _ = self.profiles["replay"] = self.profiled()
        blocks = [self.model.get_submodule(b.path) for b in profile.blocks if not b.children]
        blocks = list(dict.fromkeys(blocks))
        budgets = {}
        if options.rounds:
            for peer, engine in itertools.product(options.peers, options.engines):
                self.in_turns(peer, engine, blocks)
            return
        for peer in options.peers:
            with PEERS[peer](blocks):
                row = self.measure(peer)
            if "failed" not in row:
                budgets[peer] = row.get("peak_bytes") or self.budget_of(profile)
        for engine, variant in itertools.product(options.engines, options.variants):
            facts = choices_of(engine, variant)
            profile, profile_seconds = self.profiles["replay"]
            if engine == "inductor":
                profile, profile_seconds = self.profiled(engine=engine, exact=facts["exact"])
                self.note_forms(profile)
            shares = {
                f"{share}%": int(profile.peak_bytes * share / 100) for share in options.shares
            }
            for name, budget in {**budgets, **shares}.items():
                own = {**facts, "at": name}
                if variant == "fit":
                    self.fitted(budget, own)
                else:
                    self.ours(profile, budget, {**own, "profile_seconds": profile_seconds})
        self.measure("eager again")

    def budget_of(self, profile):
        """For a try without a GPU, where peers' peaks are not measured."""
        return int(0.9 * profile.peak_bytes)

    def profiled(self, **choices):
        start = time.perf_counter()
        ingredients = self.model, self.batch, self.loss
        profile = leanstep.profile(*ingredients, optimizer=self.optimizer, **choices)
        self.tidy()
        seconds = time.perf_counter() - start
        print(f"profile: {seconds:.1f} s {choices or ''}", flush=True)
        return profile, seconds

    def note_forms(self, profile):
        """What the compiled blocks were measured to be."""
        for note in profile.notes:
            print(f"    {note}")
        for exclusion in profile.exclusions:
            print(f"    left out: {exclusion}")
        for kind in profile.kinds:
            joined = ", kernels joined" if kind.joins_kernels else ""
            print(f"    {kind.name}: {kind.num_inexact} forms gave other bits{joined}")
            for form in kind.forms:
                times = f"{form.forward_seconds * 1e3:.2f} + {form.backward_seconds * 1e3:.2f} ms"
                print(f"        {form.name}: keeps {form.kept_bytes / 2**20:.0f} MiB, {times}")

    def ours(self, profile, budget, facts):
        applied = self.applied(profile, budget, facts)
        if applied is not None:
            try:
                self.measure("leanstep", **facts)
            finally:
                applied.remove()

    def applied(self, profile, budget, facts):
        """Our plan for a budget, in force, with its facts noted; None if it refuses."""
        facts["budget_bytes"] = budget
        choices = {name: facts[name] for name in ("engine", "exact", "offload", "chunks")}
        start = time.perf_counter()
        try:
            plan = leanstep.plan(profile, budget, **choices)
        except leanstep.BudgetError as error:
            self.note({**self.common, "method": "leanstep", **facts, "failed": str(error)})
            return None
        facts["plan_seconds"] = time.perf_counter() - start
        facts |= self.predicted(profile, plan)
        start = time.perf_counter()
        applied = leanstep.apply(self.model, plan)
        facts["apply_seconds"] = time.perf_counter() - start
        return applied

    def predicted(self, profile, plan):
        """What a plan promises, and what it is made of beside blocks."""
        return {
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_seconds": self.unplanned_seconds(profile) + plan.extra_seconds,
            "host_bytes": plan.host_bytes,
            "loss_rows": 0 if plan.loss is None else plan.loss.num_rows,
        }

    def unplanned_seconds(self, profile):
        """What the step takes that ours changes."""
        return profile.step_seconds if profile.is_compiled else self.rows[0]["seconds"]

    def in_turns(self, peer, engine, blocks):
        """A peer and ours, in its peak, one after the other and again."""
        with PEERS[peer](blocks):
            row = {**self.common, "method": peer, "rounds": self.options.rounds, **self._measured()}
            with switched_off(blocks):
                rivals = self.rivals(peer, engine, row.get("peak_bytes"))
            times = []
            for _ in range(self.options.rounds if rivals else 0):
                self.warmed(2)
                times += self.timed(self.options.timed)
                with switched_off(blocks):
                    for rival in rivals:
                        rival.take_turn(self)
            row |= self.kernels()
        self.note({**row, **(self.figures(times) if times else {})})
        for rival in rivals:
            rival.applied.remove()
            self.note({**rival.row, **self.figures(rival.times)})
        self.tidy()

    def rivals(self, peer, engine, budget):
        """Ours that take turns with a peer: each measured once, and set aside."""
        if engine not in self.profiles:
            self.profiles[engine] = self.profiled(engine=engine)
            self.note_forms(self.profiles[engine][0])
        profile, profile_seconds = self.profiles[engine]
        rivals = []
        for variant in self.options.variants:
            facts = {**choices_of(engine, variant), "at": peer, "rounds": self.options.rounds}
            facts["profile_seconds"] = profile_seconds
            applied = self.applied(profile, budget or self.budget_of(profile), facts)
            if applied is not None:
                row = {**self.common, "method": "leanstep", **facts}
                rivals.append(Rival(applied, {**row, **self._measured(), **self.kernels()}))
                applied.set_aside()
        return rivals

    def fitted(self, budget, facts):
        """As a user has it: with what a first measured step teaches, and planned again."""
        facts |= {"budget_bytes": budget, "is_fitted": True}
        start = time.perf_counter()
        ingredients = self.model, self.batch, self.loss
        choices = {"optimizer": self.optimizer, "engine": facts["engine"], "budget": budget}
        try:
            fitted = leanstep.fit(*ingredients, **choices)
        except leanstep.BudgetError as error:
            self.note({**self.common, "method": "leanstep", **facts, "failed": str(error)})
            return
        facts["fit_seconds"] = time.perf_counter() - start
        facts["predicted_peak_bytes"] = fitted.verdict.predicted_peak_bytes
        facts["predicted_seconds"] = fitted.verdict.predicted_seconds
        facts["host_bytes"] = fitted.plan.host_bytes
        facts["loss_rows"] = 0 if fitted.plan.loss is None else fitted.plan.loss.num_rows
        try:
            self.measure("leanstep", **facts)
        finally:
            fitted.remove()


def choices_of(engine, variant):
    """What a variant of ours is planned with."""
    return {
        "engine": engine,
        "exact": variant != "inexact",
        "offload": variant != "no-offload",
        "chunks": variant != "whole-loss",
    }


@dataclass
class Rival:
    """A plan of ours that takes turns with a peer."""

    applied: object
    row: dict
    times: list = field(default_factory=list)

    def take_turn(self, bench):
        self.applied.resume()
        bench.warmed(2)
        self.times += bench.timed(bench.options.timed)
        self.applied.set_aside()


# Which words in a kernel's name tell its kind; the first that fits counts.
KERNELS = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "convolutions": ("conv", "implicit", "wgrad", "dgrad", "fprop"),
    "optimizer": ("multi_tensor", "fused_adam"),
    "fused reductions": ("triton_red", "triton_per"),
    "fused elementwise": ("triton_poi", "triton_"),
    "reductions": ("reduce", "norm", "softmax", "gammabeta"),
    "others": ("",),
}


def kernel_kind(name):
    lower = name.lower()
    return next(kind for kind, words in KERNELS.items() if any(word in lower for word in words))


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure one model")
    run.add_argument("model", help=f"one of {', '.join(SIZES)}, or another built-in model")
    run.add_argument("--batch", type=int)
    run.add_argument("--seq", type=int)
    run.add_argument("--image", type=int)
    run.add_argument("--device", default="cuda")
    run.add_argument("--peers", nargs="*", choices=PEERS, default=["checkpoint", "every2"])
    run.add_argument("--engines", nargs="*", default=["replay"])
    run.add_argument("--shares", nargs="*", type=int, default=[], help="budgets in %% of the peak")
    run.add_argument(
        "--variants",
        nargs="*",
        choices=("exact", "inexact", "no-offload", "whole-loss", "fit"),
        default=["exact"],
        help="'fit' measures a step and plans again, as leanstep.fit does",
    )
    run.add_argument("--warm", type=int, default=WARM, help="steps before those that are timed")
    run.add_argument("--timed", type=int, default=TIMED)
    run.add_argument("--rounds", type=int, default=0, help="let each peer and ours take turns")
    run.add_argument("--kernels", action="store_true", help="say where the device's time goes")
    run.add_argument("--json", type=Path, help="append rows to this file")
    run.set_defaults(do=lambda options: Bench(options).run())
    shown = commands.add_parser("show", help="tables and a figure from rows")
    shown.add_argument("rows", type=Path)
    shown.add_argument("--figure", type=Path)
    shown.set_defaults(do=show)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    if getattr(options, "rounds", 0) and (
        "save_on_cpu" in options.peers or options.shares or {"inexact", "fit"} & {*options.variants}
    ):
        # Hooks of a peer's would take what ours saves; and only plans at the peaks of peers have
        # turns, all by one profile.
        sys.exit("--rounds is for exact plans at the peaks of peers other than save_on_cpu")
    options.do(options)
