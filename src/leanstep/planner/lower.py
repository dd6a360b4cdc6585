"""Turn a selection of options into a plan that a person can read and an engine can apply."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from leanstep.effects import Effect, with_offload
from leanstep.ir import (
    Decision,
    Engine,
    Fact,
    Kind,
    LossInChunks,
    Offload,
    Plan,
    Profile,
    Timeline,
)
from leanstep.ir.text import some_names
from leanstep.planner.explain import Account
from leanstep.planner.option import Option
from leanstep.planner.segments import Part
from leanstep.rebuild.block import BlockGraph
from leanstep.rebuild.rerun import NEVER_RERUN, rerun
from leanstep.simulator import peak_op, static_bytes, timeline
from leanstep.units import format_bytes, format_seconds


def lower(
    profile: Profile,
    picked: Sequence[tuple[Part, Option]],
    *,
    droppable: Sequence[frozenset[int]] = (),
    notes: Sequence[str] = (),
    solver: str,
    budget_bytes: int,
    extra_seconds: float,
    bound_seconds: float,
    exact: bool = True,
    offload: Sequence[tuple[Offload, ...]] = (),
    untouched: Profile | None = None,
    loss: LossInChunks | None = None,
) -> Plan:
    """Make the plan, with the peak that the simulator finds for it.

    `droppable` is what each call might drop, `offload` what each moves to the host. Where the
    profile has its `loss` in chunks, `untouched` is the one that has not.
    """
    moved = offload or [()] * len(picked)
    views = [part.view for part, _ in picked]
    found = _with_offload(effects(picked), views, moved)
    line = timeline(profile, found)
    dropped = [option.dropped for _, option in picked]
    account = Account(profile, views, found, line, dropped, untouched or profile)
    planned, unplanned = account.peaks(droppable)
    takes = [False, *(option.drops_border for _, option in picked)][: len(picked)]
    return Plan(
        solver=solver,
        budget_bytes=budget_bytes,
        peak_bytes=line.peak_bytes,
        unplanned_peak_bytes=profile.peak_bytes,
        movable_bytes=max(0, line.peak_bytes - static_bytes(profile)),
        step_seconds=profile.step_seconds,
        extra_seconds=extra_seconds,
        bound_seconds=bound_seconds,
        decisions=tuple(
            replace(
                _decision(profile, part, option, moved[place]),
                **account.share(place),
                border_in=border_in,
            )
            for place, ((part, option), border_in) in enumerate(zip(picked, takes, strict=True))
        ),
        model=profile.model,
        torch_version=profile.torch_version,
        notes=(
            _peak_note(profile, line),
            *_loss_notes(profile, loss),
            *_host_notes(moved),
            *_block_notes(profile, picked),
            *notes,
            *_inexact_notes(profile, found),
            *_profile_notes(profile),
        ),
        peak=planned,
        unplanned_peak=unplanned,
        exact=exact,
        kinds=tuple(_used_kinds(profile, [option for _, option in picked])),
        loss=loss,
    )


def effects(picked: Sequence[tuple[Part, Option]]) -> list[Effect]:
    """What each pick does to the step."""
    return [option.effect(part.view) for part, option in picked]


def _with_offload(
    found: Sequence[Effect], views: Sequence[BlockGraph], offload: Sequence[tuple[Offload, ...]]
) -> list[Effect]:
    return [
        with_offload(effect, views, place, own)
        for place, (effect, own) in enumerate(zip(found, offload, strict=True))
    ]


def _profile_notes(profile: Profile) -> Iterator[str]:
    """What the profile itself says: the model's mode, who else is at work, what was estimated."""
    if "" in profile.model.evaluating:
        # As `from_pretrained` returns it.
        yield (
            "the model was in eval mode, and the budget holds for that: to train in train mode, "
            "call model.train() before fit"
        )
    yield from profile.company
    yield from profile.notes if profile.estimated else ()


def _block_notes(profile: Profile, picked: Sequence[tuple[Part, Option]]) -> Iterator[str]:
    yield from _notes("nothing can be dropped in", _stuck(profile, picked))
    whole = [part.view for part, option in picked if _is_second_best(part, option)]
    yield from _notes("run again as a whole:", whole)


def _loss_notes(profile: Profile, loss: LossInChunks | None) -> Iterator[str]:
    if profile.whole_loss:
        yield f"the loss is not computed in chunks: {profile.whole_loss}"
    if loss is not None:
        freed, paid = format_bytes(loss.freed_bytes), format_seconds(abs(loss.extra_seconds))
        gain = f"{freed} less for {paid}" if loss.extra_seconds > 0 else f"{freed} and {paid} less"
        yield (
            f"the loss is computed {loss.num_rows} rows at a time: {gain} "
            "(chunks=False computes it as a whole)"
        )


def _host_notes(offload: Sequence[tuple[Offload, ...]]) -> Iterator[str]:
    nbytes = sum(entry.nbytes for own in offload for entry in own)
    if nbytes:
        yield (
            f"{format_bytes(nbytes)} of activations wait in pinned host memory between forward and "
            "backward (offload=False keeps all on the device)"
        )


def _used_kinds(profile: Profile, options: Sequence[Option]) -> Iterator[Kind]:
    """The kinds of compiled blocks, with no other forms than the options have."""
    used = {form for option in options for form in option.forms}
    for kind in profile.kinds:
        if forms := tuple(form for form in kind.forms if form in used):
            yield replace(kind, forms=forms)


