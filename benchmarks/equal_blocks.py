"""A stack of equal bottlenecks, ours beside regional Inductor: one kind of block to compile.

    python benchmarks/equal_blocks.py --peers regional-0.2 --kernels
    python benchmarks/equal_blocks.py --device cpu --rounds 10    # the CPU's part, without a GPU

Most of ResNet-152's blocks are these (1024 channels, 14 x 14 pixels, at batch 384), and to issue
its forward takes the CPU longer than the device takes to run it. Without a GPU the tensors are
tiny: what is timed is then what Python and torch do around kernels, and little else. A peer and
ours take turns, as in `gpu.py run --rounds`, whose rows and lines these are.
"""

import argparse
from pathlib import Path

import torch

import leanstep
from gpu import PEERS, Bench
from leanstep.models.resnet import Bottleneck


class Stack(torch.nn.Module):
    def __init__(self, num_blocks, width):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            Bottleneck(4 * width, width, 1) for _ in range(num_blocks)
        )
        self.classes = torch.nn.Linear(4 * width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean((2, 3)))


class EqualBlocks(Bench):
    def sizes(self):
        return {"blocks": self.options.blocks, "batch": self.options.batch, "image": 14}

    def build(self, sizes):
        device, is_cuda = self.device, self.device.type == "cuda"
        torch.manual_seed(0)
        width, side, batch = (256, 14, sizes["batch"]) if is_cuda else (8, 4, 2)
        model = Stack(sizes["blocks"], width).to(device)
        # As from a block before them: what autocast makes of it, in need of a gradient.
        images = torch.randn(batch, 4 * width, side, side, dtype=torch.bfloat16, device=device)

        def loss(model, images):
            with torch.autocast(device.type, torch.bfloat16):
                return model(images).float().square().mean()

        optimizer = torch.optim.AdamW(model.parameters(), fused=is_cuda)
        return model, images.requires_grad_(), loss, optimizer

    def budget_of(self, profile):
        try:
            leanstep.plan(profile, 1, engine="inductor")
        except leanstep.BudgetError as error:
            return int(error.floor_bytes + 0.1 * (profile.peak_bytes - error.floor_bytes))


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=35)
    parser.add_argument("--batch", type=int, default=384, help="with a GPU")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["regional-0.2"])
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--timed", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="say where the device's time goes")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    parser.set_defaults(model="equal-blocks", engines=["inductor"])
    return parser.parse_args()


if __name__ == "__main__":
    EqualBlocks(arguments()).run()
