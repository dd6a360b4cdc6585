"""The loss in chunks: a step whose cross entropy is computed some rows at a time.

Language models have their peak there: a score in float32 for every token and word, the gradient of
each, and both at once. Row by row they need each other for nothing, so a chunk of rows has the bits
of the whole. The logits stay until backward, where each chunk's scores are computed again. Their
gradient then takes their place, if nobody else holds them.

This is about the recorded step alone: it says what it would need in chunks. `engines/loss.py` is
what computes it so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from leanstep.errors import PlanError
from leanstep.ir import Graph, LossInChunks, Op, Phase, Plan, Profile, Storage
from leanstep.ir.loss import LOSS_OP

# What a chunk of scores takes: enough for a GPU to be busy, little beside the whole.
CHUNK_BYTES = 128 * 2**20
FEWEST_CHUNKS = 8
# A row of a chunk begins at an address that is as even as that of the whole's row: kernels sum in
# another order where it is not.
EVEN_ROWS = 16
# A GPU's kernel has a block of threads for each row. Of these an H200 runs 264 at once, by its data
# sheet, and a few more than that would take twice as long.
FEWEST_ROWS = 1024
LABEL_BYTES = 8
FLOAT_BYTES = 4
# What every row has beside a chunk: its label twice, whether it counts, and of its score and the
# gradient of that three doubles at most.
_ROW_BYTES = 2 * (LABEL_BYTES + 1) + 3 * 8

# The CPU's work for a chunk: ops in forward and backward, in units of an op of the step.
_CHUNK_IN_OPS = 12
# The same on the CPU itself, where nothing runs beside it (`benchmarks/loss_in_chunks.py`).
_CHUNK_SECONDS = 60e-6

_CAST = "aten._to_copy.default"
_SCORES = "aten._log_softmax.default"
_LOSS_BACKWARD = "aten.nll_loss_backward.default"
_SCORES_BACKWARD = "aten._log_softmax_backward_data.default"


@dataclass(frozen=True, slots=True)
class _Tail:
    """A cross entropy in a step, and the storages that it is about.

    `ops` are four: scores and loss in forward, then the gradients of both. `casts` are the two of
    autocast around these, of logits and their gradient, and `recasts` those between these, of
    scores and their gradient: one or the other, if any. `logits` are what it is given and
    `gradient` what it gives back. `passing` are the scores, their gradient, and what `casts` make,
    which no one else reads: whole in the recorded step, a chunk each in the other. `skipped` are
    there in the recorded step alone. With `is_in_place` the gradient takes the place of the logits:
    nobody held them any more when backward came.
    """

    ops: tuple[int, int, int, int]
    casts: tuple[int, ...]
    recasts: tuple[int, ...]
    logits: int
    labels: int
    gradient: int
    passing: tuple[int, ...]
    skipped: tuple[int, ...]
    is_in_place: bool


def find_loss(profile: Profile) -> LossInChunks | None:
    """How the loss of a step could be computed in chunks; None where it could not, or need not."""
    tail = None if profile.whole_loss or profile.company else _tail(profile)
    graph = profile.graph
    if tail is None or graph.loss is None:
        return None
    call = graph.calls[graph.ops[tail.ops[0]].call]
    num_rows = graph.loss.num_rows
    in_chunk = rows_in_chunk(num_rows, graph.storages[tail.passing[0]].nbytes)
    if call.occurrence != 0 or in_chunk >= num_rows:
        return None
    num_chunks = -(-num_rows // in_chunk)
    passing = _bytes(graph, tail.passing)
    gone = (*tail.skipped, tail.gradient) if tail.is_in_place else tail.skipped
    return LossInChunks(
        path=call.path,
        num_rows=in_chunk,
        freed_bytes=passing - passing * in_chunk // num_rows + _bytes(graph, gone),
        extra_seconds=_scores_seconds(profile, tail) + num_chunks * _chunk_seconds(profile),
    )


def as_planned(profile: Profile, plan: Plan | None) -> Profile:
    """The step with its loss as a plan has it; what the plan says of blocks is another matter."""
    return profile if plan is None or plan.loss is None else in_chunks(profile, plan.loss)


def in_chunks(profile: Profile, loss: LossInChunks) -> Profile:
    """The same step with its loss in chunks: `peak_bytes` stays that of the untouched one."""
    tail = _tail(profile)
    graph = profile.graph
    if tail is None or graph.loss is None:
        raise PlanError("the plan computes the loss in chunks, and this step has no such loss")
    num_rows = graph.loss.num_rows
    ops, storages = list(graph.ops), list(graph.storages)
    sizes = {n: _part(storages[n].nbytes, loss.num_rows, num_rows) for n in tail.passing}
    sizes |= dict.fromkeys(tail.skipped, 0)
    if tail.is_in_place:
        sizes[tail.gradient] = 0
    for number, nbytes in sizes.items():
        whole = storages[number]
        storages[number] = replace(whole, nbytes=nbytes)
        ops[whole.birth] = _raised(ops[whole.birth], nbytes - whole.nbytes)
    for index in tail.ops:
        ops[index] = _raised(ops[index], _ROW_BYTES * num_rows)
    last = storages[tail.gradient].birth
    if last != tail.ops[-1]:
        # All of it is there from the first chunk on.
        ops[tail.ops[-1]] = _raised(ops[tail.ops[-1]], storages[tail.gradient].nbytes)
    # Saved for backward: logits, labels, and how many rows the loss is about.
    for number in (tail.logits, tail.labels, *graph.births(tail.ops[1])):
        storages[number] = _held_until(storages[number], last)
    if tail.is_in_place:
        death = storages[tail.gradient].death
        storages[tail.logits] = _held_until(storages[tail.logits], death)
    return replace(profile, graph=replace(graph, ops=tuple(ops), storages=tuple(storages)))


def rows_in_chunk(num_rows: int, scores_bytes: int) -> int:
    """How many rows of scores there are at once."""
    num_chunks = max(FEWEST_CHUNKS, min(scores_bytes // CHUNK_BYTES, num_rows // FEWEST_ROWS))
    rows = -(-num_rows // num_chunks)
    return -(-rows // EVEN_ROWS) * EVEN_ROWS


def _scores_seconds(profile: Profile, tail: _Tail) -> float:
    """Scores are made twice; their gradient, zeros but for a label a row, is not filled anew.

    Nor are both cast for the loss, which reads one of a row: that may be more than all the rest.
    """
    scores, _, of_loss, _ = map(profile.seconds, tail.ops)
    casts = sum(map(profile.seconds, tail.casts[:1]))
    recasts = sum(map(profile.seconds, tail.recasts))
    numbers = tail.logits, tail.passing[0], profile.graph.births(tail.ops[2])[0]
    read, made, written = (profile.graph.storages[number].nbytes for number in numbers)
    # To fill is to write as much as the gradient is, whatever else the op is taken to do.
    return casts + scores - recasts - min(of_loss, scores * written / (read + made))


def _chunk_seconds(profile: Profile) -> float:
    own = _CHUNK_SECONDS if profile.graph.is_on_host else 0.0
    return own + _CHUNK_IN_OPS * profile.issue_seconds / max(1, len(profile.graph.ops))


def _bytes(graph: Graph, numbers: Iterable[int]) -> int:
    return sum(graph.storages[number].nbytes for number in numbers)


def _part(nbytes: int, num_rows: int, of_rows: int) -> int:
    return -(-nbytes * min(num_rows, of_rows) // of_rows)


def _raised(op: Op, nbytes: int) -> Op:
    return replace(op, rise_bytes=max(0, op.rise_bytes + nbytes))


def _held_until(storage: Storage, position: int) -> Storage:
    return replace(storage, death=max(storage.death, position))


def _tail(profile: Profile) -> _Tail | None:
    """The one cross entropy of a step that is computed in a module, outside of every block."""
    graph = profile.graph
    losses = [index for index, op in enumerate(graph.ops) if op.name == LOSS_OP]
    if len(losses) != 1 or graph.loss is None:
        return None
    tail = _matched(graph, graph.loss.logits, losses[0])
    if tail is None or graph.ops[tail.ops[0]].call < 0:
        return None
    # Blocks have plans of their own for what they make.
    made = (*tail.ops, *tail.casts, graph.storages[tail.logits].birth)
    inside = any(block.start <= op < block.stop for block in profile.blocks for op in made)
    return None if inside else tail


def _matched(graph: Graph, logits: int, loss: int) -> _Tail | None:
    readers = _readers(graph)
    if len(graph.ops[loss].reads) != 2:
        # Classes have weights.
        return None
    read, labels = (value.storage for value in graph.ops[loss].reads)
    recast, scores = _before_cast(graph, read)
    forward = graph.storages[scores].birth
    if forward < 0 or graph.ops[forward].name != _SCORES or len(graph.ops[forward].reads) != 1:
        return None
    both = sorted({*readers.get(read, ()), *readers.get(scores, ())})
    backward = [op for op in both if op not in (loss, *recast)]
    if [graph.ops[op].name for op in backward] != [_LOSS_BACKWARD, _SCORES_BACKWARD]:
        return None
    of_loss, of_scores = backward
    made = [*graph.births(of_loss), *graph.births(of_scores)]
    if len(made) != 2:
        return None
    rising, gradient = made
    skipped: tuple[int, ...] = ()
    if recast:
        back = _only_cast(graph, readers, rising)
        if back is None:
            return None
        skipped, recast, rising = (read, rising), (*recast, back[0]), back[1]
    if readers.get(rising) != [of_scores] or _is_written(graph, logits, forward, of_scores):
        # Nor are logits that were written what they were, when backward comes.
        return None
    passing: tuple[int, ...] = scores, rising
    casts: tuple[int, ...] = ()
    given = graph.ops[forward].reads[0].storage
    if given != logits:
        found = _casts(graph, readers, logits, given, gradient)
        if found is None:
            return None
        passing, (casts, gradient) = (*passing, given, gradient), found
    own = graph.storages[logits]
    is_free = own.birth >= 0 and own.death < of_loss
    return _Tail(
        ops=(forward, loss, of_loss, of_scores),
        casts=casts,
        recasts=recast,
        logits=logits,
        labels=labels,
        gradient=gradient,
        passing=passing,
        skipped=skipped,
        is_in_place=is_free and own.nbytes >= graph.storages[gradient].nbytes,
    )


def _is_written(graph: Graph, storage: int, after: int, before: int) -> bool:
    ops = graph.ops[after + 1 : before]
    return any(value.storage == storage for op in ops for value in op.writes)


def _before_cast(graph: Graph, storage: int) -> tuple[tuple[int, ...], int]:
    """The op that has cast something into a storage, and what; else none, and the storage."""
    birth = graph.storages[storage].birth
    if birth < 0 or graph.ops[birth].name != _CAST or len(graph.ops[birth].reads) != 1:
        return (), storage
    return (birth,), graph.ops[birth].reads[0].storage


def _only_cast(graph: Graph, readers: dict[int, list[int]], storage: int) -> tuple[int, int] | None:
    """The cast that is all that is made of a storage, and what comes of it."""
    ops = readers.get(storage, ())
    if len(ops) != 1 or graph.ops[ops[0]].name != _CAST:
        return None
    made = list(graph.births(ops[0]))
    return (ops[0], made[0]) if len(made) == 1 else None


def _casts(
    graph: Graph, readers: dict[int, list[int]], logits: int, given: int, gradient: int
) -> tuple[tuple[int, int], int] | None:
    """The two casts around a loss, of its logits and of their gradient, and the gradient then."""
    before, read = _before_cast(graph, given)
    after = _only_cast(graph, readers, gradient)
    if read != logits or not before or after is None or len(readers.get(given, ())) != 1:
        return None
    return (before[0], after[0]), after[1]


def _readers(graph: Graph) -> dict[int, list[int]]:
    """The ops that make something of each storage: views do not, nor what is done to gradients."""
    found: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.writes and op.phase is not Phase.OPTIMIZER:
            for number in dict.fromkeys(value.storage for value in op.reads):
                found.setdefault(number, []).append(index)
    return found


def resized(before: Graph, after: Graph) -> Iterator[tuple[int, Storage, Storage]]:
    """The storages that are not what they were."""
    pairs = zip(before.storages, after.storages, strict=True)
    for number, (old, new) in enumerate(pairs):
        if old is not new:
            yield number, old, new
