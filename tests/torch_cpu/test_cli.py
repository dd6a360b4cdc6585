"""The command line, as a person or a program would use it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import leanstep
from leanstep.cli import app

SRC = Path(leanstep.__file__).resolve().parents[1]
COMMANDS = (
    *("demo", "profile", "plan", "explain", "fit", "frontier", "sweep", "max-batch"),
    *("report", "doctor"),
)
FACTORY = """
import torch
from torch import nn

def make(batch=512, width=64):
    layers = lambda: (nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))
    model = nn.Sequential(*[nn.Sequential(*layers()) for _ in range(4)])
    loss = lambda model, batch: model(batch).square().mean()
    return model, torch.randn(batch, width), loss, torch.optim.SGD(model.parameters(), lr=0.1)

def without_batch():
    return make()

def sharded(mesh):
    from torch.distributed.fsdp import fully_shard
    model, batch, loss, _ = make()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1)

def number():
    return 3

def broken(batch=512):
    return beneath(batch)

def beneath(batch):
    raise KeyError("no such data set")

def of_outputs():
    model, batch, _, optimizer = make()
    return model, batch, lambda output: output.mean(), optimizer
"""


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of the user's, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "users_train.py").write_text(FACTORY)
    yield tmp_path
    sys.modules.pop("users_train", None)


@pytest.fixture(scope="module")
def run_text():
    """A profile, made once by the command itself."""
    done = run("profile", "gpt2-tiny", "--batch", 32, "--device", "h200", "--json")
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def run_json(folder, run_text):
    path = folder / "run.json"
    path.write_text(run_text)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_ends_with_an_example(command):
    done = run(command, "--help")

    assert done.exit_code == 0
    assert f"Example: leanstep {command}" in done.stdout.strip().splitlines()[-1]
    assert all(option in done.stdout for option in ("--json", "--output", "--force"))


def test_all_commands_are_listed():
    said = run("--help").stdout

    assert all(f" {command} " in said for command in COMMANDS)


@pytest.mark.parametrize("command", [(), ("plan",), ("fit",)])
def test_help_says_where_the_built_in_models_are_listed(command):
    said = run(*command, "--help").stdout.replace("│", " ")

    assert "leanstep doctor lists them" in " ".join(said.split())


def test_the_command_line_loads_no_torch_before_it_is_needed():
    program = (
        "import sys; from leanstep.cli import app\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['plan', '--help']).exit_code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}

    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0


def test_python_m_leanstep_runs_it():
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "leanstep", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.stdout == f"leanstep {leanstep.__version__}\n"


def test_a_profile_is_planned_explained_and_drawn_from_its_file(run_json, folder):
    assert leanstep.Profile.load(run_json).estimated
    planned = run("plan", run_json, "--budget", "80%", "--no-offload", "-o", "plan.json")
    assert planned.exit_code == 0, planned.output
    assert "layers." in planned.stdout and "proved bound" in planned.stdout
    assert "wrote plan.json" in planned.stderr

    plan = leanstep.Plan.load("plan.json")
    assert plan.peak_bytes <= plan.budget_bytes
    assert run("explain", "plan.json").stdout.strip() == str(plan.explain()).strip()
    assert json.loads(run("explain", "plan.json", "--json").stdout)["leanstep"] == "Explanation"

    traced = run("report", run_json, "plan.json", "-o", "trace.json")
    assert traced.exit_code == 0, traced.output
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    pytest.importorskip("matplotlib")
    drawn = run("report", run_json, "plan.json", "-o", "memory.svg")
    assert drawn.exit_code == 0, drawn.output
    assert Path("memory.svg").stat().st_size > 1000


def test_json_on_standard_output_is_the_file_and_nothing_else(run_json, folder):
    done = run("plan", run_json, "--budget", "80%", "--json", "-o", "plan.json")

    assert done.stdout == Path("plan.json").read_text()


def test_a_profile_of_a_model_says_what_it_found():
    done = run("profile", "users_train:make", "--batch", 64, "--device", "h200")

    assert done.exit_code == 0, done.output
    assert "NVIDIA H200 (estimated)" in done.stdout and "peak memory" in done.stdout


def test_a_rank_of_many_is_planned_for_without_the_others():
    planned = run("plan", "gpt2-tiny", "--device", "h200", "--ranks", 8, "--json")
    assert planned.exit_code == 0, planned.output

    one, eight = (
        run("profile", "users_train:sharded", "--device", "h200", "--ranks", n) for n in (1, 8)
    )
    assert "NVIDIA H200, one of 8 ranks (estimated)" in " ".join(eight.stdout.split())
    assert one.stdout != eight.stdout


def test_no_file_is_overwritten_without_force(run_json):
    Path("plan.json").write_text("mine")

    refused = run("plan", run_json, "--budget", "90%", "-o", "plan.json")
    assert refused.exit_code == 2
    assert refused.stderr == "error: plan.json is there already: --force overwrites it\n"
    assert Path("plan.json").read_text() == "mine"

    assert run("plan", run_json, "--budget", "90%", "-o", "plan.json", "--force").exit_code == 0
    assert leanstep.Plan.load("plan.json")


def test_a_budget_that_cannot_be_met_says_what_to_type_next(run_json):
    done = run("plan", run_json, "--budget=1MiB", "--no-offload")

    assert done.exit_code == 3
    assert "Traceback" not in done.output
    error, hint = done.stderr.strip().splitlines()
    assert error.startswith("error: no plan fits 1.0 MiB")
    typed = hint.removeprefix("to type next: leanstep ").split()
    assert run(*typed).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "resnet15"), "did you mean 'resnet152'?"),
        (("plan", "users_train:mak"), "did you mean 'make'?"),
        (("plan", "users_trian:make"), "no module is called 'users_trian'"),
        (("plan", "nowhere.py:make"), "nowhere.py is not a file"),
        (("plan", "gpt2-tiny", "--device", "h20"), "did you mean 'h200'?"),
        (("profile", "users_train:make", "--seq", "8"), "unexpected keyword argument 'seq'"),
        (("fit", "users_train:make", "--device", "h200"), "h200 is not here: type leanstep plan"),
        (("profile", "gpt2-tiny", "--ranks", "2"), "needs an estimated device, such as --device"),
        (("plan", "gpt2-tiny", "--device", "h200", "--ranks", "0"), "from 1 to 1024"),
        (("plan", "users_train:sharded", "--device", "h200"), "say how many --ranks"),
        (("plan", "run.json", "--ranks", "2"), "its sizes and device are fixed"),
        (("plan", "nowhere.json"), "there is no file nowhere.json"),
        (("max-batch", "run.json", "--budget", "1GiB"), "run.json is a file: this command runs"),
        (("fit", "run.json", "--device", "h200"), "run.json is a file: this command runs"),
        (("sweep", "gpt2-tiny", "--batch", "1;2"), "is not a list such as 1,2,4,8"),
        (("sweep", "gpt2-tiny"), "none is here; write a size"),
        (("plan", "gpt2-tiny", "--engine", "replya"), "did you mean 'replay'?"),
        (("plan", "users_train"), "as users_train:make"),
        (("plan", "users_train.py"), "as users_train:make"),
        (("plan", "users_train:number"), "returns int: a factory returns a tuple of model"),
        (
            ("max-batch", "gpt2-tiny", "--device", "h200", "--max-slowdown", "fast"),
            "max_slowdown 'fast' is not a share",
        ),
        (
            ("sweep", "users_train:without_batch", "--batch", "1", "--budget", "1GiB"),
            "unexpected keyword argument 'batch'",
        ),
        (("plan", "run.json", "--batch", "4"), "its sizes and device are fixed"),
        (("plan", "run.json", "--solver", "mu_tow"), "did you mean 'mu_two'?"),
        (("report", "run.json", "-o", "memory.bmp"), "end it in .html, .png, .svg, .json"),
        (
            ("report", "run.json", "-o", "x.html", "--figure", "peak"),
            "'peak' goes with .png or .svg",
        ),
        (("report", "run.json", "-o", "x.svg", "--figure", "peek"), "did you mean 'peak'?"),
        (("report", "run.json", "-o", ".", "--force"), ". is a folder: name a file in it"),
        (("fit", "users_train:make", "--report", "x.pdf"), "x.pdf: end it in .html"),
        (("explain", "run.json"), "holds a Profile, not a Plan"),
        (("plan", ":make"), ":make names no module"),
        (("profile", "users_train:of_outputs"), "the loss takes (output), but is called as"),
        (("plam",), "Did you mean 'plan'?"),
        (("--bugdet", "1GiB"), "no such option: --bugdet"),
        (("plan",), "missing argument 'TARGET"),
        (("plan", "gpt2-tiny", "--batch", "many"), "'--batch'"),
        (
            ("fit", "gpt2-tiny", "--device", "tpu"),
            "known are cpu, cuda, h200",
        ),
        (("fit", "gpt2-tiny", "--device", "h20"), "did you mean 'h200'?"),
    ],
)
def test_a_wrong_word_gets_a_sentence_and_no_traceback(arguments, said, run_json):
    done = run(*arguments)

    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert not done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("fit", "users_train:broken"),
        ("fit", "users_train.py:broken"),
        ("plan", "users_train:broken", "--device", "h200"),
        ("sweep", "users_train:broken", "--device", "h200", "--batch", "4", "--budget", "1GiB"),
    ],
    ids=" ".join,
)
def test_a_factory_that_raises_is_shown_from_its_own_frames_on(arguments):
    done = run(*arguments)

    assert done.exit_code == 1
    first, *frames, error = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert error == "KeyError: 'no such data set'"
    places = [line for line in frames if line.lstrip().startswith("File ")]
    assert [line.rpartition(" in ")[2] for line in places] == ["broken", "beneath"]
    assert all("users_train.py" in line for line in places)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("raise OSError('no disk')", "OSError: no disk"),
        (
            "import nothing_of_the_sort",
            "ModuleNotFoundError: No module named 'nothing_of_the_sort'",
        ),
        ("def make(:", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("target", ["users_broken:make", "users_broken.py:make"])
def test_a_module_that_cannot_be_imported_is_shown_without_frames_of_others(target, text, last):
    Path("users_broken.py").write_text(f"{text}\n")

    done = run("fit", target)

    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == last
    assert 'users_broken.py", line 1' in done.stderr
    assert done.stderr.count("File ") == 1


def test_an_error_of_leansteps_own_keeps_its_frames(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("ours")

    monkeypatch.setattr(importlib.import_module("leanstep.models.build"), "check_known", fail)

    assert isinstance(run("fit", "gpt2-tiny").exception, AssertionError)


@pytest.mark.parametrize("target", ["users_train:make", "users_train.py:make"])
def test_a_factory_of_the_current_folder_is_fitted_and_verified(target):
    done = run("fit", target, "--batch", 2048, "--budget", "80%", "-o", "plan.json")

    assert done.exit_code == 0, done.output
    assert "bit-equal to the untouched model" in done.stdout
    assert leanstep.Plan.load("plan.json").changed


def test_a_person_at_a_terminal_reads_what_fit_is_doing(monkeypatch, folder):
    monkeypatch.setenv("LEANSTEP_CACHE_DIR", str(folder / "cache"))
    said = []
    monkeypatch.setattr("leanstep.stages._draw", said.append)

    done = run("fit", "users_train:make", "--batch", 2048, "--budget", "80%", "--json")

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    stages = list(dict.fromkeys(texts[1] for texts in said if len(texts) == 2))
    names = [name for name in stages if not name.startswith(("timing ops", "again"))]
    assert names == [
        "timing the step",
        "recording the step",
        "measuring the untouched step",
        "planning",
        "dry run",
        "measuring the planned step",
    ]
    assert any(name.startswith("timing ops (1 of ") for name in stages)
    assert said[-1] == ()


def test_the_demo_trains_the_same_losses(monkeypatch):
    for name, value in (("_MODEL", "gpt2-tiny"), ("_SEQ", 32), ("_BUDGET", "95%")):
        monkeypatch.setattr(sys.modules["leanstep.cli.demo"], name, value)

    done = run("demo")

    assert done.exit_code == 0, done.output
    assert "losses untouched against fitted: equal, bit for bit" in done.stdout


def test_a_demo_with_other_losses_does_not_leave_as_if_all_were_well(monkeypatch):
    for name, value in (("_MODEL", "gpt2-tiny"), ("_SEQ", 32), ("_BUDGET", "95%")):
        monkeypatch.setattr(sys.modules["leanstep.cli.demo"], name, value)
    losses = iter(([1.0], [2.0]))
    monkeypatch.setattr("leanstep.models.train", lambda built: next(losses))

    done = run("demo")

    assert done.exit_code == 1
    assert "losses untouched against fitted: DIFFERENT" in done.stdout
    assert "error: the losses are not those of the untouched model" in done.stderr


def test_fit_prints_its_verdict_as_json():
    limits = ("--batch", 2048, "--budget", "80%")
    done = run("fit", "users_train:make", *limits, "--json", "--report", "trace.json")

    Path("verdict.json").write_text(done.stdout)
    assert leanstep.Verdict.load("verdict.json").within_budget
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


def test_fit_takes_its_settings_from_a_file():
    Path("leanstep.yaml").write_text("budget: 80%\nsplits: auto\n")
    given = ("fit", "users_train:make", "--batch", 2048, "--config", "leanstep.yaml")
    done = run(*given, "--json")

    Path("verdict.json").write_text(done.stdout)
    assert leanstep.Verdict.load("verdict.json").within_budget

    both = run(*given, "--budget", "50%")
    assert both.exit_code == 2 and "leave one of them out" in both.stderr
    Path("leanstep.yaml").write_text("bugdet: 80%\n")
    unknown = run(*given)
    assert unknown.exit_code == 2 and "did you mean 'budget'?" in unknown.stderr


def test_a_page_tells_all_that_the_files_of_one_model_tell(run_json):
    pytest.importorskip("plotly")
    assert run("plan", run_json, "--budget", "80%", "-o", "plan.json").exit_code == 0

    done = run("report", "plan.json", run_json, "-o", "report.html")

    assert done.exit_code == 0, done.output
    assert "wrote report.html" in done.stderr
    assert "Fits, as predicted" in Path("report.html").read_text()


def test_a_report_says_as_json_what_it_wrote(run_json):
    done = run("report", run_json, "-o", "trace.json", "--json")

    size = Path("trace.json").stat().st_size
    said = {"file": "trace.json", "num_bytes": size, "shows": ["Profile"]}
    assert json.loads(done.stdout) == said


def test_a_frontier_alone_is_a_figure_but_no_page(run_json):
    made = run("frontier", run_json, "--points", 2, "--solver", "optimal", "-o", "frontier.json")
    assert made.exit_code == 0, made.output

    refused = run("report", "frontier.json", "-o", "report.html")
    assert refused.exit_code == 2
    assert "give the profile too" in refused.stderr
    pytest.importorskip("matplotlib")
    assert run("report", "frontier.json", "-o", "frontier.svg").exit_code == 0


def test_a_frontier_has_a_column_for_each_solver(run_json):
    arguments = ("--points", 3, "--solver", "optimal", "--solver", "mu_two")
    done = run("frontier", run_json, *arguments)

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split() == ["budget", "share", "optimal", "mu_two"]


def test_a_sweep_is_printed_saved_and_drawn():
    arguments = ("--batch", "256,4096", "--budget", "12MiB", "--device", "h200", "-o", "s.json")
    done = run("sweep", "users_train:make", *arguments)

    assert done.exit_code == 0, done.output
    assert "users_train:make · NVIDIA H200 (estimated)" in done.stdout
    assert [trial.batch for trial in leanstep.Sweep.load("s.json").trials] == [256, 4096]
    pytest.importorskip("matplotlib")
    assert run("report", "s.json", "-o", "sweep.png").exit_code == 0


def test_studies_in_which_nothing_fits_leave_with_the_code_of_a_budget():
    limits = ("--budget", "1KiB", "--device", "h200")

    assert run("sweep", "users_train:make", "--batch", 8, *limits).exit_code == 3
    assert run("max-batch", "users_train:make", *limits).exit_code == 3


def test_the_levers_of_fit_have_switches():
    levers = ("--engine", "module", "--no-offload", "--inexact", "--takeover")
    done = run("fit", "users_train:make", "--batch", 2048, "--budget", "90%", *levers)

    assert done.exit_code == 0, done.output
    assert " module " in done.stdout


def test_the_largest_batch_is_found_and_printed_as_json():
    limits = ("--budget", "8MiB", "--device", "h200", "--json", "--max-slowdown", "50%")
    done = run("max-batch", "users_train:make", *limits)

    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["content"]
    assert 0 < found["untouched_batch"] < found["planned_batch"]
    assert found["max_slowdown"] == 0.5


def test_the_doctor_answers_in_both_forms():
    assert "solvers" in run("doctor").stdout
    assert json.loads(run("doctor", "--json").stdout)["leanstep"] == "Checkup"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence():
    done = run("fit", "bert-tiny", "--device", "cuda")

    assert done.exit_code == 2
    assert "torch finds no GPU" in done.stderr