def _stuck(profile: Profile, picked: Sequence[tuple[Part, Option]]) -> list[BlockGraph]:
    """The calls that cannot drop anything; why a dry run left some out, another note says."""
    views = (part.view for part, _ in picked if _is_stuck(part))
    return [view for view in views if not any(one.covers(view.block) for one in profile.exclusions)]


def _is_stuck(part: Part) -> bool:
    """Whether a call saves something of its own and cannot drop any of it."""
    if part.view.block.is_compiled:
        return len(part.options.options) == 1
    return bool(part.view.saved) and not part.options.options[-1].dropped


def _form_decision(
    profile: Profile, view: BlockGraph, option: Option, offload: tuple[Offload, ...]
) -> Decision:
    unplanned, form = option.forms
    freed = unplanned.kept_bytes - form.kept_bytes
    return Decision(
        path=view.block.path,
        occurrence=view.block.occurrence,
        children=view.block.children,
        engine=Engine.INDUCTOR,
        drop=(),
        kept_bytes=form.kept_bytes,
        dropped_bytes=freed,
        extra_seconds=option.extra_seconds + len(offload) * profile.copy_seconds,
        why=f"compiled, {form.name.rpartition('/')[2]}"
        + (f", moves {len(offload)} of its saves to the host" if offload else ""),
        form=form.name,
        offload=offload,
    )


def _decision(
    profile: Profile, part: Part, option: Option, offload: tuple[Offload, ...]
) -> Decision:
    view = part.view
    if option.engine is Engine.INDUCTOR:
        return _form_decision(profile, view, option, offload)
    storages = view.graph.storages
    held = {save.value.storage for save in view.saves} & view.own_storages
    is_replayed = option.engine is Engine.REPLAY
    recipes = _by_recipe(view, option) if is_replayed else ()
    why = _why(option, len(held), len(recipes), len(offload))
    return Decision(
        path=view.block.path,
        occurrence=view.block.occurrence,
        children=view.block.children,
        engine=option.engine,
        drop=tuple(view.storage_key(number) for number in sorted(option.dropped))
        if is_replayed
        else (),
        kept_bytes=sum(storages[number].nbytes for number in held - option.dropped),
        dropped_bytes=sum(storages[number].nbytes for number in option.dropped),
        extra_seconds=option.seconds + len(offload) * profile.copy_seconds,
        why="nothing in it can be dropped" if _is_stuck(part) and not offload else why,
        recipes=recipes,
        offload=offload,
    )


def _by_recipe(view: BlockGraph, option: Option) -> tuple[str, ...]:
    """What comes back by a cheap replay."""
    reruns = view.program(option.dropped).reruns.values()
    return tuple(view.storage_key(op.writes[0].storage) for op in reruns if op.is_recipe)


def _why(option: Option, num_saved: int, num_cheap: int, num_moved: int) -> str:
    match option.engine:
        case Engine.REPLAY:
            moved = f"{num_moved} of {num_saved} saved tensors to the host" if num_moved else ""
            if not option.dropped:
                return f"moves {moved}" if moved else "everything is kept but its input"
            output = " and its output" if option.drops_border else ""
            num_inside = len(option.dropped) - option.drops_border
            dropped = f"drops {num_inside} of {num_saved} saved tensors{output}"
            cheaply = f", {num_cheap} of them cheaply" if num_cheap else ""
            moves = f", moves {num_moved} to the host" if num_moved else ""
            return f"{dropped}, replays {_ops(option.num_replays)}{cheaply}{moves}"
        case Engine.MODULE:
            return f"runs again as a whole, {_ops(option.num_replays)}"
        case _:
            return "everything is kept" if num_saved else "saves nothing of its own"


def _ops(count: int) -> str:
    return f"{count} op" if count == 1 else f"{count} ops"


def _peak_note(profile: Profile, line: Timeline) -> str:
    op = peak_op(profile, line)
    again = ", run again," if line.points[line.peak].replayed else ""
    path = profile.graph.path(op)
    place = f" of {path}" if path else ""
    source = f" ({op.source})" if op.source else ""
    peak = f"the peak of {format_bytes(line.peak_bytes)} is at {op.name}{again}"
    return f"{peak} in {op.phase}{place}{source}"


def _is_second_best(part: Part, option: Option) -> bool:
    """Whether a call runs again as a whole because no value of it can be replayed."""
    return option.engine is Engine.MODULE and not part.view.candidates


def _notes(what: str, views: Sequence[BlockGraph]) -> Iterator[str]:
    """A line for each reason, with the calls that have it."""
    reasons: dict[str, list[str]] = {}
    for view in views:
        reasons.setdefault(_obstacle(view), []).append(view.block.name)
    for reason, names in reasons.items():
        yield f"{what} {some_names(names)}{f' ({reason})' if reason else ''}"


def _obstacle(view: BlockGraph) -> str:
    """The first op of a call that must not run again, and why; empty if every op may."""
    for index in range(view.block.start, view.block.stop):
        op = view.graph.ops[index]
        if rerun(index, op) is None:
            fact = next(f for f in op.facts if f in NEVER_RERUN or f is Fact.WRITES_BUFFER)
            source = f" at {op.source}" if op.source else ""
            return f"{op.name} {fact.value}{source}"
    return ""


def _inexact_notes(profile: Profile, found: Sequence[Effect]) -> tuple[str, ...]:
    """Which ops come back with other bits: the user allowed it."""
    ops = {
        profile.graph.ops[replay.op].name
        for effect in found
        for replay in effect.replays
        if replay.recipe is not None and not replay.recipe.exact
    }
    return (f"rebuilt with other bits: {', '.join(sorted(ops))}",) if ops else ()
