"""All commands together; errors become a sentence, what to type next, and an exit code."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from leanstep import BudgetError, LeanstepError, __version__
from leanstep.cli.blame import users_error
from leanstep.cli.demo import demo
from leanstep.cli.doctor import doctor
from leanstep.cli.explain import explain
from leanstep.cli.fit import fit
from leanstep.cli.frontier import frontier
from leanstep.cli.max_batch import max_batch
from leanstep.cli.plan import plan
from leanstep.cli.profile import profile
from leanstep.cli.report import report
from leanstep.cli.sweep import sweep

_GIVEN = "leanstep.arguments"


# What typer says of a wrong option; by its place, as its name is not typer's to import from.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """Shows an error of leanstep's or of typer's as one sentence, without a traceback or a box.

    A context is click's, or of the copy of click that typer has from 0.26 on: it has no one type.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what was typed, for what to type next."""
        ctx.meta[_GIVEN] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            if not args:
                # It is the help that typer shows then.
                raise
            raise _said(error) from error

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except LeanstepError as error:
            typer.echo(f"error: {error}", err=True)
            if isinstance(error, BudgetError):
                again = _with_budget(ctx.meta[_GIVEN], error.floor_bytes)
                typer.echo(f"to type next: leanstep {shlex.join(again)}", err=True)
            raise typer.Exit(error.exit_code) from error
        except _USAGE_ERROR as error:
            raise _said(error) from error
        except Exception as error:
            text = users_error(error)
            if text is None:
                raise
            typer.echo(text, err=True, nl=False)
            raise typer.Exit(LeanstepError.exit_code) from error


def _said(error: Any) -> typer.Exit:
    """Say what is wrong with the arguments, and return the exit."""
    is_ours = isinstance(error, typer.BadParameter) and error.param is None
    text = error.message if is_ours else error.format_message()
    typer.echo(f"error: {text[:1].lower()}{text[1:]}", err=True)
    return typer.Exit(error.exit_code)


def _with_budget(given: Sequence[str], floor_bytes: int) -> list[str]:
    """The same arguments with the least budget that will do."""
    kept: list[str] = []
    words = iter(given)
    for word in words:
        if word == "--budget":
            next(words, None)
        elif not word.startswith("--budget="):
            kept.append(word)
    return [*kept, "--budget", f"{floor_bytes}B"]


app = typer.Typer(
    name="leanstep",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A TARGET is a model of your own, package.module:factory, or a built-in one: leanstep "
    "doctor lists them. Example: leanstep plan bert-large --batch 32 --budget 24GiB --device h200",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"leanstep {__version__}")
        raise typer.Exit


@app.callback()
def leanstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """Train any PyTorch model inside a memory budget, with exactly the same numbers."""
    # As for a script: modules of the current folder are found.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


for _command, _example in (
    (demo, "leanstep demo"),
    (profile, "leanstep profile bert-large --batch 32 --device h200 -o run.json"),
    (plan, "leanstep plan run.json --budget 24GiB -o plan.json"),
    (explain, "leanstep explain plan.json"),
    (fit, "leanstep fit gpt2-mini --batch 4 --budget 60%"),
    (frontier, "leanstep frontier run.json --points 10"),
    (sweep, "leanstep sweep resnet152 --batch 64,128 --budget 24GiB --device h200"),
    (max_batch, "leanstep max-batch bert-large --budget 24GiB --device rtx4090"),
    (report, "leanstep report run.json plan.json -o report.html"),
    (doctor, "leanstep doctor"),
):
    app.command(_command.__name__.replace("_", "-"), epilog=f"Example: {_example}")(_command)


def main() -> None:
    """The console script."""
    app()
