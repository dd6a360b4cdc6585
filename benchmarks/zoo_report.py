"""The zoo's rows as a page of Markdown, and its totals in one sentence."""

from collections import Counter

BAD = ("wrong numbers", "crash", "timeout", "over budget", "prediction off")
REFUSED = ("refused", "no saving", "not repeatable", "does not train", "missing")

HEAD = """# The zoo

{total} architectures, each built small from its configuration, trained with dropout on. Each is
fitted at the midpoint between its least reachable and its unplanned peak; then seven training steps
are compared with a twin that was never touched: loss, gradients, buffers, random states and
parameters after the optimizer, bit for bit. *exact* means: all equal, measured peak within the
budget, predicted peak within 2 % of the measured one.

{summary}

Measured on {dates}, CPU, torch {torch}, transformers {transformers}, leanstep {leanstep}:
`python benchmarks/zoo.py --json benchmarks/results/zoo.jsonl --docs docs/zoo.md`

*saved* is how much lower the measured peak is at that midpoint; at the floor it is about twice as
much. Parameters, gradients and optimizer state count in both peaks.

| architecture | family | blocks | engines | saved | result |
|---|---|---|---|---|---|
"""


def saved_share(row):
    """How much lower the measured peak is than the untouched one."""
    if "measured_bytes" not in row:
        return 0.0
    return 1 - row["measured_bytes"] / row["baseline_bytes"]


def summary(rows):
    """The totals in one sentence."""
    present = [row for row in rows if row["result"] != "missing"]
    counts = Counter(row["result"] for row in present)
    parts = [f"{counts[result]} {result}" for result in counts if result != "exact"]
    exact = counts["exact"]
    share = exact / max(1, len(present))
    others = f"; {', '.join(parts)}" if parts else ""
    missing = len(rows) - len(present)
    absent = f" {missing} not in this transformers." if missing else ""
    return f"{exact} of {len(present)} ({share:.1%}) exact and with less memory{others}.{absent}"


def write_page(path, rows):
    """Write the whole page; nothing in it is edited by hand."""
    facts = {
        key: ", ".join(sorted({row[key] for row in rows if key in row}))
        for key in ("torch", "transformers", "leanstep")
    }
    dates = ", ".join(sorted({row["date"] for row in rows if "date" in row}))
    head = HEAD.format(total=len(rows), summary=summary(rows), dates=dates, **facts)
    path.write_text(head + "".join(line(row) for row in rows))


def line(row):
    engines = ", ".join(f"{n} {name}" for name, n in sorted(row.get("engines", {}).items()))
    saved = f"{saved_share(row):.0%}" if "measured_bytes" in row else "–"
    reason = " ".join(row["reason"].split()).replace("|", "\\|")
    result = f"{row['result']}: {reason}" if reason else row["result"]
    cells = row["name"], row["family"], str(row.get("blocks", "–")), engines, saved, result
    return f"| {' | '.join(cells)} |\n"
