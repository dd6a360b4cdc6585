"""Every solver on saved profiles: extra time, gap and planning time over the range of budgets.

    python benchmarks/planning.py profiles/*.json --json benchmarks/results/planning.jsonl

Ten budgets between the floor of `optimal` and the unplanned peak, with the loss as a whole. The
planning time of `optimal` is that of `leanstep.plan` from the loaded profile, anew for each budget;
for the others it is that of one budget in a prepared space, and the first includes what a solver
works out once. `milp` has a time limit and three budgets; `exhaustive` is for small steps and left
out. Needs no torch. One JSON object a solver and budget, then a table a profile.
"""

import argparse
import json
import time
from pathlib import Path

from leanstep.errors import BudgetError
from leanstep.ir import Profile
from leanstep.planner import plan_in, prepare
from leanstep.planner.bounds import relaxed_seconds
from leanstep.solvers.milp import Milp
from leanstep.solvers.registry import SOLVERS
from leanstep.units import format_bytes

NUM_BUDGETS = 10
MILP_SECONDS = 20.0
MILP_PLACES = (0, NUM_BUDGETS // 2, NUM_BUDGETS - 2)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--solvers", nargs="*", help="just these")
    parser.add_argument("--budgets", type=int, default=NUM_BUDGETS)
    return parser.parse_args()


def solvers(names):
    chosen = [solver for solver in SOLVERS if solver.name not in ("milp", "exhaustive")]
    chosen.append(Milp(most_seconds=MILP_SECONDS))
    return [solver for solver in chosen if not names or solver.name in names]


def budgets_of(space, count):
    try:
        low = plan_in(space, 1, chunks=False).peak_bytes
    except BudgetError as error:
        low = error.floor_bytes
    high = space.profile.peak_bytes
    return [low + (high - low) * place // (count - 1) for place in range(count)]


def row_of(space, solver, budget_bytes, common):
    start = time.perf_counter()
    try:
        if solver.name == "optimal":
            space = prepare(space.profile)
        plan = plan_in(space, budget_bytes, solver=solver, chunks=False)
        seconds = time.perf_counter() - start
        found = {
            "planning_seconds": seconds,
            "extra_percent": 100 * plan.extra_seconds / plan.step_seconds,
            "gap": plan.gap,
            "relaxed_percent": 100
            * relaxed_seconds(space.problem, budget_bytes)
            / plan.step_seconds,
            "peak_bytes": plan.peak_bytes,
        }
    except BudgetError as error:
        seconds = time.perf_counter() - start
        found = {"planning_seconds": seconds, "extra_percent": None, "gap": None}
        found["floor_bytes"] = error.floor_bytes
    shared = {"solver": solver.name, "budget_bytes": budget_bytes}
    return {**common, **shared, **found}


def rows_of(path, options):
    profile = Profile.load(path)
    start = time.perf_counter()
    space = prepare(profile)
    prepare_seconds = time.perf_counter() - start
    budgets = budgets_of(space, options.budgets)
    common = {
        "profile": path.stem,
        "model": str(profile.model),
        "device": profile.device,
        "unplanned_peak_bytes": profile.peak_bytes,
        "num_calls": len(profile.blocks),
        "prepare_seconds": prepare_seconds,
    }
    for solver in solvers(options.solvers):
        for place, budget_bytes in enumerate(budgets):
            if solver.name == "milp" and place not in MILP_PLACES:
                continue
            yield row_of(space, solver, budget_bytes, common)


def show(rows):
    first = rows[0]
    budgets = sorted({row["budget_bytes"] for row in rows})
    print(
        f"\n**{first['profile']}**, {first['num_calls']} calls, unplanned peak "
        f"{format_bytes(first['unplanned_peak_bytes'])}, prepare {first['prepare_seconds']:.2f} s. "
        "Extra time in % of the step at a budget of so many % of that peak; – where none fits.\n"
    )
    shares = [f"{100 * budget / first['unplanned_peak_bytes']:.0f}" for budget in budgets]
    print(f"| solver | {' | '.join(shares)} | planning: median, longest |")
    print(f"|---|{'---|' * len(budgets)}---|")
    for name in dict.fromkeys(row["solver"] for row in rows):
        own = {row["budget_bytes"]: row for row in rows if row["solver"] == name}
        cells = [cell(own.get(budget)) for budget in budgets]
        seconds = [row["planning_seconds"] for row in own.values()]
        median = sorted(seconds)[len(seconds) // 2]
        print(f"| {name} | {' | '.join(cells)} | {median:.2f} s, {max(seconds):.2f} s |")
    best = [row for row in rows if row["solver"] == "optimal" and row["extra_percent"]]
    gaps = [100 * row["gap"] for row in best]
    above = [
        100 * (row["extra_percent"] - row["relaxed_percent"]) / max(row["relaxed_percent"], 1)
        for row in best
    ]
    print(
        f"\n`optimal`: gap at most {max(gaps):.2f} %; above the linear relaxation alone by "
        f"{min(above):.2f} to {max(above):.2f} %."
    )


def cell(row):
    if row is None:
        return ""
    return "–" if row["extra_percent"] is None else f"{row['extra_percent']:.2f}"


def main():
    options = arguments()
    for path in options.profiles:
        rows = []
        for row in rows_of(path, options):
            rows.append(row)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        show(rows)


if __name__ == "__main__":
    main()
