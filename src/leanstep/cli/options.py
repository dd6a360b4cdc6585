"""The arguments that several commands have, each with one meaning and one help text."""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A built-in model (resnet152; leanstep doctor lists them), or package.module:factory, "
        "which returns model, batch, loss (a function of model and batch) and optimizer.",
    ),
]
TargetOrRun = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|RUN.JSON",
        help="A built-in model (leanstep doctor lists them), package.module:factory, or a file "
        "that profile wrote.",
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", "-b", help="Rows in the batch.")]
Seq = Annotated[int | None, typer.Option(help="Tokens in a row, for language models.")]
Image = Annotated[int | None, typer.Option(help="Side of the images, for image models.")]
Autocast = Annotated[str | None, typer.Option(help="Mixed precision: bf16 or fp16.")]
Optimizer = Annotated[str | None, typer.Option(help="adamw or sgd, for built-in models.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-d",
        help="cpu or cuda measure here; h200, a100-80gb, rtx4090 or rtx3090 are estimated.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Shard the model over so many processes by FSDP2, and look at one of them; with an "
        "estimated device."
    ),
]
Budget = Annotated[
    str, typer.Option(help='16GiB, "16 GB", 60% of the unplanned peak, or auto (free memory).')
]
StudyBudget = Annotated[
    str, typer.Option(help="24GiB, or auto: the memory of the GPU less a margin.")
]
Solver = Annotated[str, typer.Option(help="auto, or a name of docs/solvers.md such as mu_two.")]
Engine = Annotated[str, typer.Option(help="auto, replay, module or inductor.")]
Offload = Annotated[bool, typer.Option(help="May activations wait in host memory?")]
Chunks = Annotated[bool, typer.Option(help="May the loss be computed some rows at a time?")]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact/--inexact", help="Only replays that give the same bits, or cheaper ones too."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutputPath = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result to this file.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file.")]
