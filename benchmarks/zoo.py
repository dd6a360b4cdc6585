"""Fit many architectures, and compare seven training steps of each with an untouched twin.

    python benchmarks/zoo.py --json benchmarks/results/zoo.jsonl --docs docs/zoo.md
    python benchmarks/zoo.py --only bert --only mamba

Each architecture: record a step, take the midpoint between its least reachable and its unplanned
peak as the budget, fit, train seven steps with dropout on, and compare loss, gradients, buffers,
random states and parameters bit for bit with a twin that was never touched. Each runs in a process
of its own with a time limit. What is already in the file of `--json` is not run again.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from zoo_models import CATALOGUE, Entry, MissingError
from zoo_report import BAD, REFUSED, saved_share, summary, write_page

import leanstep

__all__ = ["CATALOGUE", "Entry", "examine"]

NUM_STEPS = 7
MOST_SECONDS = 240
# The promise: predicted and measured peak are this close.
TOLERANCE = 0.02
# A smaller saving than this is none.
LEAST_SAVING = 0.01


class BrokenError(Exception):
    """The architecture cannot be trained with these versions, with or without leanstep."""


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python benchmarks/zoo.py --only bert --only mamba --json zoo.jsonl",
    )
    parser.add_argument("--list", action="store_true", help="name the architectures and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="just this one; repeatable")
    parser.add_argument("--json", type=Path, help="where rows are kept; those there are not rerun")
    parser.add_argument("--again", action="store_true", help="rerun what is in the file")
    parser.add_argument("--docs", type=Path, help="write the table as Markdown to this file")
    parser.add_argument("--limit", type=int, default=MOST_SECONDS, help="seconds an architecture")
    return parser.parse_args()


def examine(entry):
    """Fit one architecture and compare; returns a row, whatever happens."""
    start = time.perf_counter()
    row = {"name": entry.name, "family": entry.family, "model": entry.model}
    try:
        row |= judge(entry, row)
    except MissingError as error:
        row |= {"result": "missing", "reason": str(error)}
    except BrokenError as error:
        row |= {"result": "does not train", "reason": f"untouched, it raises {error}"}
    except leanstep.LeanstepError as error:
        row |= {"result": "refused", "reason": f"{type(error).__name__}: {error}"}
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        row |= {"result": "crash", "reason": f"{type(error).__name__}: {error}", "trace": trace}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def judge(entry, row):
    expected = untouched_steps(entry)
    model, batch, loss, optimizer = build(entry)
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer)
    floor = floor_of(profile)
    budget = (floor.floor_bytes + profile.peak_bytes) // 2
    row |= {
        "blocks": len(profile.blocks),
        "peak_bytes": profile.peak_bytes,
        "floor_bytes": floor.floor_bytes,
        "budget_bytes": budget,
        "at": f"{floor.op} in {floor.module or 'the model'} ({floor.source})",
    }
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)
    verdict = fitted.verdict
    different = [*verdict.different, *compare(expected, train(model, batch, loss, optimizer))]
    if different and compare(expected, train(*build(entry))):
        reason = "two untouched twins from one seed differ: it draws fresh seeds as it runs"
        return {"result": "not repeatable", "reason": reason}
    row |= {
        "engines": Counter(decision.engine.value for decision in fitted.plan.decisions),
        "baseline_bytes": verdict.baseline_peak_bytes,
        "predicted_bytes": verdict.predicted_peak_bytes,
        "measured_bytes": verdict.measured_peak_bytes,
        "slowdown": verdict.measured_seconds / verdict.baseline_seconds,
        "different": different[:5],
    }
    return found(row)


def untouched_steps(entry):
    try:
        return train(*build(entry))
    except MissingError:
        raise
    except Exception as error:
        raise BrokenError(f"{type(error).__name__}: {error}") from error


def found(row):
    """The row's result, the worst first."""
    predicted, measured = row["predicted_bytes"], row["measured_bytes"]
    if row["different"]:
        return {"result": "wrong numbers", "reason": ", ".join(row["different"])}
    if measured > row["budget_bytes"]:
        over = measured - row["budget_bytes"]
        return {"result": "over budget", "reason": f"measured {over:,} bytes above the budget"}
    if abs(predicted - measured) > TOLERANCE * measured:
        return {"result": "prediction off", "reason": f"by {predicted / measured - 1:+.1%}"}
    if saved_share(row) < LEAST_SAVING:
        return {"result": "no saving", "reason": f"the least reachable peak is at {row['at']}"}
    return {"result": "exact", "reason": ""}


