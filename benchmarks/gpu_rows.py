"""Rows of gpu.py as lines, as tables beside the peers, and as a figure."""

import json

SIZES = {
    "resnet152": {"batch": 384, "image": 224},
    "bert-large": {"batch": 64, "seq": 512},
    "gpt2-medium": {"batch": 32, "seq": 1024},
    "llama-1b": {"batch": 16, "seq": 2048},
}


def line(row, eager):
    name = row["method"]
    if name == "leanstep":
        name = f"leanstep {row['engine']} at {row['at']}{how(row)}"
    if "failed" in row:
        return f"{name:34} failed: {row['failed'][:90]}"
    text = f"{name:34} {row['seconds'] * 1e3:8.1f} ms {row['seconds'] / eager['seconds']:6.3f}"
    if "peak_bytes" in row:
        text += (
            f"  {row['peak_bytes'] / 2**30:7.2f} GiB {row['peak_bytes'] / eager['peak_bytes']:6.3f}"
        )
        text += f"  reserved {row['reserved_bytes'] / row['peak_bytes'] - 1:+.1%}"
    text += f"  issued in {row['issue_seconds'] * 1e3:.0f} ms"
    if "forward_issue_seconds" in row:
        text += f", forward {row['forward_issue_seconds'] * 1e3:.1f}"
    if "predicted_seconds" in row:
        text += f"  predicted {row['predicted_seconds'] / eager['seconds']:6.3f}"
        if "peak_bytes" in row:
            text += f", {row['predicted_peak_bytes'] / row['peak_bytes'] - 1:+.2%}"
        text += f", host {row['host_bytes'] / 2**30:.2f} GiB"
        if rows := row.get("loss_rows"):
            text += f", loss by {rows} rows"
    if "kernels" in row:
        parts = ((kind, seconds) for kind, seconds in row["kernels"].items() if seconds > 1e-4)
        text += "\n    " + ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in parts)
    return text


def how(row):
    """What is special about a row of ours."""
    inexact = "" if row["exact"] else ", inexact"
    alone = "" if row["offload"] else ", no offload"
    # Rows of before there were chunks do not say.
    whole = "" if row.get("chunks", True) else ", whole loss"
    return inexact + alone + whole + (", fit" if row.get("is_fitted") else "")


def load(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def calls_of(rows):
    calls = {}
    for row in rows:
        calls.setdefault((row["model"], row["call"]), []).append(row)
    return calls


def show(options):
    """For every call a table: each peer, and leanstep at the peer's peak."""
    rows = load(options.rows)
    for (model, call), found in calls_of(rows).items():
        eager = next(row for row in found if row["method"] == "eager")
        peers = {row["method"]: row for row in found}
        print(f"\n{model} {eager['sizes']} · {eager['device']} · torch {eager['torch']} · {call}\n")
        print(
            "| at the peak of | peer: time, peak | leanstep: time, peak | ours / peer | predicted |"
        )
        print("|---|---|---|---|---|")
        for row in found:
            if row["method"] == "leanstep":
                print(table_row(row, peers.get(row["at"]), eager))
    if options.figure:
        draw(rows, options.figure)


def table_row(row, peer, eager):
    def cell(one):
        if one is None:
            return "–"
        if "failed" in one:
            return "failed"
        peak = one["peak_bytes"] / eager["peak_bytes"] if "peak_bytes" in one else float("nan")
        return f"{one['seconds'] / eager['seconds']:.3f}, {peak:.3f}"

    name = f"{row['at']}{how(row)} · {row['engine']}"
    if "failed" in row:
        return f"| {name} | {cell(peer)} | refused | – | – |"
    ratio = "–" if peer is None or "failed" in peer else f"{row['seconds'] / peer['seconds']:.3f}"
    predicted = f"{row['predicted_seconds'] / eager['seconds']:.3f}"
    if "peak_bytes" in row:
        predicted += f", {row['predicted_peak_bytes'] / eager['peak_bytes']:.3f}"
    return f"| {name} | {cell(peer)} | {cell(row)} | {ratio} | {predicted} |"


# One line for each way to train in less memory; every line begins with the step that has no limit.
LINES = {
    "checkpoint": ("eager", "every2", "checkpoint"),
    "regional Inductor": ("regional", "regional-0.5", "regional-0.2", "regional+checkpoint"),
}
COLORS = {"checkpoint": "tab:gray", "regional Inductor": "tab:brown"}
OURS = {"replay": "tab:blue", "inductor": "tab:green"}


def draw(rows, path):
    """Time against peak, one line for each method and a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    calls = {}
    for (model, _), found in calls_of(rows).items():
        if found[0]["sizes"] == SIZES.get(model, found[0]["sizes"]):
            calls.setdefault(model, []).append(found)
    figure, axes = pyplot.subplots(2, -(-len(calls) // 2), figsize=(10, 8), squeeze=False)
    for axis, (model, found) in zip(axes.flat, calls.items(), strict=False):
        points = {}
        for call in found:
            collect(call, points)
        for name, (color, own) in points.items():
            line_style = "o--" if "inexact" in name else "o-"
            ordered = zip(*sorted(own.values()), strict=True)
            axis.plot(*ordered, line_style, color=color, label=name)
        axis.set(title=model, xlabel="peak × eager", ylabel="step time × eager")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def collect(call, points):
    """The points of one call: peak and time of each method, as shares of that call's eager step.

    What was measured again takes the place of what there was.
    """
    eager = next(row for row in call if row["method"] == "eager")
    for row in call:
        if "failed" in row or "peak_bytes" not in row:
            continue
        point = row["peak_bytes"] / eager["peak_bytes"], row["seconds"] / eager["seconds"]
        if row["method"] == "leanstep":
            name, color = f"leanstep {row['engine']}{how(row)}", OURS[row["engine"]]
            points.setdefault(name, (color, {}))[1][row["at"]] = point
        for name, members in LINES.items():
            if row["method"] in members:
                points.setdefault(name, (COLORS[name], {}))[1][row["method"]] = point
