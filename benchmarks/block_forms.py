"""One kind of block under some settings of Inductor: bits, launches, CPU and device time.

    python benchmarks/block_forms.py --device cuda --settings plain joined
    python benchmarks/block_forms.py --device cuda --settings plain steady deterministic --forms 6
    python benchmarks/block_forms.py --settings plain unchecked        # a try without a GPU

The block is a bottleneck of ResNet-152's third stage at batch 384 (small without a GPU). Under each
of the settings it is compiled as torch would, in forms that compute again inside backward, and in
forms that rebuild apart. Bits are compared with the first form under the same settings, and that
with the first under the first settings. Forms take turns in all that is timed. One JSON object a
form as soon as it is compiled, then a table.
"""

import argparse
import json
import statistics
import time

import torch

from leanstep.engines.inductor import JOINED, PRECISE, CompiledForm
from leanstep.forms import costs, cuts
from leanstep.forms.capture import capture
from leanstep.forms.kinds import Example
from leanstep.forms.pointwise import pointwise_again
from leanstep.forms.trial import Trial
from leanstep.models.resnet import Bottleneck
from leanstep.step.outcome import same

SETTINGS = {
    "plain": {},
    "joined": JOINED,
    "joined-pointwise": {**JOINED, "combo_kernels_pointwise_only": True},
    # Sums in blocks that the size decides, not what else is fused into the kernel.
    "steady": {"dynamic_scale_rblock": False},
    "deterministic": {"deterministic": True},
    "unchecked": {"size_asserts": False},
}


def example_on(device):
    torch.manual_seed(0)
    width, batch, side = (256, 384, 14) if device.type == "cuda" else (8, 2, 8)
    module = Bottleneck(4 * width, width, 1).to(device, memory_format=torch.channels_last)
    x = torch.randn(batch, 4 * width, side, side, device=device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    return Example(module, (), (x,), {}, ((device.type, True, torch.bfloat16),))


def candidates(joint, device, most):
    """The first form, those that compute again in backward, those that rebuild apart."""
    seconds = costs.node_seconds(joint, device)
    first = cuts.unplanned(joint)
    fused = cuts.candidates(joint, seconds, first, most)
    least = next(iter(pointwise_again(joint, first)), first)
    whole = cuts.with_seeds(joint, least)
    written = costs.with_writing(joint, seconds, whole.kept, device)
    return [first, least, *fused, *cuts.candidates_apart(joint, written, whole, most)]


class Bench:
    def __init__(self, options):
        self.options, self.device = options, torch.device(options.device)
        self.example = example_on(self.device)
        self.rows, self.forms, self.firsts, self.gradients = [], [], [], []

    def run(self):
        for name in self.options.settings:
            settings = {**PRECISE, **SETTINGS[name]}
            joint = capture(self.example, settings)
            trial = Trial(self.example, self.device)
            trial._gradients = self.gradients
            for candidate in candidates(joint, self.device, self.options.forms):
                self.try_form(trial, name, settings, candidate)
        self.time_all(trial)
        for row in self.rows:
            figures = (row["issue_us"], row["device_us"], row.get("launches", ""))
            bits = "same" if row["exact"] else f"differ: {row['differ']}"
            print(f"{row['settings']:16} {row['form']:24} {row['mib']:6.0f} MiB", *figures, bits)

    def try_form(self, trial, name, settings, candidate):
        forward = self.example.subject[1]
        form = CompiledForm(forward, candidate.kept, settings, candidate.whole)
        start = time.perf_counter()
        try:
            figures = trial.measure(form)
        except RuntimeError as error:
            print(f"{name}, {candidate.name}: {type(error).__name__}: {str(error)[:300]}")
            return
        self.gradients = trial._gradients
        with trial._in_place():
            numbers = trial._numbers(form)
        first = not any(row["settings"] == name for row in self.rows)
        if first:
            self.firsts.append(numbers)
        expected = self.firsts[0] if first else self.firsts[-1]
        pairs = zip(expected, numbers, strict=True)
        row = {
            "settings": name,
            "form": candidate.name,
            "mib": sum(figures.saves) / 2**20,
            "exact": figures.exact,
            # The output first, then the gradients of the input and of all parameters.
            "differ": [n for n, (a, b) in enumerate(pairs) if not same(a, b)],
            "compile_seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        self.forms.append(form)

    def time_all(self, trial):
        issued = [[] for _ in self.forms]
        with trial._in_place():
            for _ in range(self.options.rounds):
                for form, own in zip(self.forms, issued, strict=True):
                    own += [trial._issue_seconds(form) for _ in range(3)]
            for row, form in zip(self.rows, self.forms, strict=True):
                if self.device.type == "cuda":
                    row["launches"] = self.launches(trial, form)
        for row, own, seconds in zip(self.rows, issued, trial.race(self.forms), strict=True):
            row["issue_us"] = [
                round(1e6 * statistics.median(part)) for part in zip(*own, strict=True)
            ]
            row["device_us"] = [round(1e6 * part) for part in seconds]

    def launches(self, trial, form):
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            trial._backward(trial._forward(form))
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_device for event in profiler.events())


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["plain", "joined"])
    parser.add_argument("--forms", type=int, default=4, help="of each sort, beside torch's two")
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    Bench(arguments()).run()
