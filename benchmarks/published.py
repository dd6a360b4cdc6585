"""Every figure that others have published about activation checkpointing, with ours beside it.

    python benchmarks/published.py --studies benchmarks/results/batch-study-*.jsonl \\
        --steps benchmarks/results/gpu-h200.jsonl --marks benchmarks/results/marks-h200.json \\
        --into docs/benchmarks.md

Ours are estimated for devices that need not be here, and beside that stands what was measured:
largest batches by `benchmarks/batch_study.py` (`--studies`, predicted and measured), steps by
`benchmarks/gpu.py`, marks by `benchmarks/marks.py`. Nobody published all that is needed to repeat a
figure; what was assumed stands in the row.
"""

import argparse
import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path

from batch_study import Model, study_of

import leanstep
from leanstep import models
from leanstep.study.textbook import textbook
from leanstep.units import format_change

MIB, GIB = 2**20, 2**30
# OneFlow's figures: MiB untouched and checkpointed, seconds likewise.
ONEFLOW_MIB = (9141, 5978)
ONEFLOW_SECONDS = (25 * 60 + 16, 33 * 60 + 36)

TITLE = "## Published figures, and ours\n"
HEAD = f"""{TITLE}
Made by `python benchmarks/published.py`. Estimated are fake tensors for memory and a roofline for
time; measured are steps on an H200 with the same model and batch, at the nearest budget that was
run and is no larger. "Host" is leanstep with activations waiting in pinned host memory, as in all
that was measured, "device" without (`offload=False`). All are plans with `exact=True`.
"""
TAIL = """
Nobody published all that is needed to repeat a figure. Assumed: for OneFlow, fp32, 128 tokens, a
fused AdamW, and the batch whose untouched step comes nearest to theirs; for the others, our own
ResNet-152 (224², channels last) and BERT-large (512 tokens) in bf16. "Memory" is the peak of the
whole step. VISSL's and Hugging Face's descriptions have no figures. Estimates are with the loss in
chunks; all that was measured is of before, with the loss as a whole. The largest batches measured
are those that were tried, in three calls, and held the bound; the next ones tried (275 untouched
and 758 planned, 124 planned) did not, and between them others may.
"""


@dataclass(frozen=True)
class Row:
    source: str
    published: str
    setting: str
    ours: str
    measured: str = "–"

    def __str__(self):
        cells = self.source, self.published, self.setting, self.ours, self.measured
        return f"| {' | '.join(cells)} |"


def oneflow_rows(marks):
    batch, known = oneflow_profile()
    share = ONEFLOW_MIB[1] / ONEFLOW_MIB[0]
    slower = ONEFLOW_SECONDS[1] / ONEFLOW_SECONDS[0] - 1
    setting = (
        f"`bert-large`, {batch} × 128 tokens, fp32, RTX 3090: {known.peak_bytes / MIB:.0f} MiB "
        "untouched; the same share"
    )
    yield Row(
        "OneFlow `nn.Graph`, BERT-large pre-training, RTX 3090",
        f"9141 → 5978 MB ({format_change(share - 1)}), time {format_change(slower)}",
        setting,
        both_ways(known, share),
    )
    every = leanstep.plan(
        known, known.peak_bytes, overrides={"layers.*": "recompute"}, engine="module", offload=False
    )
    yield Row(
        "",
        "the same switch on every layer",
        "as above, every layer recomputed whole, by our own estimate",
        f"{format_change(every.peak_bytes / known.peak_bytes - 1)} memory, "
        f"{format_change(every.extra_seconds / every.step_seconds)} time",
        "–"
        if not marks
        else f"{marks['batch']} × {marks['seq']} tokens, fp32, H200: "
        f"{format_change(marks['memory_change'])} memory, "
        f"{format_change(marks['time_change'])} time",
    )


def oneflow_profile():
    """The batch whose untouched step comes nearest to what OneFlow's had."""

    def profile(batch):
        make = functools.partial(models.build, "bert-large", batch=batch, seq=128, fused=True)
        return leanstep.profile(make, device="rtx3090")

    # In smaller steps the peak is the optimizer's, which does not grow.
    sizes = (16, 32)
    low, high = (profile(batch).peak_bytes for batch in sizes)
    batch = round(sizes[1] + (ONEFLOW_MIB[0] * MIB - high) * (sizes[1] - sizes[0]) / (high - low))
    return batch, profile(batch)


