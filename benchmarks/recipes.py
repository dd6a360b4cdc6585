"""Try every cheap replay on a device: are its bits the op's, and what does it save?

    python benchmarks/recipes.py                      # the CPU
    python benchmarks/recipes.py --device cuda        # cuDNN's batch norm too

One line for each op, type and shape. `exact` is what the profiler would write down: with `no`, a
plan uses the recipe only under `exact=False`; with `none` the recipe does not run here.
"""

import argparse

import torch

from leanstep.profiler.measure import forked, made_up, median_run_seconds
from leanstep.profiler.recipes import dry_run
from leanstep.recorder.signatures import Signatures
from leanstep.units import format_seconds

DROPOUT_SHAPES = [(64, 512, 1024), (7, 33, 129)]
IMAGE_SHAPES = [(128, 64, 112, 112), (128, 256, 56, 56), (128, 2048, 7, 7), (3, 5, 7, 9)]
RATES = (0.1, 0.2, 0.37, 0.5)
SMALL = {(64, 512, 1024): (8, 128, 256)} | {s: (8, *s[1:]) for s in IMAGE_SHAPES[:3]}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def spec_of(func, *args):
    signatures = Signatures()
    signatures.add(func, args, {})
    return signatures.specs[0]


def dropout_calls(device, dtype, shapes):
    for shape in shapes:
        x = torch.empty(shape, dtype=dtype, device=device)
        for rate in RATES:
            spec = spec_of(torch.ops.aten.native_dropout.default, x, rate, True)
            yield f"native_dropout {rate}", shape, spec


def batch_norm_calls(device, dtype, shapes):
    kinds = {"native_batch_norm": torch.ops.aten.native_batch_norm.default}
    if device == "cuda":
        kinds["cudnn_batch_norm"] = torch.ops.aten.cudnn_batch_norm.default
    for name, func in kinds.items():
        for shape in shapes:
            # Under autocast the images are of half precision, the parameters are not.
            channels = [torch.empty(shape[1], device=device) for _ in range(4)]
            for layout in (torch.contiguous_format, torch.channels_last):
                x = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
                said = "" if layout is torch.contiguous_format else ", channels last"
                yield name + said, shape, spec_of(func, x, *channels, True, 0.1, 1e-5)


def op_seconds(spec, device):
    with torch.no_grad(), forked(device):
        args, kwargs = made_up(spec)
        return median_run_seconds(lambda: spec.func(*args, **kwargs), device)


def report(device, name, dtype, shape, spec):
    found = dry_run(spec, device)
    exact = "none" if found is None else "yes" if found.exact else "no"
    line = f"{name:36} {str(dtype)[6:]:9} {'x'.join(map(str, shape)):16} exact {exact:5}"
    if found is not None:
        seconds = op_seconds(spec, device)
        share = f"{found.seconds / seconds:.2f} of the op"
        line += f" {format_seconds(found.seconds)}, {share}, workspace {found.workspace_bytes}"
    print(line, flush=True)


def main():
    options = arguments()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    print(f"torch {torch.__version__} on {name}")
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    for calls, shapes in ((dropout_calls, DROPOUT_SHAPES), (batch_norm_calls, IMAGE_SHAPES)):
        chosen = shapes if on_gpu else [SMALL.get(shape, shape) for shape in shapes]
        for dtype in dtypes:
            for found in calls(options.device, dtype, chosen):
                report(device, found[0], dtype, *found[1:])


if __name__ == "__main__":
    main()
