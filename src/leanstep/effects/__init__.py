"""What one decision about a block does to the step: its memory, and what runs again.

*Shifts*: a storage lives shorter, or is held longer, or lives again from a position of backward
on. *Replays*: ops inserted before a backward op, with a level of their own. An effect is computed
for its block alone, from the recorded step and the schedule that the engine follows; each engine
has a file here, as it has one in `leanstep.engines`.
"""

from leanstep.effects.base import Effect as Effect
from leanstep.effects.base import Replay as Replay
from leanstep.effects.base import Shift as Shift
from leanstep.effects.inductor import form_effect as form_effect
from leanstep.effects.module import module_effect as module_effect
from leanstep.effects.offload import backward_entry as backward_entry
from leanstep.effects.offload import offload_shifts as offload_shifts
from leanstep.effects.offload import with_offload as with_offload
from leanstep.effects.replay import replay_effect as replay_effect
from leanstep.errors import PlanError
from leanstep.ir import Decision, Engine, Form, Profile
from leanstep.rebuild.block import BlockGraph


def decision_effect(profile: Profile, view: BlockGraph, decision: Decision) -> Effect:
    """What one decision does."""
    match decision.engine:
        case Engine.UNTOUCHED:
            return Effect()
        case Engine.REPLAY:
            dropped = view.storages_named(decision.drop)
            has_hooks = decision.border_in or bool(decision.offload)
            return replay_effect(view, dropped, border_in=has_hooks)
        case Engine.MODULE:
            return module_effect(view)
        case Engine.INDUCTOR:
            return form_effect(view, *_forms(profile, view, decision))


def _forms(profile: Profile, view: BlockGraph, decision: Decision) -> tuple[Form, Form]:
    """The unplanned form of a call and the one that a decision names."""
    kind = profile.kinds[view.block.kind] if view.block.is_compiled else None
    form = None if kind is None else kind.form(decision.form)
    if kind is None or form is None:
        raise PlanError(f"{view.block.name} cannot be compiled in the form {decision.form!r}")
    return kind.unplanned, form
