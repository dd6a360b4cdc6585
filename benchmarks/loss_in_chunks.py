"""A cross entropy as a whole and in chunks: time, peak and bits, for chunks of several sizes.

    python benchmarks/loss_in_chunks.py --device cuda          # the heads of the three models
    python benchmarks/loss_in_chunks.py --device cpu --rows 512 --words 2000

Forward and backward of the loss alone, from logits to their gradient; all by turns, medians. What a
chunk costs by itself is the difference between two numbers of chunks, divided by it.
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional

from leanstep.chunks import CHUNK_BYTES, FLOAT_BYTES, rows_in_chunk
from leanstep.engines import loss as engine

HEADS = {
    "bert-large": (64 * 512, 30_522),
    "gpt2-medium": (32 * 1024, 50_257),
    "llama-1b": (16 * 2048, 128_256),
}
MIB = 2**20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--words", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256])
    return parser.parse_args()


def computed(inputs, labels, num_rows):
    """The loss and the gradient; as a whole without a number of rows."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        # As a model has them: made in forward, and nobody's when backward comes.
        logits = inputs * 1.0
        if num_rows:
            loss = engine._by_rows(num_rows, logits, labels)
        else:
            loss = functional.cross_entropy(logits, labels)
    del logits
    return loss.detach(), torch.autograd.grad(loss, inputs)[0]


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


def main():
    options = arguments()
    own = {"these": (options.rows, options.words)} if options.rows else HEADS
    for name, (rows, words) in own.items():
        compare(name, rows, words, options)


if __name__ == "__main__":
    main()
