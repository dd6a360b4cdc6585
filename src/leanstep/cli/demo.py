"""`leanstep demo`: a small model in less memory, and the same losses."""

import typer

import leanstep
from leanstep.cli.options import Force, Json, OutputPath
from leanstep.cli.output import Output

_MODEL, _BATCH, _SEQ, _BUDGET = "gpt2-mini", 4, 256, "60%"


def demo(as_json: Json = False, output: OutputPath = None, force: Force = False) -> None:
    """Fit a small model into 60 % of its memory, train it, and compare: about half a minute.

    -o writes the plan.
    """
    out = Output(as_json, output, force)
    from leanstep.models import build, train

    plain = train(build(_MODEL, batch=_BATCH, seq=_SEQ))
    built = build(_MODEL, batch=_BATCH, seq=_SEQ)
    model, batch, loss, optimizer = built
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=_BUDGET)
    lean = train(built)
    assert fitted.verdict is not None, "fit verifies unless it is told not to"
    out.deliver(fitted.verdict, str(fitted), saved=fitted.plan)
    if not as_json:
        verdict = "equal, bit for bit" if plain == lean else "DIFFERENT"
        typer.echo(f"\n{len(lean)} training steps, losses untouched against fitted: {verdict}")
        typer.echo("  " + "  ".join(f"{value:.6f}" for value in lean))
    # Of a model that repeats itself: others differ from run to run without a plan too.
    if fitted.verdict.exact and plain != lean:
        raise leanstep.LeanstepError("the losses are not those of the untouched model")
    if not fitted.verdict.within_budget:
        raise typer.Exit(leanstep.BudgetError.exit_code)
