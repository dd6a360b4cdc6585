"""Profile the step with compiled blocks: find kinds and forms, measure them, condense the step."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from leanstep.condense import condense
from leanstep.engines.inductor import PRECISE, compiled_form, compiler_errors, reason_of
from leanstep.errors import MeasureError
from leanstep.forms.capture import CaptureError, capture
from leanstep.forms.costs import node_seconds
from leanstep.forms.cuts import Candidate, candidates
from leanstep.forms.kinds import Sighting, find_kinds
from leanstep.forms.trial import Trial
from leanstep.ir import Engine, Exclusion, Form, Kind, Profile
from leanstep.ir.form import without_beaten
from leanstep.profiler.measure import progress
from leanstep.state import untouched
from leanstep.step import TrainingStep
from leanstep.truth import return_cached

# Forms of a kind to compile: each takes seconds.
MOST_FORMS = 8
MOST_FORMS_OF_MANY = 6
MANY_KINDS = 6


def profile_compiled(step: TrainingStep, eager: Profile, *, exact: bool) -> Profile:
    """The profile of the step with its blocks compiled, made from that of the eager step.

    Its peak and time are those of the account; the caller measures the real ones.
    """
    with untouched(step):
        sightings = find_kinds(step, eager)
        most = MOST_FORMS_OF_MANY if len(sightings) > MANY_KINDS else MOST_FORMS
        kinds: list[Kind] = []
        kind_of: dict[int, int] = {}
        exclusions: list[Exclusion] = []
        for number, sighting in enumerate(progress(sightings, "compiling blocks")):
            try:
                kind = _kind(f"{sighting.class_name} {number}", sighting, step.device, most, exact)
            except (CaptureError, MeasureError, *compiler_errors()) as error:
                exclusions += _excluded(eager, sighting, error)
                continue
            kind_of.update(dict.fromkeys(sighting.blocks, len(kinds)))
            kinds.append(kind)
            return_cached(step.device)
        # Gradients of what ran alone would count as the step's own.
        step.drop_gradients()
    known = replace(eager, exclusions=(*eager.exclusions, *exclusions))
    return condense(known, kind_of, kinds)


def _excluded(eager: Profile, sighting: Sighting, error: Exception) -> list[Exclusion]:
    reason = str(error) if isinstance(error, (CaptureError, MeasureError)) else reason_of(error)
    blocks = [eager.blocks[number] for number in sighting.blocks]
    found = (Exclusion(b.path, b.children, Engine.INDUCTOR, reason) for b in blocks)
    return list(dict.fromkeys(found))


def _kind(
    name: str, sighting: Sighting, device: torch.device, most: int, exact: bool
) -> Kind:
    """Compile a kind of block in every form worth having, and measure each."""
    if sighting.objection:
        raise CaptureError(sighting.objection)
    example = sighting.example
    joint = capture(example, PRECISE if exact else {})
    found = candidates(joint, node_seconds(joint, device), most)
    trial = Trial(example, device)
    first = _form(name, found[0], trial, exact)
    forms = [first]
    for candidate in found[1:]:
        try:
            forms.append(_form(name, candidate, trial, exact))
        except compiler_errors():
            # Torch's compiler has its own limits: the other forms are still there.
            continue
    return Kind(name, without_beaten(_usable(forms, exact)), precise=exact)


def _usable(forms: Sequence[Form], exact: bool) -> list[Form]:
    return [form for form in forms if form.exact or not exact]


def _form(kind: str, candidate: Candidate, trial: Trial, exact: bool) -> Form:
    _, forward = trial.example.subject
    compiled = compiled_form(forward, kind, candidate.kept, precise=exact)
    figures = trial.measure(compiled)
    return Form(
        name=f"{kind}/{candidate.name}",
        kept=candidate.kept,
        kept_bytes=figures.kept_bytes,
        forward_rise_bytes=figures.forward_rise_bytes,
        backward_rise_bytes=figures.backward_rise_bytes,
        forward_seconds=figures.forward_seconds,
        backward_seconds=figures.backward_seconds,
        holds_arguments=figures.holds_arguments,
        holds_outputs=figures.holds_outputs,
        exact=trial.is_exact(compiled),
    )
