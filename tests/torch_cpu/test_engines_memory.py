"""Nothing stays behind: memory goes with autograd's graph, without help of the collector."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanstep
from leanstep.engines.attach import is_attached


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return x + self.b(F.dropout(F.gelu(self.a(x)), 0.1))


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("engine", ["REPLAY", "MODULE"])
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "no backward"])
def test_block_inputs_die_with_the_graph(lab, no_collector, engine, backward) -> None:
    case = lab.Case(lambda: lab.Stack([Layer(), Layer()]))
    model, applied = case.fitted(getattr(lab, engine))
    seen = []
    hook = model.blocks[1].register_forward_pre_hook(
        lambda module, args: seen.append(weakref.ref(args[0].untyped_storage()))
    )

    for _ in range(12):
        loss = lab.mean_square(model, case.batch)
        if backward:
            loss.backward()
        del loss
        assert seen[-1]() is None
    hook.remove()
    applied.remove()


def test_copies_and_pickles_are_of_the_users_class(lab) -> None:
    case = lab.Case(lambda: lab.Stack([Layer(), Layer()]))
    model, applied = case.fitted()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)

    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]

    for other in copies:
        assert type(other.blocks[0]) is Layer
        lab.mean_square(other, case.batch).backward()
    applied.remove()
    assert type(model.blocks[0]) is Layer
    assert list(model.state_dict()) == list(case.fresh().state_dict())


def test_an_instance_of_a_blocks_class_is_a_module_like_any_other(lab) -> None:
    case = lab.Case(lambda: lab.Stack([Layer(), Layer()]))
    model, applied = case.fitted()
    other = lab.Stack([type(block)() for block in model.blocks])
    other.load_state_dict(model.state_dict())

    fitted = leanstep.fit(other, case.batch, lab.mean_square, budget="95%", verify=False)

    assert not is_attached(model.blocks[0].a) and is_attached(model.blocks[0])
    fitted.remove()
    applied.remove()
    assert not any(map(is_attached, (*model.modules(), *other.modules())))


told = []


class Registered(nn.Module):
    """Keeps its subclasses, and asks each for its name."""

    def __init_subclass__(cls, *, known_as: str, **rest) -> None:
        super().__init_subclass__(**rest)
        told.append((known_as, cls))


class RegisteredLayer(Registered, known_as="layer"):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return self.layer(x)


def test_code_that_is_told_of_subclasses_hears_nothing_of_ours(lab) -> None:
    case = lab.Case(lambda: lab.Stack([RegisteredLayer(), RegisteredLayer()]))

    assert case.differences() == []
    assert told == [("layer", RegisteredLayer)]
