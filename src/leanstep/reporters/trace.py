"""The step as a trace for Perfetto or `chrome://tracing`: ops, module calls, memory by category.

The format is Chrome's trace events: complete events ("X") with start and duration in microseconds,
counters ("C"), and metadata ("M") that names the tracks.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from leanstep.ir import Plan, Profile
from leanstep.reporters.steps import CurveColumns, Steps, steps_of

_OPS, _PHASES, _MODULES = 1, 2, 3
_TRACKS = {_OPS: "ops", _PHASES: "phases", _MODULES: "modules"}
_MICROSECONDS = 1e6

Event = dict[str, Any]


def write_trace(profile: Profile, plan: Plan | None, path: Path) -> None:
    """Write the trace of a step, and of the planned one as a second process."""
    document = {
        "traceEvents": list(trace_events(profile, plan)),
        "displayTimeUnit": "ms",
        "otherData": {"model": str(profile.model), "device": profile.device},
    }
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def trace_events(profile: Profile, plan: Plan | None) -> Iterator[Event]:
    """All events, one process for each step."""
    steps = steps_of(profile, plan)
    for process, name, curve in ((1, "untouched", steps.before), (2, "planned", steps.after)):
        if curve is not None:
            yield _metadata("process_name", process, 0, name)
            yield from (_metadata("thread_name", process, *track) for track in _TRACKS.items())
            yield from _op_events(steps, curve, process)
            yield from _phase_events(steps, curve, process)
            yield from _counter_events(steps, curve, process)
    yield from _module_events(profile, steps)


def _metadata(name: str, process: int, thread: int, value: str) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": value}}


def _slice(
    name: str, process: int, thread: int, start: float, stop: float, arguments: Event
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start * _MICROSECONDS, 3),
        "dur": round((stop - start) * _MICROSECONDS, 3),
        "args": arguments,
    }


def _op_events(steps: Steps, curve: CurveColumns, process: int) -> Iterator[Event]:
    ops = steps.ops
    for point, (op, position) in enumerate(zip(curve.ops, curve.positions, strict=True)):
        arguments = {
            "module": ops.texts[ops.modules[op]],
            "source": ops.texts[ops.sources[op]],
            "live bytes at its start": curve.live[point],
            "highest level inside": sum(layer[point] for layer in curve.layers),
            "runs again": op != position,
        }
        start, stop = curve.starts[point], curve.starts[point + 1]
        yield _slice(ops.texts[ops.names[op]], process, _OPS, start, stop, arguments)


def _phase_events(steps: Steps, curve: CurveColumns, process: int) -> Iterator[Event]:
    last = len(steps.ops.phases) - 1

    def phase(point: int) -> int:
        return steps.ops.phases[min(curve.positions[point], last)]

    for number, found in groupby(range(len(curve.ops)), key=phase):
        points = list(found)
        start, stop = curve.starts[points[0]], curve.starts[points[-1] + 1]
        yield _slice(steps.phases[number], process, _PHASES, start, stop, {})


def _counter_events(steps: Steps, curve: CurveColumns, process: int) -> Iterator[Event]:
    for point in range(len(curve.ops)):
        levels = {
            group: layer[point] for group, layer in zip(steps.groups, curve.layers, strict=True)
        }
        start = round(curve.starts[point] * _MICROSECONDS, 3)
        yield {"ph": "C", "name": "memory", "pid": process, "tid": 0, "ts": start, "args": levels}


def _module_events(profile: Profile, steps: Steps) -> Iterator[Event]:
    """The module calls of the untouched step, each inside the one that made it."""
    starts = steps.before.starts
    for call in profile.graph.calls:
        if call.start < call.stop:
            name = call.path or call.class_name
            arguments = {"class": call.class_name}
            yield _slice(name, 1, _MODULES, starts[call.start], starts[call.stop], arguments)
