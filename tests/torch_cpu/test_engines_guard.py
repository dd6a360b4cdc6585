"""A guard that holds proves that nothing watched has changed: every change must break it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leanstep.engines.guard import Guard
from leanstep.engines.reach import Executed, Watched
from leanstep.engines.validity import Watch, same

FACTOR = 3
SETTINGS = {"rate": 0.5}


def scaled(hidden, by=2.0, *, offset=1):
    return hidden * by + offset


def plain(hidden):
    return hidden


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.number, self.flag, self.widths, self.shape = 1, True, [1, 2], (4, 4)
        self.table = torch.ones(4)
        self.options = SimpleNamespace(rate=0.5)
        self.unset = None

    def forward(self, hidden):
        hidden = self.second(self.first(self.norm(hidden)) * self.table) * self.options.rate
        hidden = plain(scaled(hidden)) * FACTOR * SETTINGS["rate"] + self.number
        return hidden if self.flag and self.widths and self.shape and not self.unset else -hidden


def watch_of(block):
    executed = Executed()
    before = sys.getprofile()
    Watched(executed, block, Block.forward)(block, torch.randn(2, 4))
    assert sys.getprofile() is before
    watch = Watch(list(block.modules()), executed)
    assert not watch.missing
    return watch


class Heir(Block):
    pass


def new_code(hidden):
    return hidden + 0


CHANGES = {
    "a number": lambda b: setattr(b, "number", 2),
    "a number of another type": lambda b: setattr(b, "number", 1.0),
    "a flag that becomes a number": lambda b: setattr(b, "flag", 1),
    "a list's item": lambda b: b.widths.__setitem__(0, 7),
    "a list's item of another type": lambda b: b.widths.__setitem__(0, True),
    "a longer list": lambda b: b.widths.append(3),
    "a shorter list": lambda b: b.widths.pop(),
    "another list": lambda b: setattr(b, "widths", [1, 3]),
    "another tuple": lambda b: setattr(b, "shape", (4, 5)),
    "a tensor's shape": lambda b: setattr(b, "table", torch.ones(1)),
    "a tensor that wants gradients": lambda b: b.table.requires_grad_(),
    "an object's part": lambda b: setattr(b.options, "rate", 0.25),
    "something set that was not": lambda b: setattr(b, "unset", 1),
    "a new attribute": lambda b: setattr(b, "fresh", 1),
    "an attribute that is gone": lambda b: delattr(b, "number"),
    "a mode": lambda b: b.norm.eval(),
    "a precision": lambda b: setattr(b.norm, "eps", 1e-3),
    "a hook": lambda b: b.first.register_forward_hook(lambda *_: None),
    "a hook of backward": lambda b: b.first.register_full_backward_hook(lambda *_: None),
    "hooks in a dictionary of their own": lambda b: setattr(
        b.first, "_forward_pre_hooks", {1: lambda *_: None}
    ),
    "another child": lambda b: setattr(b, "first", nn.Linear(4, 4)),
    "children exchanged": lambda b: b._modules.update(first=b.second, second=b.first),
    "a child more": lambda b: b.add_module("third", nn.Identity()),
    "a child less": lambda b: b._modules.popitem(),
    "a frozen parameter": lambda b: b.second.bias.requires_grad_(False),
    "a parameter that is gone": lambda b: b.second.register_parameter("bias", None),
    "a function's default": lambda b: setattr(scaled, "__defaults__", (2,)),
    "a function's keyword": lambda b: scaled.__kwdefaults__.update(offset=True),
    "a function's keywords": lambda b: setattr(scaled, "__kwdefaults__", {"offset": 2}),
    "a function's code": lambda b: setattr(plain, "__code__", new_code.__code__),
    "a function's attribute": lambda b: setattr(plain, "_mark", 1),
    "another function": lambda b: globals().update(plain=new_code),
    "another method": lambda b: setattr(Block, "forward", lambda self, hidden: hidden),
    "another class": lambda b: setattr(b, "__class__", Heir),
    "a global": lambda b: globals().update(FACTOR=4),
    "a global's item": lambda b: SETTINGS.update(rate=0.75),
}


@pytest.fixture
def restored():
    """Put the functions and globals of this file back."""
    kept, code = {name: globals()[name] for name in ("plain", "FACTOR")}, plain.__code__
    forward = Block.forward
    defaults, keywords = scaled.__defaults__, dict(scaled.__kwdefaults__)
    yield
    globals().update(kept)
    plain.__code__, scaled.__defaults__, scaled.__kwdefaults__ = code, defaults, keywords
    plain.__dict__.clear()
    SETTINGS["rate"] = 0.5
    Block.forward = forward


@pytest.mark.parametrize("change", CHANGES)
def test_a_guard_breaks_with_every_change_that_is_watched(change, restored):
    block = Block()
    watch = watch_of(block)
    guard, state = Guard(watch), watch.state()
    assert guard.holds()

    CHANGES[change](block)

    if not same(state, watch.state()):
        assert not guard.holds()
    else:
        # Nothing that the block's code names.
        assert change == "a function's attribute"


def test_a_global_hook_breaks_a_guard():
    guard = Guard(watch_of(Block()))

    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)

    assert not guard.holds()
    handle.remove()
    assert guard.holds()


def test_an_equal_value_that_is_another_object_is_looked_at_anew():
    block = Block()
    block.number = 1000.5
    watch = watch_of(block)
    guard, state = Guard(watch), watch.state()

    block.number = float("1000.5")

    assert not guard.holds()
    assert same(state, watch.state()) and Guard(watch).holds()
