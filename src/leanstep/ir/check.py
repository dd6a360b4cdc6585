"""What every recorded graph keeps to, as rules that run.

The recorder's graphs are checked once, when they are made, and again when they are read from a
file. Whoever comes after (simulator, planner, engines) trusts them.
"""

from collections.abc import Sequence

from leanstep.errors import GraphError
from leanstep.ir.graph import Block, Graph, ModuleCall, Op, Storage, Value


def check_graph(graph: Graph) -> None:
    """Raise GraphError unless every value is written once, in order, and read while it lives."""
    for number, storage in enumerate(graph.storages):
        _check_life(number, storage, len(graph.ops))
    history = _check_ops(graph)
    _check_saves(graph, history)
    _check_unpacks(graph)
    _check_calls(graph.calls, len(graph.ops))


def check_blocks(graph: Graph, blocks: Sequence[Block]) -> None:
    """Raise GraphError unless every block is a stretch of ops and holds the saves made in it."""
    for block in blocks:
        if not 0 <= block.start <= block.stop <= len(graph.ops):
            raise GraphError(f"block {block.name} spans ops {block.start} to {block.stop}")
        for index in block.saves:
            if not 0 <= index < len(graph.saves):
                raise GraphError(f"block {block.name} holds save {index}, which does not exist")
            if not block.start <= graph.saves[index].position <= block.stop:
                raise GraphError(f"block {block.name} holds save {index}, made outside of it")


def _check_life(number: int, storage: Storage, num_ops: int) -> None:
    """A storage is born, then could go, then goes."""
    dates = (-1, storage.birth, storage.natural_death, storage.death, num_ops)
    if list(dates) != sorted(dates) or (storage.birth == num_ops and num_ops):
        raise GraphError(
            f"storage {number} is born at op {storage.birth}, could go after op "
            f"{storage.natural_death} and goes after op {storage.death} of {num_ops}"
        )
    ends = [end for absence in storage.absences for end in absence]
    if ends != sorted(ends) or any(not 0 <= end <= num_ops + 1 for end in ends):
        raise GraphError(f"storage {number} is away at {storage.absences} of {num_ops} ops")
    if storage.nbytes < 0:
        raise GraphError(f"storage {number} has {storage.nbytes} bytes")


def _check_ops(graph: Graph) -> list[dict[int, int]]:
    """Walk through the step; return, for each storage, which op wrote which version."""
    history: list[dict[int, int]] = [
        {0: -1} if storage.birth < 0 else {} for storage in graph.storages
    ]
    for index, op in enumerate(graph.ops):
        _check_place(graph, index, op)
        for value in op.reads:
            _check_read(graph, index, value, history)
        for value in op.writes:
            _check_write(graph, index, value, history)
    for number, storage in enumerate(graph.storages):
        if storage.birth >= 0 and history[number].get(0) != storage.birth:
            raise GraphError(f"storage {number} is not among what op {storage.birth} writes")
    return history


def _check_place(graph: Graph, index: int, op: Op) -> None:
    if not op.name or op.cost < 0 or op.rise_bytes < 0:
        raise GraphError(
            f"op {index} ({op.name!r}) has cost {op.cost} and rises by {op.rise_bytes} bytes"
        )
    if not -1 <= op.call < len(graph.calls):
        raise GraphError(f"{_name(graph, index)} runs in call {op.call}, which does not exist")


def _check_read(graph: Graph, index: int, value: Value, history: list[dict[int, int]]) -> None:
    if not 0 <= value.storage < len(history):
        raise GraphError(f"{_name(graph, index)} reads {_text(value)}, which does not exist")
    if value.version not in history[value.storage]:
        raise GraphError(f"{_name(graph, index)} reads {_text(value)} before it is written")
    if value.version + 1 in history[value.storage]:
        raise GraphError(f"{_name(graph, index)} reads {_text(value)} after it is overwritten")
    if graph.storages[value.storage].death < index:
        raise GraphError(f"{_name(graph, index)} reads {_text(value)} after it is gone")


