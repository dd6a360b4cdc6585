"""From what the command line names to a profile, or to what a study makes its trials of."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import leanstep

if TYPE_CHECKING:
    from leanstep.models import Target


@dataclass(frozen=True, slots=True)
class Source:
    """A target with its options, or a file with a profile."""

    text: str
    batch: int | None = None
    seq: int | None = None
    image: int | None = None
    autocast: str | None = None
    optimizer: str | None = None
    device: str | None = None
    ranks: int | None = None

    @property
    def is_file(self) -> bool:
        """Whether a profile is read instead of made."""
        return self.text.endswith(".json")

    @property
    def imagined(self) -> str | None:
        """The device that figures are estimated for; None where they are measured here."""
        is_here = self.device is None or self.device.partition(":")[0] in ("cpu", "cuda")
        return None if is_here else self.device

    def target(self) -> "Target":
        """What makes model, batch, loss and optimizer, on the device if that is not imagined."""
        found = self._found()
        return found if self.imagined else found.on(self.device)

    def _found(self) -> "Target":
        if self.is_file:
            raise typer.BadParameter(f"{self.text} is a file: this command runs a model")
        # Loaded late: it needs torch.
        from leanstep.models import find_target

        sizes = {"batch": self.batch, "seq": self.seq, "image": self.image}
        return find_target(self.text, **sizes, autocast=self.autocast, optimizer=self.optimizer)

    def ingredients(self) -> tuple[Any, Any, Any, Any]:
        """Model, batch, loss and optimizer; a factory may leave out the last two."""
        model, batch, *rest = self._found().on(self.device)()
        loss, optimizer = (*rest, None, None)[:2]
        return model, batch, loss, optimizer

    def profile(self, engine: str = "auto", *, exact: bool = True) -> leanstep.Profile:
        """Read the profile, or make it."""
        if self.is_file:
            return self._read()
        if self.ranks is not None and not self.imagined:
            raise typer.BadParameter("--ranks needs an estimated device, such as --device h200")
        if self.imagined:
            return leanstep.profile(
                self.target(), device=self.imagined, engine=engine, ranks=self.ranks
            )
        model, batch, loss, optimizer = self.ingredients()
        return leanstep.profile(model, batch, loss, optimizer=optimizer, engine=engine, exact=exact)

    def _read(self) -> leanstep.Profile:
        sizes = (self.batch, self.seq, self.image, self.ranks)
        others = (self.autocast, self.optimizer, self.device)
        if any(option is not None for option in (*sizes, *others)):
            raise typer.BadParameter(f"{self.text} is a profile: its sizes and device are fixed")
        return leanstep.Profile.load(existing(self.text))


def existing(name: str | Path) -> Path:
    """The path of a file to read."""
    path = Path(name)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    return path
