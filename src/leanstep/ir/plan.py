"""What to change: one decision for each block call."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from leanstep.errors import PlanError
from leanstep.ir.codec import Saved
from leanstep.ir.decision import Decision, Engine
from leanstep.ir.explanation import Explanation, group
from leanstep.ir.form import Kind
from leanstep.ir.identity import Identity
from leanstep.ir.loss import LossInChunks
from leanstep.ir.notebook import html_card, html_lines, html_table
from leanstep.ir.peak import Peak
from leanstep.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True)
class Plan(Saved):
    """One decision for each block call, and what the simulator says of them together.

    `bound_seconds` is a proved lower bound on the extra seconds of any plan in the same space,
    and `gap = (extra_seconds - bound_seconds) / max(bound_seconds, 1 % of the unplanned step)`.
    `movable_bytes` is the part of the peak that grows with the batch. `exact` is false where the
    user allowed cheap replays whose bits are not the op's own. `kinds` are the kinds of blocks that
    are compiled, each with the unplanned form and those that decisions name. `loss` is there where
    the loss is computed in chunks.
    """

    solver: str
    budget_bytes: int
    peak_bytes: int
    unplanned_peak_bytes: int
    movable_bytes: int
    step_seconds: float
    extra_seconds: float
    bound_seconds: float
    decisions: tuple[Decision, ...] = field(repr=False)
    model: Identity
    torch_version: str
    notes: tuple[str, ...] = ()
    peak: Peak | None = field(default=None, repr=False)
    unplanned_peak: Peak | None = field(default=None, repr=False)
    exact: bool = True
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    loss: LossInChunks | None = None

    @property
    def gap(self) -> float:
        """How far from the lower bound the plan can be, as a share."""
        scale = max(self.bound_seconds, 0.01 * self.step_seconds)
        return self.excess_seconds / scale if scale else 0.0

    @property
    def excess_seconds(self) -> float:
        """The most that the plan can take longer than the best of its kind."""
        return max(0.0, self.extra_seconds - self.bound_seconds)

    @property
    def is_optimal(self) -> bool:
        """Whether no plan of its kind takes less time, up to the rounding of sums."""
        return self.excess_seconds <= 1e-6 * self.step_seconds

    @property
    def changed(self) -> tuple[Decision, ...]:
        """The decisions that change a block."""
        return tuple(d for d in self.decisions if d.engine is not Engine.UNTOUCHED)

    @property
    def host_bytes(self) -> int:
        """The pinned host memory that offloaded activations take."""
        return sum(decision.host_bytes for decision in self.decisions)

    @property
    def pairs(self) -> Iterator[tuple[Decision, Decision | None]]:
        """Every decision with the one about the next call of the step."""
        return zip(self.decisions, (*self.decisions[1:], None), strict=False)

    def kind_of(self, decision: Decision) -> Kind | None:
        """The kind of a compiled block, found by the form that a decision names."""
        return next((kind for kind in self.kinds if kind.form(decision.form)), None)

    def explain(self) -> Explanation:
        """Say op by op what is kept, dropped and paid, and why the peak is where it is.

        Print the result, or read its rows.
        """
        return Explanation(
            model=str(self.model),
            solver=self.solver,
            budget_bytes=self.budget_bytes,
            step_seconds=self.step_seconds,
            extra_seconds=self.extra_seconds,
            planned=self.peak,
            unplanned=self.unplanned_peak,
            groups=group(self.decisions),
        )

    def __str__(self) -> str:
        """What is planned, block by block; `explain()` says it op by op."""
        return "\n".join([self.explain().brief(), "", self.proof, *self.notes])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        said = self.explain()
        rows = html_table(said.brief_rows(), left=(0, 1, 4))
        closing = html_lines([self.proof, *self.notes])
        return html_card(said.title, html_lines(said.summary()), rows, closing)

    @property
    def proof(self) -> str:
        """How far the plan can be from the best of its kind, in a sentence."""
        if not self.changed and not self.extra_seconds:
            return "nothing has to be dropped for this budget"
        bound = f"(proved bound {format_seconds(self.bound_seconds)})"
        if self.is_optimal:
            return f"no such plan takes less extra time {bound}"
        share = format_percent(self.excess_seconds / max(1e-12, self.step_seconds))
        return (
            f"at most {format_seconds(self.excess_seconds)}, {share} of the step, above the least "
            f"extra time of any such plan {bound}"
        )

    def check(self) -> None:
        """Raise PlanError unless the plan is one that can be applied."""
        check_plan(self)


def check_plan(plan: Plan) -> None:
    """Raise PlanError unless a plan decides once about each call, and names only what it knows."""
    seen = set()
    for number, decision in enumerate(plan.decisions):
        if decision.place in seen:
            raise PlanError(f"the plan decides twice about {decision.name}")
        seen.add(decision.place)
        if decision.drop and decision.engine is not Engine.REPLAY:
            raise PlanError(
                f"the plan names values to drop in {decision.name}, which is run by "
                f"{decision.engine.value}"
            )
        left = len(plan.decisions) - number - 1
        for entry in decision.offload:
            is_possible = 0 <= entry.release <= left and 0 < entry.fetch <= left
            if decision.engine not in (Engine.REPLAY, Engine.INDUCTOR) or not is_possible:
                raise PlanError(f"the plan cannot move {entry.key} of {decision.name} to the host")
        if decision.engine is Engine.INDUCTOR and plan.kind_of(decision) is None:
            raise PlanError(
                f"the plan compiles {decision.name} in a form that it does not describe"
            )
        ops = {row.name for row in decision.rows if row.dropped_bytes}
        for key in decision.drop if decision.rows else ():
            if key.rpartition(":")[0] not in ops:
                raise PlanError(f"the plan drops {key} in {decision.name} but does not explain it")