def floor_of(profile):
    """The error that names the least reachable peak."""
    try:
        plan = leanstep.plan(profile, 1)
    except leanstep.BudgetError as error:
        return error
    raise AssertionError(f"a plan of {plan.peak_bytes} bytes in a budget of one")


def build(entry):
    """A model with its batch, loss and optimizer: the same at every call."""
    seed(0)
    model, batch, loss = entry.build()
    return model, batch, loss, torch.optim.AdamW(model.parameters(), lr=1e-3)


def seed(number):
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def train(model, batch, loss, optimizer):
    """What each of a few steps leaves behind."""
    seed(1)
    steps = []
    for _ in range(NUM_STEPS):
        value = loss(model, batch)
        value.backward()
        seen = {"the loss": value.detach().clone(), "random state": torch.get_rng_state()}
        seen |= {"other random states": str((random.getstate(), numpy.random.get_state()))}
        seen |= {f"gradient of {n}": copy(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen |= {f"buffer {n}": copy(b) for n, b in model.named_buffers()}
        seen |= {f"parameter {n}": copy(p) for n, p in model.named_parameters()}
        steps.append(seen)
        del value
    return steps


def copy(tensor):
    return None if tensor is None else tensor.detach().clone()


def compare(expected, got):
    """Names of what is not bit-equal."""
    return [
        f"{name} in step {place}"
        for place, (old, new) in enumerate(zip(expected, got, strict=True))
        for name in dict.fromkeys([*old, *new])
        if not same(old.get(name), new.get(name))
    ]


def same(old, new):
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return old is new or (isinstance(old, str) and old == new)
    if (old.shape, old.dtype, old.layout) != (new.shape, new.dtype, new.layout):
        return False
    if old.layout is torch.sparse_coo:
        old, new = old.coalesce(), new.coalesce()
        return same(old.indices(), new.indices()) and same(old.values(), new.values())
    return torch.equal(raw(old), raw(new))


def raw(tensor):
    """The bits: NaN equals itself, and 0 is not -0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def examine_apart(name, limit, context):
    """The row of one architecture, from a process of its own."""
    row = {"name": name, "family": CATALOGUE[name].family, "model": CATALOGUE[name].model}
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=examine_here, args=(name, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            return receiver.recv()
        return row | {"result": "timeout", "reason": f"not done in {limit} s"}
    except EOFError:
        process.join()
        return row | {"result": "crash", "reason": f"the process left with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def examine_here(name, sender):
    # What a library warns of is no row's business.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sender.send(examine(CATALOGUE[name]))


def read_rows(path):
    if path is None or not path.exists():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    return {row["name"]: row for row in rows}


def sweep(names, rows, options, console):
    versions = versions_here()
    # Its processes start from one that has loaded the libraries and done nothing else.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo_models", "transformers.modeling_utils"])
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            row = examine_apart(name, options.limit, context) | versions
            rows[name] = row
            if options.json:
                options.json.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
            note = row["reason"] if row["result"] != "exact" else f"saved {saved_share(row):.0%}"
            console.print(
                f"{name}: {row['result']}, {note}", highlight=False, markup=False, soft_wrap=True
            )
            progress.advance(task)


def versions_here():
    from importlib.metadata import version

    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "leanstep": leanstep.__version__,
    }


def show(rows, console):
    table = Table("architecture", "family", "blocks", "saved", "result", "reason")
    for row in rows:
        if row["result"] in (*BAD, *REFUSED):
            blocks, saved = str(row.get("blocks", "–")), f"{saved_share(row):.0%}"
            table.add_row(
                row["name"], row["family"], blocks, saved, row["result"], row["reason"][:200]
            )
    if table.row_count:
        console.print(table)
    console.print(summary(rows))


def main():
    options = arguments()
    unknown = [name for name in options.only or [] if name not in CATALOGUE]
    if unknown:
        sys.exit(f"no architecture is called {', '.join(unknown)}: see --list")
    names = options.only or list(CATALOGUE)
    if options.list:
        print("\n".join(f"{CATALOGUE[name].family:20} {name}" for name in names))
        return
    # Steps this small are faster on one thread, and times do not depend on the machine's cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console()
    rows = read_rows(options.json)
    sweep([n for n in names if options.again or n not in rows], rows, options, console)
    shown = [rows[name] for name in CATALOGUE if name in rows]
    show(shown, console)
    if options.docs:
        write_page(options.docs, shown)
        console.print(f"wrote {options.docs}")


if __name__ == "__main__":
    main()
