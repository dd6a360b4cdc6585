"""The loss in chunks: what it takes by itself, and what plans make of it.

    python benchmarks/loss_in_chunks.py time --device cuda      # the heads of the three models
    python benchmarks/loss_in_chunks.py time --device cpu --rows 512 --words 2000
    python benchmarks/loss_in_chunks.py plans                   # without a GPU

`time`: forward and backward of the loss alone, from logits to their gradient, as a whole and in
chunks of several sizes; all by turns, medians. What a chunk costs by itself is the difference
between two numbers of chunks, divided by it. `plans`: for the peaks of peers that were measured on
an H200, plans with the loss as a whole and in chunks, by profiles that are estimated for one. Times
are shares of the untouched step's.
"""

import argparse
import functools
import statistics
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from gpu_rows import SIZES, load
from torch.nn import functional

import leanstep
from leanstep import models
from leanstep.chunks import CHUNK_BYTES, FLOAT_BYTES, rows_in_chunk
from leanstep.engines.loss import Window
from leanstep.engines.stand_in import standing_in
from leanstep.ir import LossInChunks

HEADS = {
    "bert-large": (64 * 512, 30_522),
    "gpt2-medium": (32 * 1024, 50_257),
    "llama-1b": (16 * 2048, 128_256),
}
MIB = 2**20
RESULTS = Path(__file__).parent / "results" / "gpu-h200.jsonl"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    alone = commands.add_parser("time", help="the loss alone")
    alone.add_argument("--device", default="cuda")
    alone.add_argument("--rows", type=int)
    alone.add_argument("--words", type=int)
    alone.add_argument("--rounds", type=int, default=9)
    alone.add_argument("--chunks", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256])
    alone.set_defaults(do=time_alone)
    plans = commands.add_parser("plans", help="plans at the peaks of peers")
    plans.add_argument("--models", nargs="*", default=list(HEADS))
    plans.add_argument("--rows", type=Path, default=RESULTS, help="what gpu.py has measured")
    plans.set_defaults(do=show_plans)
    return parser.parse_args()


def computed(inputs, labels, num_rows):
    """The loss and the gradient; as a whole without a number of rows."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        # As a model has them: made in forward, and nobody's when backward comes.
        logits = inputs * 1.0
        with in_chunks(num_rows) if num_rows else nullcontext():
            loss = functional.cross_entropy(logits, labels)
    del logits
    return loss.detach(), torch.autograd.grad(loss, inputs)[0]


@contextmanager
def in_chunks(num_rows):
    """As a plan has it; a call that is left to torch is none of what is compared."""
    window = Window(LossInChunks("", num_rows, freed_bytes=0, extra_seconds=0.0))
    with standing_in(window.answer):
        yield
    assert window.runs == 1, f"not computed {num_rows} rows at a time"


def measured(logits, labels, num_rows):
    """Seconds, and bytes above what was there."""
    on_gpu = logits.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    computed(logits, labels, num_rows)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def compare(name, rows, words, options):
    torch.manual_seed(0)
    logits = torch.randn(rows, words, device=options.device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(words, (rows,), device=options.device)
    labels[::7] = -100
    ours = rows_in_chunk(rows, FLOAT_BYTES * rows * words)
    ways = {"whole": 0, f"ours ({CHUNK_BYTES // MIB} MiB)": ours}
    ways |= {f"{count} chunks": -(-rows // count // 16) * 16 for count in options.chunks}
    whole = computed(logits, labels, 0)
    bits = {}
    for way, num_rows in ways.items():
        found = computed(logits, labels, num_rows)
        bits[way] = all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    del whole, found
    taken = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, num_rows in ways.items():
            taken[way].append(measured(logits, labels, num_rows))
    print(f"{name}: {rows} × {words}, logits {logits.nbytes / MIB:.0f} MiB")
    for way, num_rows in ways.items():
        seconds = statistics.median(one[0] for one in taken[way])
        peak = f"{max(one[1] for one in taken[way]) / MIB:.0f} MiB" if logits.is_cuda else "–"
        same = "same bits" if bits[way] else "OTHER BITS"
        print(f"  {way:20} {num_rows:6} rows {seconds * 1e3:9.2f} ms {peak:>12}  {same}")


def time_alone(options):
    own = {"these": (options.rows, options.words)} if options.rows else HEADS
    for name, (rows, words) in own.items():
        compare(name, rows, words, options)


def show_plans(options):
    measured = load(options.rows)
    print("| model | at the peak of | peer | as a whole | **in chunks** | ours / peer |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        factory = functools.partial(models.build, name, autocast="bf16", **SIZES[name])
        profile = leanstep.profile(factory, device="h200")
        for peer in ("checkpoint", "every2"):
            seconds, share = peers_row(measured, name, peer)
            budget = int(share * profile.peak_bytes)
            whole, chunked = (planned(profile, budget, chunks=chunks) for chunks in (False, True))
            ratio = "–" if chunked is None else f"{chunked / seconds:.3f}"
            cells = (f"{one:.3f}" if one else "refused" for one in (seconds, whole, chunked))
            print(f"| {name} | {peer}, {share:.3f} | {' | '.join(cells)} | {ratio} |", flush=True)
        whole, chunked = (f"{floor(profile, chunks):.3f}" for chunks in (False, True))
        print(f"| {name} | least peak | – | {whole} | {chunked} | – |")


def peers_row(rows, model, peer):
    """The last measured time and peak of a peer at full size, as shares of eager's in that call."""
    own = [row for row in rows if row["model"] == model and row["sizes"] == SIZES[model]]
    row = next(row for row in reversed(own) if row["method"] == peer)
    eager = next(r for r in own if (r["call"], r["method"]) == (row["call"], "eager"))
    return row["seconds"] / eager["seconds"], row["peak_bytes"] / eager["peak_bytes"]


def planned(profile, budget, *, chunks):
    """The step's time as a share of the untouched one's; None where no plan fits."""
    try:
        plan = leanstep.plan(profile, budget, chunks=chunks)
    except leanstep.BudgetError:
        return None
    return 1 + plan.extra_seconds / profile.step_seconds


def floor(profile, chunks):
    try:
        leanstep.plan(profile, 1, chunks=chunks)
    except leanstep.BudgetError as error:
        return error.floor_bytes / profile.peak_bytes


def main():
    options = arguments()
    options.do(options)


if __name__ == "__main__":
    main()
