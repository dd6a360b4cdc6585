"""What there is to work with on this machine, and what is wrong with it."""

from dataclasses import dataclass, field
from itertools import groupby

from leanstep.ir.codec import Saved
from leanstep.ir.text import table


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, such as the version of a package; `advice` is what to do about it, if anything."""

    area: str
    name: str
    value: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Checkup(Saved):
    """All findings, area by area."""

    findings: tuple[Finding, ...] = field(repr=False)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, a sentence each."""
        return tuple(finding.advice for finding in self.findings if finding.advice)

    def __str__(self) -> str:
        """A table an area, then what to do."""
        lines = []
        for area, found in groupby(self.findings, key=lambda finding: finding.area):
            rows = table([(one.name, one.value) for one in found], left=(0, 1))
            lines += [area, *(f"  {row}" for row in rows), ""]
        said = [f"- {sentence}" for sentence in self.advice]
        return "\n".join([*lines, *(["what to do", *said] if said else ["nothing to mend"])])
