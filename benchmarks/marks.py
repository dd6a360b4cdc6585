"""BERT-large with every layer marked, beside the figures published for OneFlow's switch.

    python benchmarks/marks.py --device cuda

There: pre-training on an RTX 3090, 9141 to 5978 MB and 25 min 16 s to 33 min 36 s. Another machine
and another batch have other bytes and seconds; what can be compared are the shares.
"""

import argparse
import json
from pathlib import Path

import leanstep
from leanstep import models
from leanstep.units import format_bytes

PUBLISHED = {"memory": 5978 / 9141 - 1, "time": (33 * 60 + 36) / (25 * 60 + 16) - 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write what was found, for published.py")
    options = parser.parse_args()
    size = {"batch": options.batch, "seq": options.seq, "device": options.device}
    model, batch, loss, optimizer = models.build(options.model, **size)
    for layer in model.layers:
        leanstep.recompute(layer)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="100%", offload=False)

    verdict = fitted.verdict
    print(f"{options.model}, batch {options.batch}, {options.seq} tokens, every layer marked")
    rows = (
        ("memory", verdict.baseline_peak_bytes, verdict.measured_peak_bytes, format_bytes),
        ("time", verdict.baseline_seconds, verdict.measured_seconds, lambda s: f"{s:.3f} s"),
    )
    for name, before, after, text in rows:
        change = f"{after / before - 1:+.1%}"
        print(
            f"  {name:6}  {text(before):>12} to {text(after):>12}  {change:>7}"
            f"   published {PUBLISHED[name]:+.1%}"
        )
    print(f"  gradients bit-equal: {verdict.gradients_equal}")
    if options.json is not None:
        found = {
            "model": options.model,
            "batch": options.batch,
            "seq": options.seq,
            "device": fitted.profile.device,
            "torch": fitted.profile.torch_version,
            "memory_change": verdict.measured_peak_bytes / verdict.baseline_peak_bytes - 1,
            "time_change": verdict.slowdown - 1,
            "gradients_bit_equal": verdict.gradients_equal,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