def _check_write(graph: Graph, index: int, value: Value, history: list[dict[int, int]]) -> None:
    if not 0 <= value.storage < len(history):
        raise GraphError(f"{_name(graph, index)} writes {_text(value)}, which does not exist")
    versions, storage = history[value.storage], graph.storages[value.storage]
    if value.version in versions:
        raise GraphError(f"{_name(graph, index)} writes {_text(value)} a second time")
    if value.version != len(versions):
        raise GraphError(
            f"{_name(graph, index)} writes {_text(value)}, but version {len(versions)} is next"
        )
    if value.version == 0 and storage.birth != index:
        raise GraphError(
            f"{_name(graph, index)} makes {_text(value)}, which is born at op {storage.birth}"
        )
    if storage.death < index:
        raise GraphError(f"{_name(graph, index)} writes {_text(value)} after it is gone")
    versions[value.version] = index


def _check_saves(graph: Graph, history: list[dict[int, int]]) -> None:
    """Autograd saves a value that is there, in order, and holds its storage until release."""
    position = 0
    for index, save in enumerate(graph.saves):
        if not position <= save.position <= save.release <= len(graph.ops):
            raise GraphError(
                f"save {index} is made at {save.position} and let go at {save.release}, "
                f"after one at {position} of {len(graph.ops)} ops"
            )
        position = save.position
        if not -1 <= save.call < len(graph.calls):
            raise GraphError(f"save {index} is made in call {save.call}, which does not exist")
        number, version = save.value
        if not 0 <= number < len(history) or not _is_current(history[number], version, position):
            raise GraphError(f"save {index} holds {_text(save.value)}, not there at {position}")
        if graph.storages[number].death + 1 < save.release:
            raise GraphError(f"save {index} holds {_text(save.value)} after it is gone")


def _is_current(versions: dict[int, int], version: int, position: int) -> bool:
    """Whether a version has been written before a position, and not yet overwritten."""
    written, ended = versions.get(version), versions.get(version + 1)
    return written is not None and written < position and (ended is None or ended >= position)


def _check_unpacks(graph: Graph) -> None:
    """Backward asks in order, for what autograd still holds."""
    position = 0
    for unpack in graph.unpacks:
        if not 0 <= unpack.save < len(graph.saves):
            raise GraphError(f"save {unpack.save} is asked for but does not exist")
        save = graph.saves[unpack.save]
        if not max(position, save.position) <= unpack.position <= save.release:
            raise GraphError(
                f"save {unpack.save}, held from {save.position} to {save.release}, "
                f"is asked for at {unpack.position}, after a request at {position}"
            )
        position = unpack.position


def _check_calls(calls: Sequence[ModuleCall], num_ops: int) -> None:
    """A call lies inside its parent's; those of a module that count are numbered from 0."""
    occurrences: dict[str, int] = {}
    for index, call in enumerate(calls):
        if not -1 <= call.parent < index:
            raise GraphError(f"call {index} ({call.path}) is inside call {call.parent}")
        first, last = 0, num_ops
        if call.parent >= 0:
            first, last = calls[call.parent].start, calls[call.parent].stop
        if not first <= call.start <= call.stop <= last:
            raise GraphError(
                f"call {index} ({call.path}) spans ops {call.start} to {call.stop}, "
                f"its parent {first} to {last}"
            )
        if call.occurrence == -1:
            continue
        if call.occurrence != occurrences.get(call.path, 0):
            raise GraphError(f"call {index} ({call.path}) is numbered {call.occurrence}")
        occurrences[call.path] = call.occurrence + 1


def _name(graph: Graph, index: int) -> str:
    op = graph.ops[index]
    return f"{op.name} (op {index}, {op.source or 'no source'})"


def _text(value: Value) -> str:
    return f"version {value.version} of storage {value.storage}"
