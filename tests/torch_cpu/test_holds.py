"""When a storage could go: its use count, less the tensors that stand in for autograd's."""

import torch

from leanstep.recorder import holds as holds_module
from leanstep.recorder.holds import Holds
from leanstep.recorder.run import record
from leanstep.recorder.signatures import Signatures
from leanstep.step.training import TrainingStep
from leanstep.torch_private.tensors import storage_address


def test_a_storage_dies_naturally_when_only_stand_ins_are_left():
    tensor, holds = torch.ones(3), Holds()
    first, second = tensor.detach(), tensor.detach()
    holds.add(0, first)
    holds.add(0, second)

    assert holds.look(5) == []
    del tensor
    assert holds.look(6) == [0] and holds.look(7) == []
    assert holds.natural_deaths == {0: 6}


def test_a_storage_that_outlives_its_last_stand_in_has_no_natural_death_of_its_own():
    tensor, holds = torch.ones(3), Holds()
    standin = tensor.detach()
    holds.add(0, standin)

    assert not holds.drop(0, 5)
    assert holds.look(6) == [] and not holds.natural_deaths


def test_a_natural_death_is_seen_when_a_stand_in_goes():
    holds = Holds()
    standin = torch.ones(3)
    holds.add(0, standin)

    assert holds.drop(0, 5) and holds.natural_deaths == {0: 5}
    # What stands in from now on changes nothing.
    holds.add(0, standin)
    assert holds.look(6) == []


def test_nobody_asks_at_every_op_for_weights_that_the_model_holds_anyway(monkeypatch):
    asked = []
    monkeypatch.setattr(
        holds_module, "storage_use_count", lambda address: asked.append(address) or 2
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
    step = TrainingStep(model, torch.ones(2, 4), lambda model, x: model(x).sum())

    graph = record(step, Signatures())

    assert len(graph.saves) >= 15
    weights = set(map(storage_address, model.parameters()))
    assert asked and weights.isdisjoint(asked)
