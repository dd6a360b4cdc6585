"""Small blocks to compile: those that torch's wrappers have nothing to do for, and others."""

import torch
from torch import nn

from leanstep.engines.inductor import CompiledForm
from leanstep.forms import cuts
from leanstep.forms.capture import capture
from leanstep.forms.kinds import Example

WIDTH = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class Dropped(Net):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.4)


class TwoOutputs(Net):
    def forward(self, x):
        return super().forward(x), x.exp()


class WithNumber(Net):
    def forward(self, x):
        out = super().forward(x)
        return out, out.argmax(-1), out.detach() * 2


class SavesView(Net):
    def forward(self, x):
        rows = x.view(-1, 2, WIDTH // 2).transpose(1, 2)
        return super().forward(x) * (rows * rows).flatten(1)


class Turned(Net):
    def forward(self, x):
        return super().forward(x).t().contiguous().t() * 2


class ReturnsView(Net):
    def forward(self, x):
        return super().forward(x), x.view(-1)


class ReturnsInput(Net):
    def forward(self, x):
        return super().forward(x), x


class WritesInput(Net):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class LeavesOut(Net):
    def forward(self, x):
        return super().forward(x) + self.up.bias.detach().sum()


class Unread(Net):
    """A weight that needs a gradient and has no part in the output's."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.scale.detach()


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.net.up.requires_grad_(False)

    def forward(self, x):
        return self.net(x)


PLAIN = [Net, Normed, Dropped, TwoOutputs, WithNumber, SavesView, Turned, LeavesOut, Tuned]
PLAIN += [ReturnsInput]
TORCHS = [ReturnsView, WritesInput, Unread]


def rows():
    torch.manual_seed(2)
    return torch.randn(8, WIDTH).requires_grad_()


def example_of(kind, autocast=()):
    torch.manual_seed(1)
    return Example(kind(), (), (rows() * 1,), {}, autocast)


def form_of(example):
    """The form that keeps least: nearly all is computed again."""
    joint = capture(example, {})
    least = cuts.candidates(joint, {}, cuts.unplanned(joint), 1)[-1]
    return CompiledForm(example.subject[1], least.kept, {})
