"""Modules that write to themselves: once a step, as in the untouched model."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from leanstep.rebuild.block import BlockGraph

IMAGES = (4, 6, 8, 8)
REPLAY = ["replay, all dropped", "replay, some dropped", "plan at the floor"]
NORMS = {
    "plain": lambda: nn.BatchNorm2d(6),
    "cumulative": lambda: nn.BatchNorm2d(6, momentum=None),
    "without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "without weights": lambda: nn.BatchNorm2d(6, affine=False),
    "fast": lambda: nn.BatchNorm2d(6, momentum=1.0),
    "evaluating": lambda: nn.BatchNorm2d(6).eval(),
    "instance": lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    "instance without statistics": lambda: nn.InstanceNorm2d(6),
    "group": lambda: nn.GroupNorm(3, 6),
    "synchronized": lambda: nn.SyncBatchNorm(6),
}


class Convolution(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(6, 6, 3, padding=1), norm()

    def forward(self, x):
        return x + functional.relu(self.norm(self.convolution(x)), inplace=True)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_move_their_statistics_once(lab, norm):
    def make():
        return nn.Sequential(*(Convolution(NORMS[norm]) for _ in range(3)))

    lab.check_same(lab.Case(make, batch=torch.randn(IMAGES)))


def test_synchronized_norm_in_a_group_of_one(lab):
    if lab.DEVICE == "cpu":
        pytest.skip("in a process group SyncBatchNorm takes tensors of a GPU only")
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        test_norms_move_their_statistics_once(lab, "synchronized")
    finally:
        distributed.destroy_process_group()


DIMENSIONS = {
    "1d of rows": (nn.BatchNorm1d, nn.Linear(6, 6), (16, 6)),
    "1d": (nn.BatchNorm1d, nn.Conv1d(6, 6, 3, padding=1), (4, 6, 8)),
    "3d": (nn.BatchNorm3d, nn.Conv3d(6, 6, 3, padding=1), (4, 6, 4, 4, 4)),
}


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_batch_norm_of_other_dimensions(lab, dimension):
    norm, layer, shape = DIMENSIONS[dimension]

    def make():
        layers = [[norm(6), type(layer)(*arguments(layer)), nn.GELU()] for _ in range(3)]
        return nn.Sequential(*(nn.Sequential(*three) for three in layers))

    lab.check_same(lab.Case(make, batch=torch.randn(shape)))


def arguments(layer):
    return (6, 6) if isinstance(layer, nn.Linear) else (6, 6, 3, 1, 1)


def test_one_norm_that_several_blocks_share(lab):
    def make():
        norm = nn.BatchNorm1d(lab.WIDTH)

        def body(self, x):
            return self.b(torch.relu(self.shared(self.a(x))))

        def change(block):
            block.shared = norm

        return lab.stack_of(body, change=change)

    lab.check_same(lab.Case(make))


def test_a_norm_whose_mode_changes_from_step_to_step(lab):
    def step(model, batch):
        loss = model(batch).pow(2).mean()
        loss.backward()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.train(not norm.training)
        return [loss]

    def make():
        return nn.Sequential(*(Convolution(NORMS["plain"]) for _ in range(2)))

    lab.check_same(lab.Case(make, batch=torch.randn(IMAGES), step=step))


def test_statistics_by_an_op_that_does_not_say_that_it_writes(lab):
    def body(self, x):
        h = self.a(x)
        mean, variance = torch.batch_norm_update_stats(
            h.detach().t().contiguous().t(), self.mean, self.variance, 0.1
        )
        return self.b(torch.relu((h - mean) * variance.rsqrt()))

    def change(block):
        block.register_buffer("mean", torch.zeros(lab.WIDTH))
        block.register_buffer("variance", torch.ones(lab.WIDTH))

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


def averaged(self, x):
    h = self.a(x)
    with torch.no_grad():
        self.state.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return self.b(torch.tanh(h - self.state))


def averaged_after_use(self, x):
    h = torch.tanh(self.a(x) - self.state)
    with torch.no_grad():
        self.state.lerp_(h.mean(0), 0.1)
    return self.b(h)


def by_data(self, x):
    h = torch.tanh(self.a(x) * self.state.exp())
    self.state.data.mul_(0.9).add_(h.data.mean(0))
    return self.b(h)


def by_data_then_read(self, x):
    h = self.a(x)
    self.state.data += h.detach().mean(0)
    return self.b(torch.tanh(h * self.state.clone()).exp())


def copied_into(self, x):
    h = torch.tanh(self.a(x) - self.state.clone())
    with torch.no_grad():
        self.state.copy_(h.mean(0))
    return self.b(h)


def replaced(self, x):
    h = torch.tanh(self.a(x) - self.state)
    self.state = 0.9 * self.state + 0.1 * h.detach().mean(0)
    return self.b(h).exp()


def replaced_before_use(self, x):
    h = self.a(x)
    self.state = 0.9 * self.state + 0.1 * h.detach().mean(0)
    return self.b(torch.tanh(h - self.state))


def exchanged(self, x):
    h = torch.tanh(self.a(x) * self.state.exp())
    self.state, self.other = self.other, self.state
    self.state.data.add_(0.1)
    return self.b(h * self.other.exp())


def counted(self, x):
    self.steps += 1
    return self.b(torch.tanh(self.a(x) / self.steps))


def counted_on_the_host(self, x):
    self.steps.add_(1)
    return self.b(torch.tanh(self.a(x) * (0.5 if self.steps.item() % 2 else 1.5)))


def observed(self, x):
    h = self.a(x)
    with torch.no_grad():
        low, high = torch.aminmax(h)
        torch.minimum(self.low, low, out=self.low)
        self.high.copy_(torch.maximum(self.high, high))
    scale = (self.high - self.low) / 255
    quantized = (h / scale).round() * scale
    return self.b(torch.tanh(h + (quantized - h).detach()))


def written_in_part(self, x):
    h = self.a(x)
    with torch.no_grad():
        self.state[self.place : self.place + 4] = h[0, :4]
    self.place = (self.place + 4) % len(self.state)
    return self.b(torch.tanh(h + self.state))


SELF_WRITING = [
    *(averaged, averaged_after_use, by_data, by_data_then_read, copied_into, replaced),
    *(replaced_before_use, exchanged, counted, counted_on_the_host, observed, written_in_part),
]


def with_state(lab):
    def change(block):
        block.register_buffer("state", torch.zeros(lab.WIDTH))
        block.register_buffer("other", torch.ones(lab.WIDTH), persistent=False)
        block.register_buffer("steps", torch.zeros(()))
        block.register_buffer("low", torch.zeros(()))
        block.register_buffer("high", torch.ones(()))
        block.place = 0

    return change


@pytest.mark.parametrize("body", SELF_WRITING, ids=lambda body: body.__name__)
def test_buffers_move_once(lab, body):
    lab.check_same(lab.Case(lambda: lab.stack_of(body, 3, change=with_state(lab))), steps=7)


@pytest.mark.parametrize("body", [averaged, by_data, replaced, counted_on_the_host])
def test_buffers_of_a_block_that_runs_three_times_a_step(lab, body):
    def loss(model, batch):
        for _ in range(3):
            batch = model.blocks[0](batch)
        return model.blocks[1](batch).pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=with_state(lab)), loss=loss))


class Codebook(nn.Module):
    """Quantize to the nearest code; codes follow by moving averages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("codes", torch.randn(12, width))
        self.register_buffer("counts", torch.ones(12))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        h = self.project(x)
        nearest = torch.cdist(h.detach(), self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 12).to(h.dtype)
        quantized = functional.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ h, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
        out = h + (quantized - h).detach()
        return torch.tanh(out) + 0.1 * (h - quantized).pow(2).mean()


