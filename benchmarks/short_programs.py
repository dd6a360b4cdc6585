"""What Inductor's programs cost the CPU: called as torch does, and past what they have seen to.

    python benchmarks/short_programs.py --device cuda
    python benchmarks/short_programs.py --width 4 --image 4 --blocks 3    # a try without a GPU

ResNet's bottlenecks, which share one compiled form, forward and backward under bf16 autocast. Both
ways take turns in one process, and their numbers are compared. A JSON object for each, then the
microseconds of the CPU for a block. On the CPU kernels are C++ and called the same way either way:
only checks are left out.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import torch

from leanstep.engines.inductor import CompiledForm
from leanstep.models.resnet import Bottleneck
from leanstep.torch_private.programs import ShortProgram, _launcher


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=35)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--image", type=int, default=14)
    parser.add_argument("--batch", type=int, default=8, help="small: the CPU alone is asked for")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="of each way in a round")
    return parser.parse_args()


class Blocks:
    """A row of equal compiled blocks, and the programs that they run by."""

    def __init__(self, options):
        self.device = torch.device(options.device)
        torch.manual_seed(0)
        channels = 4 * options.width
        self.blocks = [
            Bottleneck(channels, options.width, 1).to(self.device) for _ in range(options.blocks)
        ]
        shape = options.batch, channels, options.image, options.image
        self.batch = torch.randn(shape, device=self.device, requires_grad=True)
        self.form = CompiledForm(Bottleneck.forward, (), {})
        self.forward_seconds = self.seconds = 0.0

    def step(self):
        """Forward and backward, and what they give; how long the CPU took to issue each."""
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16):
            x = self.batch
            for block in self.blocks:
                x = self.form(block, (x,), {})
        self.forward_seconds = time.perf_counter() - start
        parameters = [p for block in self.blocks for p in block.parameters()]
        found = torch.autograd.grad(x.float().mean(), [self.batch, *parameters])
        self.seconds = time.perf_counter() - start
        return x, *found

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def programs():
    """Those that there are, each with what it calls from its second call on."""
    found = [held for held in gc.get_objects() if type(held) is ShortProgram]
    return {program: program._short for program in found}


def known_kernels():
    """How many kernels of Triton's are launched with no questions, of those that have run."""
    loaded = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    kind = getattr(loaded, "CachingAutotuner", None)
    kernels = [held for held in gc.get_objects() if type(held) is kind and held.launchers]
    return f"{sum(_launcher(kernel) is not None for kernel in kernels)} of {len(kernels)}"


def called(short, way):
    for program, own in short.items():
        program._short = program._compiled if way == "torch" else own


def main():
    options = arguments()
    blocks = Blocks(options)
    for _ in range(5):
        blocks.step()
    short = programs()
    shortened = sum(own is not program._compiled for program, own in short.items())
    times = {"torch": [], "short": []}
    numbers = {}
    for _ in range(options.rounds):
        for way, found in times.items():
            called(short, way)
            blocks.step()
            for _ in range(options.steps):
                blocks.synchronize()
                numbers[way] = blocks.step()
                found.append((blocks.forward_seconds, blocks.seconds))
    is_same = all(map(torch.equal, numbers["torch"], numbers["short"]))
    rows = []
    for way, found in times.items():
        forward, both = (1e6 * statistics.median(column) for column in zip(*found, strict=True))
        row = {
            "programs": way,
            "shortened": f"{shortened} of {len(short)}",
            "forward_us": round(forward / options.blocks, 1),
            "backward_us": round((both - forward) / options.blocks, 1),
            "known_kernels": known_kernels(),
            "same_bits": is_same,
            "torch": torch.__version__,
            **vars(options),
        }
        rows.append(row)
        print(json.dumps(row))
    for row in rows:
        print(
            f"{row['programs']:6} {row['forward_us']:7.1f} + {row['backward_us']:7.1f} us a block"
        )
    long, own = (row["forward_us"] + row["backward_us"] for row in rows)
    print(
        f"short programs {own / long:.3f} of torch's, {rows[0]['shortened']}; same bits: {is_same}"
    )


if __name__ == "__main__":
    main()
