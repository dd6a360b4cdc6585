"""Where results go: a table or JSON on standard output, a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import typer


class Result(Protocol):
    """What every noun of leanstep's can do."""

    def to_json(self) -> str:
        """The text of a file."""

    def save(self, path: str | Path) -> None:
        """Write the file."""


@dataclass(frozen=True, slots=True)
class Output:
    """Made before the work begins: a file that may not be written ends it at once."""

    as_json: bool
    path: Path | None
    force: bool

    def __post_init__(self) -> None:
        if self.path is None:
            return
        if self.path.is_dir():
            raise typer.BadParameter(f"{self.path} is a folder: name a file in it")
        if self.path.exists() and not self.force:
            raise typer.BadParameter(f"{self.path} is there already: --force overwrites it")
        if not self.path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {self.path.parent}")

    def deliver(self, result: Result, text: str | None = None, saved: Result | None = None) -> None:
        """Print a result, and write it (or what else is to be saved) to the file."""
        typer.echo(result.to_json() if self.as_json else text or str(result))
        if self.path is not None:
            (saved or result).save(self.path)
            say_written(self.path)


def say_written(path: Path) -> None:
    """Tell the person at the terminal, not the program that reads the output."""
    typer.echo(f"wrote {path}", err=True)