def share_rows(source, name, batch, shares, published, steps):
    known = leanstep.profile(functools.partial(Model(name), batch), device="h200")
    setting = f"`{name}` × {batch}, bf16, H200: {known.peak_bytes / GIB:.1f} GiB untouched"
    for share in shares:
        saved = f"{format_change(share - 1)} memory"
        found = measured_step(steps, name, batch, share)
        yield Row(source, f"{saved}, {published}", setting, both_ways(known, share), found)
        source = ""
    book = textbook(known)
    book_share = book.peak_bytes / known.peak_bytes
    yield Row(
        "`checkpoint_sequential`, tutorials",
        "memory toward √M, +15–25 % time",
        f"{setting}; at the textbook's peak for √n segments, {book.peak_bytes / GIB:.1f} GiB "
        f"(textbook's time {format_change(book.seconds / known.step_seconds - 1)})",
        both_ways(known, book_share),
        measured_step(steps, name, batch, book_share),
    )


def measured_step(steps, name, batch, share):
    """The nearest step that was measured in no more memory, against eager's of the same call."""
    eager = {step["call"]: step for step in steps if step["method"] == "eager"}
    fitting = []
    for step in steps:
        is_ours = step["method"] == "leanstep" and step["engine"] == "replay" and step["exact"]
        if not is_ours or step["model"] != name or step["sizes"]["batch"] != batch:
            continue
        untouched = eager[step["call"]]
        found = step["peak_bytes"] / untouched["peak_bytes"]
        if found <= share:
            fitting.append((found, step["seconds"] / untouched["seconds"] - 1))
    if not fitting:
        return "–"
    found, slower = max(fitting)
    return f"{format_change(found - 1)} memory, **{format_change(slower)}** time"


def both_ways(known, share):
    """What a budget of a share of the peak costs, with host memory and without."""
    return "; ".join(
        f"{word} {extra(known, share, offload=offload)}"
        for word, offload in (("host", True), ("device", False))
    )


def extra(known, share, *, offload):
    try:
        plan = leanstep.plan(known, int(share * known.peak_bytes), offload=offload)
    except leanstep.BudgetError as error:
        least = error.floor_bytes / known.peak_bytes - 1
        return f"refused (least {format_change(least)})"
    return f"**{format_change(plan.extra_seconds / plan.step_seconds)}**"


def batch_rows(studies):
    claims = {"resnet152": "2–2.5 ×", "bert-large": "up to 3 ×"}
    mark = " (estimated)"
    measured = {(s.model, s.device): gain(s) for s in studies if not s.device.endswith(mark)}
    for study in studies:
        if not study.device.endswith(mark):
            continue
        device = study.device.removesuffix(mark)
        yield Row(
            "Harvard's CS265 project, largest batch",
            f"{claims[study.model]}, +20–30 % time",
            f"`{study.model}`, bf16, {device}, budget {study.budget_bytes / GIB:.1f} GiB, at most "
            f"{format_change(study.max_slowdown)} time a sample",
            gain(study),
            measured.get((study.model, device), "–"),
        )


def gain(study):
    return (
        f"{study.untouched_batch} → {study.planned_batch}: **{study.gain:.2f} ×**, "
        f"{format_change(study.extra_share)} time a sample"
    )


def rows(args):
    marks = json.loads(args.marks.read_text()) if args.marks else {}
    steps = [json.loads(line) for line in args.steps.read_text().splitlines()] if args.steps else []
    yield from oneflow_rows(marks)
    published = "+20–30 % time"
    resnet = ("Harvard's CS265 project, ResNet", "resnet152", args.resnet_batch)
    yield from share_rows(*resnet, (0.55, 0.40), published, steps)
    bert = ("Harvard's CS265 project, Transformer", "bert-large", args.bert_batch)
    yield from share_rows(*bert, (0.50, 0.40, 0.30), published, steps)
    lines = [line for path in args.studies for line in path.read_text().splitlines()]
    yield from batch_rows([study_of(line) for line in lines])


def with_section(document, section):
    """A document with the section of this name made anew, up to the next one."""
    before, title, after = document.partition(TITLE)
    if not title:
        raise SystemExit(f"there is no section {TITLE.strip()!r} to write into")
    _, following, rest = after.partition("\n## ")
    return f"{before}{section}{following}{rest}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=Path, help="rows of gpu.py")
    parser.add_argument("--marks", type=Path, help="what marks.py has found")
    parser.add_argument("--resnet-batch", type=int, default=384)
    parser.add_argument("--bert-batch", type=int, default=64)
    parser.add_argument("--into", type=Path, help="the document that has the section")
    args = parser.parse_args()
    start = time.monotonic()
    table = [
        "| published by | published | our setting | ours, estimated | ours, measured |",
        "|---|---|---|---|---|",
        *(str(row) for row in rows(args)),
    ]
    text = "\n".join([HEAD, *table, TAIL])
    print(text)
    print(f"{time.monotonic() - start:.0f} s")
    if args.into is not None:
        args.into.write_text(with_section(args.into.read_text(), text))


if __name__ == "__main__":
    main()
