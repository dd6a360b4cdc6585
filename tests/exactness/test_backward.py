"""Every way to ask for gradients: the same numbers, or an error in a sentence."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def body(self, x):
    return x + functional.dropout(self.b(functional.gelu(self.a(self.norm(x)))), 0.1)


def smooth(self, x):
    return x + self.b(torch.tanh(self.a(self.norm(x))))


def loss_of(model, batch):
    return model(batch).pow(2).mean()


def accumulated(model, batch):
    losses = [loss_of(model, part) for part in batch.split([32, 8, 24])]
    for loss in losses:
        (loss / 3).backward()
    return losses


def accumulated_in_turns(model, batch):
    losses = []
    for part in batch.split([40, 8, 8, 8]):
        losses.append(loss_of(model, part))
        losses[-1].backward()
    return losses


def two_losses(model, batch):
    out = model(batch)
    first, second = out.pow(2).mean(), out.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    return [first, second]


def backward_three_times(model, batch):
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def a_block_twice(model, batch):
    hidden = model.blocks[0](model.first(batch))
    hidden.sum().backward(retain_graph=True)
    out = model.blocks[1](hidden)
    out.pow(2).mean().backward(retain_graph=True)
    hidden.pow(2).mean().backward()
    return [out, hidden]


def from_the_middle(model, batch):
    """One loss per depth, each with a backward of its own through a shared trunk."""
    hidden, losses = model.first(batch), []
    for block in model.blocks:
        hidden = block(hidden)
        losses.append(hidden.pow(2).mean())
    for loss in losses[:-1]:
        loss.backward(retain_graph=True)
    losses[-1].backward()
    return losses


def part_of_the_graph(model, batch):
    loss = loss_of(model, batch)
    last = torch.autograd.grad(loss, [model.blocks[1].b.weight], retain_graph=True)
    first = torch.autograd.grad(loss, list(model.parameters()))
    return [loss, *last, *first]


def unused_inputs(model, batch):
    spare = torch.ones(3, requires_grad=True)
    batch = batch.clone().requires_grad_()
    loss = loss_of(model, batch)
    found = torch.autograd.grad(loss, [batch, spare, model.first.weight], allow_unused=True)
    assert found[1] is None
    return [loss, found[0], found[2]]


def only_some_inputs(model, batch):
    batch = batch.clone().requires_grad_()
    loss = loss_of(model, batch)
    loss.backward(inputs=[batch, model.blocks[0].a.weight])
    return [loss, batch.grad]


def never_run(model, batch):
    model(batch)
    loss_of(model, batch)
    return two_losses(model, batch)


def in_another_thread(model, batch):
    loss = loss_of(model, batch)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss]


def with_anomalies_detected(model, batch):
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        loss = loss_of(model, batch)
        loss.backward()
    return [loss]


def with_hooks(model, batch):
    seen = []
    hooks = [
        model.blocks[0].register_full_backward_hook(lambda m, _, out: seen.append(out[0].sum())),
        model.blocks[1].a.register_full_backward_hook(lambda m, _, out: seen.append(out[0].sum())),
        model.blocks[1].register_full_backward_pre_hook(lambda m, out: (out[0] * 1.5,)),
    ]
    hidden = model.blocks[0](model.first(batch))
    hidden.register_hook(lambda slope: slope * 2)
    hidden.retain_grad()
    loss = model.blocks[1](hidden).pow(2).mean()
    loss.grad_fn.register_hook(lambda *slopes: seen.append(slopes[0][0].sum()))
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [loss, hidden.grad, *seen]


def frozen_in_part(model, batch):
    model.blocks[0].requires_grad_(False)
    loss = loss_of(model, batch)
    loss.backward()
    model.blocks[0].requires_grad_(True)
    return [loss]


def functional_parameters(model, batch):
    others = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
    loss = torch.func.functional_call(model, others, (batch,)).pow(2).mean()
    loss.backward()
    return [loss]


def evaluated_between(model, batch):
    loss = loss_of(model, batch)
    model.eval()
    with torch.no_grad():
        seen = model(batch[:8])
    with torch.inference_mode():
        model(batch[:4])
    model.train()
    loss.backward()
    return [loss, seen]


STEPS = [
    *(accumulated, accumulated_in_turns, two_losses, backward_three_times, a_block_twice),
    *(from_the_middle, part_of_the_graph, unused_inputs, only_some_inputs, never_run),
    *(in_another_thread, with_anomalies_detected, with_hooks, frozen_in_part),
    *(functional_parameters, evaluated_between),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_way_to_run_backward(lab, step):
    lab.check_same(lab.Case(lambda: lab.stack_of(body), step=step))


def input_slope(model, batch):
    """The gradient penalty of a critic."""
    batch = batch.clone().requires_grad_()
    out = model(batch)
    (slope,) = torch.autograd.grad(out.sum(), batch, create_graph=True)
    loss = out.mean() + 10 * (slope.norm(2, dim=1) - 1).pow(2).mean()
    loss.backward()
    return [loss, slope, batch.grad]


def slope_of_weights(model, batch):
    loss = loss_of(model, batch)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + sum(slope.pow(2).sum() for slope in slopes)
    total.backward()
    return [total]


def hessian_times_vector(model, batch):
    weight = model.blocks[0].a.weight
    loss = loss_of(model, batch)
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    (product,) = torch.autograd.grad((slope * torch.ones_like(slope)).sum(), weight)
    loss_of(model, batch).backward()
    return [loss, product]


def third_order(model, batch):
    batch = batch.clone().requires_grad_()
    slope = model(batch).tanh().sum()
    for _ in range(2):
        (slope,) = torch.autograd.grad(slope.sum(), batch, create_graph=True)
    slope.pow(2).sum().backward()
    return [slope]


def unrolled_step(model, batch):
    """Meta-learning: differentiate through an update."""
    names, weights = zip(*model.named_parameters(), strict=True)
    loss = loss_of(model, batch)
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    updated = {n: w - 0.1 * s for n, w, s in zip(names, weights, slopes, strict=True)}
    out = torch.func.functional_call(model, updated, (batch,)).pow(2).mean()
    out.backward()
    return [loss, out]


DOUBLE = [input_slope, slope_of_weights, hessian_times_vector, third_order, unrolled_step]


@pytest.mark.parametrize("step", DOUBLE, ids=lambda step: step.__name__)
@pytest.mark.parametrize("kind", [smooth, body], ids=["smooth", "with dropout"])
def test_gradients_of_gradients(lab, step, kind):
    lab.check_same(lab.Case(lambda: lab.stack_of(kind), step=step))


def test_gradients_of_gradients_that_are_part_of_the_planned_loss(lab):
    def loss(model, batch):
        batch = batch.clone().requires_grad_()
        out = model(batch)
        (slope,) = torch.autograd.grad(out.sum(), batch, create_graph=True)
        return out.pow(2).mean() + (slope.norm(2, dim=1) - 1).pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(smooth), loss=loss))


def test_a_gradient_taken_inside_a_block(lab):
    """As force fields do."""

    def inner(self, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.a(place)).pow(2).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return self.b(torch.tanh(force)) + x

    lab.check_same(lab.Case(lambda: lab.stack_of(inner)))


def test_an_exact_gradient_by_finite_differences(lab):
    case = lab.Case(lambda: lab.stack_of(smooth).double(), batch=torch.randn(64, 48).double())
    model, applied = case.fitted()
    one = torch.randn(1, 48, dtype=torch.float64, device=lab.DEVICE, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        assert gradcheck(lambda x: model(x).sum(), one)
    applied.remove()


def values(tensors):
    return [tensor.detach() for tensor in tensors]


def functional_gradient(model, batch):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (batch,)).pow(2).mean()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def gradients_of_each_row(model, batch):
    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).pow(2).mean()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_row = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch[:4])
    return list(per_row.values())


def mapped_over_rows(model, batch):
    out = torch.func.vmap(model)(batch.view(4, 16, -1))
    out.pow(2).mean().backward()
    return [out]


def jacobian(model, batch):
    return [torch.func.jacrev(lambda x: model(x).sum(0))(batch[:2])]


def old_jacobian(model, batch):
    return [torch.autograd.functional.jacobian(lambda x: model(x).sum(0), batch[:2])]


def jacobian_vector_product(model, batch):
    return list(torch.func.jvp(model, (batch,), (torch.ones_like(batch),)))


def forward_mode(model, batch):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch, torch.ones_like(batch))
        out = model(dual)
        primal, tangent = forward_ad.unpack_dual(out)
        loss = primal.pow(2).mean()
        loss.backward()
    return [loss, tangent]


def hessian(model, batch):
    return [torch.func.hessian(lambda x: model(x).pow(2).mean())(batch[:1, :])]


def batched_gradients(model, batch):
    batch = batch[:8].clone().requires_grad_()
    out = model(batch).sum(0)
    directions = torch.eye(48, device=batch.device)[:5]
    (found,) = torch.autograd.grad(out, batch, directions, is_grads_batched=True, retain_graph=True)
    out.sum().backward()
    return [found]


TRANSFORMS = [
    *(functional_gradient, gradients_of_each_row, mapped_over_rows, jacobian, old_jacobian),
    *(jacobian_vector_product, forward_mode, hessian, batched_gradients),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("step", TRANSFORMS, ids=lambda step: step.__name__)
def test_transforms_of_a_fitted_model(lab, step):
    def run(model, batch):
        loss = loss_of(model, batch)
        loss.backward()
        return [loss, *values(step(model, batch))]

    lab.check_same(lab.Case(lambda: lab.stack_of(smooth), step=run))


def saved_on_the_host(model, batch):
    with torch.autograd.graph.save_on_cpu():
        return loss_of(model, batch)


def checkpointed_around(model, batch):
    hidden = checkpoint(model.blocks[0], model.first(batch), use_reentrant=False)
    return checkpoint(model.blocks[1], hidden, use_reentrant=True).pow(2).mean()


# Whole modules are forced on the blocks here; no plan of ours would do that.
@pytest.mark.filterwarnings("ignore:leanstep leaves")
@pytest.mark.parametrize("loss", [saved_on_the_host, checkpointed_around])
def test_hooks_of_the_user_that_are_planned_for(lab, loss):
    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss))


@pytest.mark.filterwarnings("ignore:leanstep leaves")
@pytest.mark.parametrize("loss", [saved_on_the_host, checkpointed_around])
def test_hooks_of_the_user_that_come_later(lab, loss):
    def step(model, batch):
        value = loss(model, batch)
        value.backward()
        return [value]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), step=step))


def test_hooks_of_the_user_see_what_they_would_see(lab):
    model, applied = lab.Case(lambda: lab.stack_of(body)).fitted()
    seen = []
    with pytest.warns(UserWarning, match="inside saved-tensor hooks of yours"):
        for _ in range(2):
            seen.append([])
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: seen[-1].append(tensor.shape) or tensor, lambda tensor: tensor
            )
            with hooks:
                model(lab.rows().to(lab.DEVICE))
            applied.remove()

    assert seen[0] == seen[1]


def test_a_checkpoint_inside_a_block(lab):
    def inside(self, x):
        h = checkpoint(lambda h: functional.gelu(self.a(h)), x, use_reentrant=False)
        return x + self.b(torch.tanh(h))

    lab.check_same(lab.Case(lambda: lab.stack_of(inside)))


def test_saved_tensors_hooks_inside_a_block(lab):
    def inside(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            h = functional.gelu(self.a(x))
        return x + self.b(torch.tanh(h))

    lab.check_same(lab.Case(lambda: lab.stack_of(inside)))


def test_an_optimizer_with_a_closure(lab):
    def whole_step(model, optimizer, batch, index):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        return [optimizer.step(closure)]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), whole_step=whole_step))


def test_rows_that_change_in_number(lab):
    """The last batch of an epoch is smaller; a later one is as planned again."""

    def whole_step(model, optimizer, batch, index):
        loss = loss_of(model, batch[: (64, 7, 64, 1, 64, 7, 64)[index]])
        loss.backward()
        optimizer.step()
        return [loss]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), whole_step=whole_step), steps=7)


def test_clipped_gradients_with_momentum(lab):
    def whole_step(model, optimizer, batch, index):
        losses = accumulated(model, batch)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return [*losses, norm]

    def make():
        return lab.stack_of(body)

    lab.check_same(lab.Case(make, whole_step=whole_step, optimizer=torch.optim.AdamW))
