"""The whole curve of peak against time, for each solver."""

from dataclasses import dataclass, field

from leanstep.ir.codec import Saved
from leanstep.ir.notebook import html_card, html_table
from leanstep.ir.text import table
from leanstep.units import format_bytes

_TITLE = "extra time of a step under each budget"


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """What one solver makes of one budget."""

    solver: str
    budget_bytes: int
    peak_bytes: int
    extra_seconds: float
    bound_seconds: float
    planning_seconds: float


@dataclass(frozen=True, slots=True)
class Frontier(Saved):
    """The points of all solvers, by solver and falling budget.

    A budget that a solver cannot meet has no point. `floors` is the least peak of each solver.
    """

    unplanned_peak_bytes: int
    step_seconds: float
    floors: tuple[tuple[str, int], ...]
    points: tuple[FrontierPoint, ...] = field(repr=False)
    device: str = ""

    def of(self, solver: str) -> tuple[FrontierPoint, ...]:
        """The points of one solver."""
        return tuple(point for point in self.points if point.solver == solver)

    @property
    def solvers(self) -> tuple[str, ...]:
        """The solvers that were asked."""
        return tuple(name for name, _ in self.floors)

    def __str__(self) -> str:
        """A table: extra time in % of the step, a row a budget, a column a solver."""
        return "\n".join([_TITLE, *table(self._rows())])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return html_card(_TITLE, html_table(self._rows()))

    def _rows(self) -> list[list[str]]:
        names = self.solvers
        by_place = {(p.solver, p.budget_bytes): p for p in self.points}
        budgets = sorted({point.budget_bytes for point in self.points}, reverse=True)
        rows = [["budget", "share", *names]]
        for budget_bytes in budgets:
            share = budget_bytes / max(1, self.unplanned_peak_bytes)
            cells = [self._cell(by_place.get((name, budget_bytes))) for name in names]
            rows.append([format_bytes(budget_bytes), f"{share:.1%}", *cells])
        floors = [f"{nbytes / max(1, self.unplanned_peak_bytes):.1%}" for _, nbytes in self.floors]
        rows.append(["least peak", "", *floors])
        return rows

    def _cell(self, point: FrontierPoint | None) -> str:
        if point is None:
            return "-"
        return f"{point.extra_seconds / max(self.step_seconds, 1e-12):.2%}"