def test_codebooks_that_follow_the_data(lab):
    lab.check_same(lab.Case(lambda: lab.Stack([Codebook(lab.WIDTH) for _ in range(2)])))


def test_fake_quantization(lab):
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def body(self, x):
        return self.b(torch.relu(self.quantize(self.a(x))))

    def change(block):
        block.quantize = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


def test_fused_fake_quantization(lab):
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

    def body(self, x):
        return self.b(torch.relu(self.quantize(self.a(x))))

    def change(block):
        block.quantize = FusedMovingAvgObsFakeQuantize()

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


class Conversation(nn.Module):
    """What one block writes another one reads."""

    def __init__(self, blocks) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("shared", torch.zeros(blocks[0].norm.normalized_shape))
        for block in blocks:
            # Not as a module: the state belongs to the model.
            block.owner = [self]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.shared


def test_a_buffer_that_one_block_writes_and_another_reads(lab):
    def body(self, x):
        (owner,) = self.owner
        h = torch.tanh(self.a(x) + owner.shared.clone())
        with torch.no_grad():
            owner.shared.add_(h.mean(0))
        return self.b(h)

    lab.check_same(lab.Case(lambda: Conversation([lab.Block(body) for _ in range(3)])))


def test_a_buffer_that_one_block_replaces_and_another_reads(lab):
    def body(self, x):
        (owner,) = self.owner
        h = torch.tanh(self.a(x) * owner.shared.exp())
        owner.shared = 0.5 * h.detach().mean(0)
        return self.b(h)

    case = lab.Case(lambda: Conversation([lab.Block(body) for _ in range(3)]))
    lab.check_same(case)


