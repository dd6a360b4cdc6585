"""Compiled blocks called past torch's own Python: by torch's guards, and by nothing else."""

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from small_blocks import WIDTH, Dropped, Net, example_of, form_of, rows  # noqa: E402

from leanstep.engines import inductor  # noqa: E402
from leanstep.torch_private.compiler import compiler_errors  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("without_compiler"),
]


class Counted:
    """A form, and how often it is called through torch's own Python."""

    def __init__(self, example):
        self.form, self.through_torch = form_of(example), 0
        call, compiled = self.form._run, self.form._run._compiled

        def counted(*args, **kwargs):
            self.through_torch += 1
            return compiled(*args, **kwargs)

        call._compiled = counted

    def __call__(self, module, x):
        return self.form(module, (x,), {})


def test_torchs_python_is_needed_for_the_first_call_alone():
    example = example_of(Net)
    form = Counted(example)
    twins = [copy.deepcopy(example.module) for _ in range(3)]
    for module in twins:
        assert torch.equal(form(module, rows()), module(rows()))
    assert (form.through_torch, form.form.captures, form.form.runs) == (1, 1, 3)


def test_guards_decide_about_every_call():
    example = example_of(Dropped)
    module, form = example.module, Counted(example)
    form(module, rows())
    longer = torch.randn(3, WIDTH, requires_grad=True)
    torch.manual_seed(5)
    found = form(module, longer)
    torch.manual_seed(5)
    assert torch.equal(found, module(longer))
    assert (form.through_torch, form.form.captures) == (2, 2)
    with torch.no_grad():
        assert not form(module, longer).requires_grad
    assert (form.through_torch, form.form.captures) == (3, 3)
    # What ran last is tried first.
    assert form(module, longer).requires_grad
    assert form(module, longer).requires_grad
    assert (form.through_torch, form.form.captures) == (4, 3)


class Switched(Net):
    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor if self.training else x.sin()


def test_a_mode_or_a_number_that_changes_is_seen():
    example = example_of(Switched)
    module, form = example.module, Counted(example)
    for change in (lambda: None, module.eval, module.train, lambda: setattr(module, "factor", 3.0)):
        change()
        assert torch.equal(form(module, rows()), module(rows()))


def test_guards_that_torch_has_dropped_are_not_asked():
    example = example_of(Net)
    form = Counted(example)
    form(example.module, rows())
    torch._dynamo.reset()
    assert torch.equal(form(example.module, rows()), example.module(rows()))
    assert (form.through_torch, form.form.captures) == (2, 2)


def test_a_module_that_is_gone_leaves_no_guard_behind():
    example = example_of(Net)
    form = Counted(example)
    form(example.module, rows())
    for _ in range(3):
        fresh = Net()
        assert torch.equal(form(fresh, rows()), fresh(rows()))
        del fresh


def test_what_a_compiled_call_raises_comes_through():
    example = example_of(Net)
    form = Counted(example)
    form(example.module, rows())
    with pytest.raises(compiler_errors()):
        form.form(example.module, (), {})
    assert torch.equal(form(example.module, rows()), example.module(rows()))


def test_what_torch_has_dropped_is_not_kept_alive():
    def programs():
        gc.collect()
        return {name for name in vars(inductor) if name.startswith("__compiled_fn")}

    before = programs()
    example = example_of(Net)
    form = Counted(example)
    for _ in range(2):
        form(example.module, rows())
    assert programs() - before
    torch._dynamo.reset()
    assert not programs() - before
