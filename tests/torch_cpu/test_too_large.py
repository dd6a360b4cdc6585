"""A step that does not fit on its device untouched: recorded, planned and verified all the same."""

import weakref

import pytest
import torch

import leanstep
from leanstep.errors import MeasureError
from leanstep.torch_private.modes import TorchDispatchMode
from leanstep.torch_private.tensors import tree_leaves


class SmallDevice(TorchDispatchMode):
    """A device with room for so many bytes of activations."""

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.storages = nbytes, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        live = (reference() for reference in self.storages.values())
        if sum(storage.nbytes() for storage in live if storage is not None) > self.nbytes:
            raise torch.OutOfMemoryError("out of memory, says the test")
        return out


def body(block, x):
    return x + block.b(torch.nn.functional.dropout(torch.tanh(block.a(block.norm(x))), 0.2))


def make(lab, count=6):
    torch.manual_seed(3)
    model = lab.stack_of(body, count)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), lab.rows().repeat(8, 1)


def loss_on(device_bytes):
    def loss(model, batch):
        with SmallDevice(device_bytes):
            return model(batch).pow(2).mean()

    return loss


def unlimited(model, batch):
    return model(batch).pow(2).mean()


def test_a_step_that_does_not_fit_gets_the_profile_of_one_that_does(lab):
    model, optimizer, batch = make(lab)
    known = leanstep.profile(model, batch, unlimited, optimizer=optimizer)
    tight = leanstep.profile(model, batch, loss_on(2_400_000), optimizer=optimizer)
    assert known.fits_device
    assert not tight.fits_device
    assert [op.name for op in tight.graph.ops] == [op.name for op in known.graph.ops]
    assert tight.graph.storages == known.graph.storages
    assert tight.graph.saves == known.graph.saves
    assert tight.graph.unpacks == known.graph.unpacks
    assert tight.peak_bytes == pytest.approx(known.peak_bytes, rel=0.01)
    assert tight.step_seconds > 0


def test_a_step_that_fits_only_until_the_optimizer_has_its_state_does_not_fit(lab):
    model, optimizer, batch = make(lab)

    def loss(model, batch):
        state = tree_leaves([*optimizer.state.values()])
        held = sum(leaf.nbytes for leaf in state if isinstance(leaf, torch.Tensor))
        return loss_on(3_400_000 - 4 * held)(model, batch)

    loss(model, batch)
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="60%")

    assert fitted.verdict.exact
    assert not fitted.verdict.baseline_fits


def test_it_is_fitted_verified_against_every_number_and_says_so(lab):
    model, optimizer, batch = make(lab)
    loss = loss_on(2_400_000)
    with pytest.raises(torch.OutOfMemoryError):
        loss(model, batch)
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="60%")
    assert fitted.verdict.exact
    assert not fitted.verdict.baseline_fits
    assert fitted.verdict.within_budget
    text = " ".join(str(fitted).split())
    assert "does not fit on the device" in text
    assert "activations in host memory" in text
    for _ in range(3):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    fitted.remove()


def test_a_step_that_cannot_run_at_all_is_refused_in_a_sentence(lab):
    model, optimizer, batch = make(lab)
    with pytest.raises(MeasureError, match="does not fit on cpu even with its activations"):
        leanstep.fit(model, batch, loss_on(50_000), optimizer=optimizer, budget="60%")
