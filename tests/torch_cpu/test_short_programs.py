"""Inductor's programs called past what they have seen to at their first call."""

import shutil
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402

from leanstep.engines.inductor import CompiledForm  # noqa: E402
from leanstep.torch_private import programs as torch_programs  # noqa: E402
from leanstep.torch_private.programs import ShortProgram, shortened  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

PROGRAM = """
def call(args):
    x, = args
    args.clear()
    assert_size_stride(x, (2,), (1,))
    kernel.run(x, 7, stream=5)
    assert_size_stride(x, (2,), (1,), "torch.ops.aten.mm.default")
    return (x,)
"""

LAUNCHER = """
def launcher(x, size, stream):
    runner(size // 2, 1, 1, stream, x, size)
"""


class Driver:
    """What is launched, and in how much of torch's Python."""

    def __init__(self):
        self.launches, self.checks, self.asked = [], [], 0

    def _launch_kernel(self, *launch):
        self.launches.append(launch)

    def assert_size_stride(self, *check):
        self.checks.append(check[3:])


class StaticKernel:
    function, num_warps, shared, arg_tys = 11, 4, 256, "Oi"
    has_global_scratch, has_profile_scratch = True, False

    def __init__(self, driver):
        self.C_impl, self._driver = driver, driver

    def run(self, x, y, z, stream, *arguments):
        self._driver.asked += 1
        launch = (self.function, x, y, z, self.num_warps, self.shared)
        self._driver._launch_kernel(*launch, self.arg_tys + "O", (*arguments, None), stream)


def kernel_on(driver, **facts):
    """One of Inductor's as torch 2.11 has them, after its first launch."""
    names = {"runner": StaticKernel(driver).run}
    exec(LAUNCHER, names)
    launcher = names["launcher"]
    launcher.config, launcher.store_cubin, launcher._is_static = SimpleNamespace(), False, True
    kernel = object.__new__(CachingAutotuner)
    vars(kernel).update(
        launchers=[launcher],
        inductor_meta={},
        triton_meta={},
        triton_interpret=False,
        dump_launch_params=False,
        dump_launch_tensors=False,
        device_props=SimpleNamespace(type="cuda"),
        fn=SimpleNamespace(__name__="kernel"),
    )
    vars(kernel).update(facts)
    return kernel


def compiled_on(driver, kernel):
    """A program of Inductor's that launches a kernel, and its first call's results."""
    names = {
        "__name__": "torch._inductor.runtime.compile_tasks.c0",
        "assert_size_stride": driver.assert_size_stride,
        "kernel": kernel,
    }
    exec(PROGRAM, names)

    class Compiled:
        current_callable = staticmethod(names["call"])
        calls = 0

        def __call__(self, arguments):
            self.calls += 1
            return self.current_callable(arguments)

    return Compiled()


def old_run(driver, kernel):
    """How the kernel's own `run` would launch, without what only a GPU has."""
    (launcher,) = kernel.launchers

    def run(*arguments, stream):
        driver.asked += 1
        launcher(*arguments, stream=stream)

    return run


def test_a_known_launch_goes_straight_to_the_driver():
    driver, x = Driver(), object()
    kernel = kernel_on(driver)
    kernel.run = old_run(driver, kernel)
    compiled = compiled_on(driver, kernel)
    program = ShortProgram(compiled, is_guarded=True)
    assert program([x]) == (x,)
    assert (driver.asked, driver.checks) == (2, [(), ("torch.ops.aten.mm.default",)])
    assert program([x]) == (x,)
    # As at first, asked nothing more but whether an operator's result is laid out as expected.
    assert (driver.asked, driver.checks[2:]) == (2, [("torch.ops.aten.mm.default",)])
    assert driver.launches[0] == driver.launches[1]
    assert driver.launches[1] == (11, 3, 1, 1, 4, 256, "OiO", (x, 7, None), 5)
    # Who else has compiled the same has the same module: it is as it was.
    compiled([x])
    assert driver.asked == 4
    assert len(driver.checks) == 5