def test_a_buffer_that_is_written_between_blocks_past_autograd(lab):
    def body(self, x):
        return self.b(torch.tanh(self.a(x) * self.state.exp()).sigmoid())

    def loss(model, batch):
        for block in model.blocks:
            batch = block(batch)
        for block in model.blocks:
            block.state.data.add_(0.1)
        return batch.pow(2).mean()

    # Whoever asks for whole modules by hand is out of luck: nothing tells that this was written.
    case = lab.Case(lambda: lab.stack_of(body, change=with_state(lab)), loss=loss)
    lab.check_same(case, ways=REPLAY)


def test_whole_modules_are_not_planned_where_they_would_start_from_something_else(lab):
    def body(self, x):
        return self.b(torch.tanh(self.a(x) * self.state.exp()).sigmoid())

    def loss(model, batch):
        out = model(batch)
        model.blocks[0].state.data.add_(0.1)
        return out.pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(body, change=with_state(lab)), loss=loss)
    known = case.profile()

    found = [BlockGraph(known.graph, block).reads_what_changes for block in known.blocks]

    assert found == [True, False]


def test_a_buffer_written_between_blocks_as_autograd_sees_it(lab):
    def body(self, x):
        return self.b(torch.tanh(self.a(x) * self.state.exp()).sigmoid())

    def loss(model, batch):
        out = model(batch)
        with torch.no_grad():
            model.blocks[0].state.add_(0.1)
        return out.pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(body, change=with_state(lab)), loss=loss)
    lab.check_same(case, ways=REPLAY)
    with pytest.raises(RuntimeError, match="changed in place after its forward"):
        lab.check_same(case, ways=["module"])


def test_a_state_that_goes_from_step_to_step(lab):
    """The memory of a recurrent model, cut at the borders of steps."""

    def body(self, x):
        memory = self.memory if self.memory is not None else torch.zeros_like(x)
        h = torch.tanh(self.a(x) + self.b(memory))
        self.memory = h.detach()
        return self.norm(h)

    def change(block):
        block.memory = None

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


def test_a_tensor_made_in_inference_mode(lab):
    def body(self, x):
        return self.b(torch.tanh(self.a(x) + self.mask).sigmoid())

    def change(block):
        with torch.inference_mode():
            block.mask = torch.linspace(0, 1, lab.WIDTH, device=lab.DEVICE)

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))
