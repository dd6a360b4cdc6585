"""What compiled blocks save may wait on the host, by a backend that needs no compiler."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import leanstep  # noqa: E402
from leanstep.engines import inductor  # noqa: E402
from leanstep.engines.attach import is_attached  # noqa: E402
from leanstep.forms import compiled as forms_compiled  # noqa: E402
from leanstep.ir import Engine, Offload  # noqa: E402
from leanstep.ir.form import save_key  # noqa: E402
from leanstep.torch_private import compiler as torch_compiler  # noqa: E402

# Dynamo looks at the gradient of every tensor it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(scope="module")
def profiled():
    """A small model with its compiled profile."""
    with pytest.MonkeyPatch.context() as patch:
        plain = staticmethod(torch_compiler.compile_to_python)
        patch.setattr(inductor.CompiledForm, "compile_graph", plain)
        alone = staticmethod(torch_compiler.compile_alone_to_python)
        patch.setattr(inductor.CompiledForm, "compile_alone", alone)
        patch.setattr(forms_compiled, "MOST_FORMS", 2)
        inductor.compiled_form.cache_clear()
        torch.manual_seed(1)
        model, batch = Stack(), torch.randn(16, 32)
        yield model, batch, leanstep.profile(model, batch, engine="inductor")
    inductor.compiled_form.cache_clear()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x))).sin()


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = torch.nn.Linear(32, 32)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def offloading(profile):
    """A plan in which every call but the last has all that it keeps wait on the host."""
    plan = leanstep.plan(profile, "100%")
    *others, last = (replace(decision, engine=Engine.INDUCTOR) for decision in plan.decisions)
    (kind,) = profile.kinds
    saves = list(enumerate(kind.unplanned.saves))
    entries = tuple(Offload(save_key(n), nbytes, 0, 1) for n, nbytes in saves if nbytes)
    named = {"form": kind.unplanned.name}
    moved = (replace(decision, offload=entries, **named) for decision in others)
    return replace(plan, decisions=(*moved, replace(last, **named)))


@pytest.mark.parametrize("what", ["weight", "input", "output"])
def test_a_write_to_what_an_offloading_block_saved_raises_as_in_autograd(profiled, what):
    model, batch, profile = profiled
    block = model.blocks[0]
    seen = {"weight": block.norm.weight}
    hook = block.register_forward_hook(
        lambda module, args, out: seen.update(input=args[0], output=out)
    )
    applied = leanstep.apply(model, offloading(profile))
    loss = model(batch)
    with torch.no_grad():
        seen[what].add_(0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
        loss.backward()
    applied.remove()
    hook.remove()


def test_hooks_of_the_user_s_see_what_would_wait_on_the_host(profiled):
    model, batch, profile = profiled
    plan = offloading(profile)
    bare = replace(plan, decisions=tuple(replace(d, offload=()) for d in plan.decisions))
    seen = {}
    for name, one in (("bare", bare), ("offloading", plan)):
        found = seen[name] = []
        applied = leanstep.apply(model, one)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, found=found: (found.append(tensor.shape), tensor)[1],
            lambda tensor: tensor,
        ):
            model(batch).backward()
        applied.remove()
    assert seen["bare"] == seen["offloading"] != []


def test_the_unplanned_step_has_nothing_on_the_host(profiled):
    model, batch, profile = profiled
    applied = leanstep.apply(model, offloading(profile))
    with applied.paused():
        model(batch).backward()
    assert not applied.rounds.lot._lanes
    model(batch).backward()
    assert applied.rounds.lot._lanes
    applied.remove()


def test_a_plan_set_aside_makes_room_for_another(profiled):
    model, _, profile = profiled
    first = leanstep.apply(model, offloading(profile))
    first.set_aside()
    leanstep.apply(model, offloading(profile)).remove()
    first.resume()
    assert all(map(is_attached, model.blocks))
    first.remove()
    assert not any(map(is_attached, model.blocks))
