"""Profile the step with compiled blocks: find kinds and forms, measure them, condense the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from leanstep.condense import condense
from leanstep.engines.inductor import PRECISE, CompiledForm, compiled_form, reason_of
from leanstep.engines.joint import JointGraph, LostNodeError
from leanstep.errors import MeasureError
from leanstep.forms.capture import CaptureError, capture
from leanstep.forms.costs import node_seconds, with_writing
from leanstep.forms.cuts import Candidate, candidates, candidates_apart, unplanned, with_seeds
from leanstep.forms.kinds import Example, Sighting, find_kinds
from leanstep.forms.pointwise import pointwise_again
from leanstep.forms.trial import Figures, Trial
from leanstep.ir import Engine, Exclusion, Form, Kind, Profile
from leanstep.ir.form import without_beaten
from leanstep.stages import each
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep
from leanstep.torch_private.compiler import recompile_limit
from leanstep.truth import return_cached

# Forms of a kind to compile: each takes seconds.
MOST_FORMS = 8
MOST_FORMS_OF_MANY = 6
# Of these rebuilt apart: some fewer, as the others are tried too.
LESS_APART = 3
MANY_KINDS = 6

# Forms with other bits after which no more are tried: kernels that are fused otherwise sum in
# another order, and where some do, most do.
_MOST_INEXACT = 2
_MOST_INEXACT_OF_MANY = 1

# Of the device's time: what two races of the same form differ by.
_NO_SLOWER = 1.02


def profile_compiled(step: TrainingStep, eager: Profile, *, exact: bool) -> Profile:
    """The profile of the step with its blocks compiled, made from that of the eager step.

    Its peak and time are those of the account; the caller measures the real ones.
    """
    with untouched(step):
        sightings = find_kinds(step, eager)
        effort = _effort(len(sightings))
        kinds: list[Kind] = []
        kind_of: dict[int, int] = {}
        exclusions: list[Exclusion] = []
        for sighting in each(sightings, "compiling blocks"):
            try:
                kind = _kind(sighting, step.device, effort, exact)
            except (CaptureError, LostNodeError, MeasureError) as error:
                exclusions += _excluded(eager, sighting, str(error))
                continue
            kind_of.update(dict.fromkeys(sighting.blocks, len(kinds)))
            kinds.append(kind)
            return_cached(step.device)
    known = replace(eager, exclusions=(*eager.exclusions, *exclusions))
    return condense(known, kind_of, kinds)


@dataclass(frozen=True, slots=True)
class _Effort:
    """How many forms of a kind to try; a kind that few blocks have gets the best few alone."""

    most_forms: int
    most_inexact: int
    fewest_blocks: int


def _effort(num_kinds: int) -> _Effort:
    """Less where there are many kinds: each takes its time."""
    if num_kinds > MANY_KINDS:
        return _Effort(MOST_FORMS_OF_MANY, _MOST_INEXACT_OF_MANY, fewest_blocks=2)
    return _Effort(MOST_FORMS, _MOST_INEXACT, fewest_blocks=1)


def _excluded(eager: Profile, sighting: Sighting, reason: str) -> list[Exclusion]:
    blocks = [eager.blocks[number] for number in sighting.blocks]
    found = (Exclusion(b.path, b.children, Engine.INDUCTOR, reason) for b in blocks)
    return list(dict.fromkeys(found))


def _kind(
    sighting: Sighting,
    device: torch.device,
    effort: _Effort,
    exact: bool,
    *,
    may_join_kernels: bool = True,
) -> Kind:
    """Compile a kind of block in every form worth having, and measure each."""
    if sighting.objection:
        raise CaptureError(sighting.objection)
    example = sighting.example()
    joint = capture(example, PRECISE if exact else {})
    trials = _Trials(sighting.name, example, device, exact)
    seconds = node_seconds(joint, device)
    first = unplanned(joint)
    if not trials.add(first):
        raise MeasureError("its gradients differ from run to run")
    if may_join_kernels:
        trials.join_kernels(first)
    if exact:
        least = _least_with_its_bits(trials, joint, first)
        _add_apart(trials, joint, seconds, least, max(1, effort.most_forms - LESS_APART))
    if not exact or len(sighting.blocks) >= effort.fewest_blocks:
        others = candidates(joint, seconds, first, effort.most_forms - 1)
        _add_others(trials, others, effort.most_inexact)
    if trials.joins_kernels and trials.num_failed:
        # What joined kernels cannot do might be a form that a budget needs.
        return _kind(sighting, device, effort, exact, may_join_kernels=False)
    return Kind(
        sighting.name,
        without_beaten(trials.forms()),
        precise=exact,
        joins_kernels=trials.joins_kernels,
        num_inexact=trials.num_inexact,
    )


def _least_with_its_bits(trials: "_Trials", joint: JointGraph, first: Candidate) -> Candidate:
    """The first form, or one that computes more of it again and has the same bits."""
    smaller = pointwise_again(joint, first)
    return next((candidate for candidate in smaller if trials.add(candidate)), first)


def _add_apart(
    trials: "_Trials",
    joint: JointGraph,
    seconds: Mapping[Any, float],
    least: Candidate,
    most: int,
) -> None:
    """Try forms that rebuild apart what they drop of another's.

    That keeps masks. With their seeds beside them, these too can be dropped.
    """
    whole = with_seeds(joint, least)
    written = with_writing(joint, seconds, whole.kept, trials.device)
    for candidate in candidates_apart(joint, written, whole, most):
        trials.add(candidate)


def _add_others(trials: "_Trials", others: Sequence[Candidate], most_inexact: int) -> None:
    """Try forms that compute again inside backward, until too many have had other bits."""
    for candidate in others:
        if trials.num_inexact >= most_inexact:
            break
        trials.add(candidate)


class _Trials:
    """The forms of one kind that were compiled and have passed."""

    def __init__(self, name: str, example: Example, device: torch.device, exact: bool) -> None:
        self._name, self._example, self._exact = name, example, exact
        self.device = device
        self._trial = Trial(example, device)
        self.num_inexact = 0
        self.joins_kernels = False
        self.num_failed = 0
        self._passed: dict[Any, tuple[Candidate, CompiledForm, Figures]] = {}

    def add(self, candidate: Candidate) -> bool:
        """Compile and measure a form; whether it runs, with the right bits."""
        if _key(candidate) in self._passed:
            return True
        compiled = self._compiled(candidate)
        figures = self._figures(compiled)
        if figures is None:
            return False
        if self._exact and not figures.exact:
            self.num_inexact += 1
            return False
        self._passed[_key(candidate)] = candidate, compiled, figures
        return True

    def join_kernels(self, candidate: Candidate) -> None:
        """Have a form that has passed launch fewer kernels, and all that follow, where that pays.

        Where the CPU is early, fewer launches win nothing. Torch calls joined kernels an
        experiment: they must have the same bits and take the device as good as no longer.
        """
        _, separate, _ = self._passed[_key(candidate)]
        if not self._trial.is_issued_late(separate):
            return
        joined = self._compiled(candidate, joins_kernels=True)
        try:
            figures = self._trial.measure(joined)
            before, after = map(sum, self._trial.race([separate, joined]))
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # Whatever an experiment may raise: the form as it was is still there.
            return
        if figures.exact and after <= _NO_SLOWER * before:
            self.joins_kernels = True
            self._passed[_key(candidate)] = candidate, joined, figures

    def _compiled(self, candidate: Candidate, *, joins_kernels: bool = False) -> CompiledForm:
        _, forward = self._example.subject
        names = self._name, *_key(candidate)
        how = {"precise": self._exact, "joins_kernels": joins_kernels or self.joins_kernels}
        return compiled_form(forward, *names, **how)

    def _figures(self, compiled: CompiledForm) -> Figures | None:
        """What is measured of a form; None where torch's compiler has reached its limits."""
        try:
            return self._trial.measure(compiled)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, LostNodeError, recompile_limit()) as error:
            if not self._passed:
                raise MeasureError(
                    f"compiled and run alone, it raised {reason_of(error)}"
                ) from None
            # The other forms are still there.
            self.num_failed += 1
            return None

    def forms(self) -> list[Form]:
        """Race those that have passed."""
        entries = list(self._passed.values())
        times = self._trial.race([compiled for _, compiled, _ in entries])
        return [
            _form(f"{self._name}/{candidate.name}", candidate, figures, seconds)
            for (candidate, _, figures), seconds in zip(entries, times, strict=True)
        ]


def _key(candidate: Candidate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return candidate.kept, candidate.whole


def _form(name: str, candidate: Candidate, figures: Figures, seconds: tuple[float, float]) -> Form:
    return Form(
        name=name,
        kept=candidate.kept,
        kept_bytes=sum(figures.saves),
        forward_rise_bytes=figures.forward_rise_bytes,
        backward_rise_bytes=figures.backward_rise_bytes,
        forward_seconds=seconds[0],
        backward_seconds=seconds[1],
        holds_arguments=figures.holds_arguments,
        holds_outputs=figures.holds_outputs,
        exact=figures.exact,
        saves=figures.saves,
        whole=candidate.whole,
    )