def test_without_guards_inputs_are_checked_every_time():
    driver, x, launched = Driver(), object(), []

    def launcher(*arguments, stream):
        launched.append((arguments, stream))

    # As torch keeps it from 2.13 on.
    compiled = compiled_on(driver, kernel_on(driver, _cached_launcher=launcher))
    shortened(compiled, is_guarded=False)([x])
    assert launched == [((x, 7), 5)]
    assert driver.checks == [(), ("torch.ops.aten.mm.default",)]


def test_a_profiler_hears_of_every_kernel():
    driver, x = Driver(), object()
    kernel = kernel_on(driver)
    kernel.run = old_run(driver, kernel)
    compiled = compiled_on(driver, kernel)
    program = ShortProgram(compiled, is_guarded=True)
    program([x])
    program([x])
    with torch.autograd.profiler.profile():
        program([x])
    assert compiled.calls == 2


@pytest.mark.parametrize(
    "facts",
    [
        {"launchers": []},
        {"launchers": [print, print]},
        {"inductor_meta": {"coordinate_descent_tuning": True}},
        {"triton_interpret": True},
        {"dump_launch_tensors": True},
        {"_cached_launcher": None},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_a_kernel_that_torch_has_questions_about_stays_torchs(facts):
    assert torch_programs._launcher(kernel_on(Driver(), **facts)) is None


@pytest.mark.parametrize("name", ["store_cubin", "_is_static"])
def test_a_launcher_that_is_not_all_stays_torchs(name):
    kernel = kernel_on(Driver())
    setattr(kernel.launchers[0], name, name == "store_cubin")
    assert torch_programs._launcher(kernel) is None


def test_another_version_of_torch_is_left_alone(monkeypatch):
    driver = Driver()
    compiled = compiled_on(driver, kernel_on(driver))
    monkeypatch.setattr(torch_programs, "READ_VERSIONS", ("1.0",))
    assert shortened(compiled, is_guarded=True) is compiled


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.up(self.norm(x)))


def test_who_wraps_it_sees_that_it_takes_a_list():
    wrapped = torch._dynamo.disable(ShortProgram(lambda arguments: arguments))

    assert wrapped._boxed_call


@pytest.fixture
def programs(monkeypatch):
    """Those that are made, each with whether CUDA graphs were asked for."""
    found = {}
    first = ShortProgram.__init__

    def noted(program, *args, **kwargs):
        found[program] = torch._inductor.config.triton.cudagraphs
        first(program, *args, **kwargs)

    monkeypatch.setattr(ShortProgram, "__init__", noted)
    return found


def steps_of(block, x, *others):
    """Three steps of a compiled block, and its form."""
    form = CompiledForm(type(block).forward, (), {})

    def step():
        out = form(block, (x, *others), {})
        return out, *torch.autograd.grad(out.sum(), [x, *block.parameters()])

    return form, [step() for _ in range(3)]


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler"
)


@needs_compiler
def test_a_program_of_inductors_is_known_and_computes_the_same(programs):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 8, requires_grad=True)

    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        form, steps = steps_of(block, x)

    for later in steps[1:]:
        assert all(map(torch.equal, steps[0], later))
    # What shares a program may not share its results' memory.
    assert list(programs.values()) == [False, False]
    assert all(program._short is not program._compiled for program in programs)
    assert [program.is_guarded for program in programs] == [True, False]
    # An input of another layout meets guards before it meets the program.
    other = torch.randn(8, 4).t().requires_grad_()
    assert torch.allclose(form(block, (other,), {}), block(other))
    assert form.captures == 2


class Viewed(Block):
    def forward(self, x):
        return super().forward(x).view(-1, 4)


@needs_compiler
def test_so_is_one_whose_calls_go_through_autograds_wrappers(programs):
    torch.manual_seed(0)
    block, x = Viewed(), torch.randn(4, 8, requires_grad=True)

    _, steps = steps_of(block, x)

    out = block(x)
    expected = out, *torch.autograd.grad(out.sum(), [x, *block.parameters()])
    for step in steps:
        assert all(map(torch.allclose, step, expected))
    # These may hand over another tensor than guards have seen.
    assert [program.is_guarded for program in programs] == [False, False]
