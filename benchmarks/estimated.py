"""Profile full-size models for a GPU that is not there, and compare with what was measured on one.

    python benchmarks/estimated.py -o profiles
    python benchmarks/estimated.py bert-large --device a100-80gb

One process a model: seconds to profile, growth of the process, estimated peak and step time. The
measured figures are of an H200 with bf16 autocast and fused AdamW; where a model was measured that
differs from ours, a note says how.
"""

import argparse
import multiprocessing
import resource
import time
from pathlib import Path

import torch

import leanstep
from leanstep import models
from leanstep.devices import known_devices
from leanstep.models.tasks import make_task
from leanstep.models.transformer import GPT2Sizes

GIB = 2**30

# Rows, then what was measured: GiB, seconds, and how that model differs.
MODELS = {
    "resnet152": (384, 33.3, 0.165, ""),
    "bert-large": (64, 42.78, 0.210, ""),
    "gpt2-medium": (32, None, None, "Transformers' has GELU in eight ops: 90.9 GiB, 451 ms"),
    "llama-1b": (16, None, None, "with a quarter of the vocabulary: 89.8 GiB, 580 ms"),
    "decoder96": (8, None, None, "GPT-2 of 96 layers, 1024 wide"),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="all of them by default")
    parser.add_argument("--device", default="h200", choices=sorted(known_devices()))
    parser.add_argument("-o", "--output", type=Path, help="save the profiles in this folder")
    return parser.parse_args()


def build(name):
    rows = MODELS[name][0]
    if name == "resnet152":
        model, batch, loss, optimizer = models.build(name, batch=rows, autocast="bf16", fused=True)
        last = {"memory_format": torch.channels_last}
        return model.to(**last), batch.to(**last), loss, optimizer
    if name != "decoder96":
        return models.build(name, batch=rows, autocast="bf16", fused=True)
    sizes = GPT2Sizes(width=1024, depth=96, heads=16, inner=4096, vocabulary=50_257, positions=1024)
    model, batch, loss = make_task(sizes, rows, 1024, torch.device("cpu"))

    def autocast_loss(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return loss(model, batch)

    return model, batch, autocast_loss, torch.optim.AdamW(model.parameters(), fused=True)


def profile(name, device, output):
    """Profile one model; the row of the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = leanstep.profile(lambda: build(name), device=device)
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        found.save(output / f"{name}.json")
    rows, peak, step, note = MODELS[name]
    against = ""
    if peak is not None and device == "h200":
        ratios = found.peak_bytes / GIB / peak - 1, found.step_seconds / step - 1
        against = f"{peak:.1f} GiB ({ratios[0]:+.1%}), {1e3 * step:.0f} ms ({ratios[1]:+.1%})"
    print(
        f"| {name} × {rows} | {seconds:.1f} s | {grown / 1024:.0f} MiB | {len(found.graph.ops)} "
        f"| {found.peak_bytes / GIB:.2f} GiB | {1e3 * found.step_seconds:.0f} ms "
        f"| {against} | {note} |",
        flush=True,
    )


def main():
    options = arguments()
    print("| model | to profile | process grew | ops | peak | step | measured | note |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    context = multiprocessing.get_context("spawn")
    for name in options.models or MODELS:
        worker = context.Process(target=profile, args=(name, options.device, options.output))
        worker.start()
        worker.join()


if __name__ == "__main__":
    main()
