"""`leanstep fit`: profile, plan, apply, verify."""

from pathlib import Path
from typing import Annotated

import typer

import leanstep
from leanstep.cli.options import (
    Autocast,
    Batch,
    Budget,
    Chunks,
    Device,
    Engine,
    Exact,
    Force,
    Image,
    Json,
    Offload,
    Optimizer,
    OutputPath,
    Seq,
    Solver,
    Target,
)
from leanstep.cli.output import Output, say_written
from leanstep.cli.source import Source

Takeover = Annotated[
    bool, typer.Option("--takeover", help="Switch off checkpointing that the model already has.")
]

# What a file of settings says, so that the command line must not.
_SAID_BY_FILE = ("budget", "solver", "engine", "offload", "chunks", "exact", "takeover")

_REPORT_ENDINGS = (".html", ".png", ".svg", ".json")


def fit(
    context: typer.Context,
    target: Target,
    budget: Budget = "60%",
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    autocast: Autocast = None,
    optimizer: Optimizer = None,
    device: Device = None,
    solver: Solver = "auto",
    engine: Engine = "auto",
    offload: Offload = True,
    chunks: Chunks = True,
    exact: Exact = True,
    takeover: Takeover = False,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings from a file: leanstep.yaml, pyproject.toml or VISSL's."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help=f"Also write a report: {', '.join(_REPORT_ENDINGS)}.")
    ] = None,
    as_json: Json = False,
    output: OutputPath = None,
    force: Force = False,
) -> None:
    """Do it all here: profile, plan, apply, and compare every number with the untouched step.

    -o writes the plan, --json prints the verdict. Leaves with 3 if it does not fit.
    """
    out = Output(as_json, output, force)
    page = Output(False, report, force)
    if report is not None and report.suffix.lower() not in _REPORT_ENDINGS:
        raise typer.BadParameter(f"{report}: end it in {', '.join(_REPORT_ENDINGS)}")
    if config is not None:
        _refuse_both(context)
    source = Source(target, batch, seq, image, autocast, optimizer, device)
    model, data, loss, update = source.ingredients()
    if config is not None:
        fitted = leanstep.from_config(model, config, batch=data, loss=loss, optimizer=update)
    else:
        fitted = leanstep.fit(
            model,
            data,
            loss,
            optimizer=update,
            budget=budget,
            solver=solver,
            engine=engine,
            offload=offload,
            chunks=chunks,
            exact=exact,
            takeover=takeover,
        )
    verdict = fitted.verdict
    out.deliver(verdict or fitted.plan, str(fitted), saved=fitted.plan)
    if page.path is not None:
        fitted.report(page.path)
        say_written(page.path)
    if verdict is not None and not verdict.within_budget:
        raise typer.Exit(leanstep.BudgetError.exit_code)


def _refuse_both(context: typer.Context) -> None:
    for name in _SAID_BY_FILE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--config says what --{name} says: leave one of them out")
