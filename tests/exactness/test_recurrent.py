"""Loops over a cell, and recurrent layers inside blocks."""

import pytest
import torch
from torch import nn

TIMES = 4
BATCH = 4


class Loop(nn.Module):
    """A model that walks over time with a cell."""

    def __init__(self, cell, width):
        super().__init__()
        self.cell, self.width = cell, width
        self.head = nn.Linear(width, width)

    def forward(self, x):
        state = x.new_zeros(x.shape[1], self.width)
        if isinstance(self.cell, nn.LSTMCell):
            state = (state, state)
        outputs = []
        for now in x:
            state = self.cell(now, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs))


class OwnCell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.seen, self.kept = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)

    def forward(self, now, state):
        gate, new = (self.seen(now) + self.kept(state)).chunk(2, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(new)


def sequence(lab):
    return lab.rows()[: TIMES * BATCH].view(TIMES, BATCH, lab.WIDTH)


CELLS = {
    "LSTM": lambda width: nn.LSTMCell(width, width),
    "GRU": lambda width: nn.GRUCell(width, width),
    "RNN": lambda width: nn.RNNCell(width, width),
    "own": OwnCell,
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_loop_over_a_cell(lab, cell):
    make = lambda: Loop(CELLS[cell](lab.WIDTH), lab.WIDTH)  # noqa: E731
    lab.check_same(lab.Case(make, batch=sequence(lab)))


class Layer(nn.Module):
    def __init__(self, inner, width):
        super().__init__()
        self.inner = inner
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(inner.hidden_size, width)

    def forward(self, x):
        out, _ = self.inner(self.norm(x))
        return x + self.out(torch.relu(out[..., : self.out.in_features]))


class Layers(nn.Module):
    def __init__(self, make, width):
        super().__init__()
        self.layers = nn.ModuleList(Layer(make(width), width) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


RECURRENT = {
    "LSTM": lambda width: nn.LSTM(width, 32),
    "GRU": lambda width: nn.GRU(width, 32),
    "LSTM with dropout": lambda width: nn.LSTM(width, 32, num_layers=2, dropout=0.2),
    "LSTM both ways": lambda width: nn.LSTM(width, 32, bidirectional=True),
    "RNN": lambda width: nn.RNN(width, 32),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_inside_blocks(lab, kind):
    make = lambda: Layers(RECURRENT[kind], lab.WIDTH)  # noqa: E731
    lab.check_same(lab.Case(make, batch=sequence(lab)))


def test_packed_sequences_inside_blocks(lab):
    class Packed(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner, self.out = nn.GRU(width, width), nn.Linear(width, width)

        def forward(self, x):
            lengths = torch.tensor([4, 3, 3, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0])
            return x + self.out(torch.tanh(out))

    make = lambda: lab.Stack([Packed(lab.WIDTH), Packed(lab.WIDTH)])  # noqa: E731
    lab.check_same(lab.Case(make, batch=sequence(lab)))


def test_state_carried_from_batch_to_batch(lab):
    class Carrying(nn.Module):
        """Truncated backpropagation: the state is detached between steps."""

        def __init__(self, width):
            super().__init__()
            self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, width)
            self.state = None

        def forward(self, x):
            state = x.new_zeros(x.shape[1:]) if self.state is None else self.state.detach()
            for now in x:
                state = self.cell(now, state)
            self.state = state
            return self.head(torch.relu(state))

    class Top(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.block = Carrying(width)

        def forward(self, x):
            return self.block(x)

    # A model that keeps a tensor from step to step cannot be measured, so no plan at the floor.
    ways = ["replay, all dropped", "replay, some dropped", "module"]
    lab.check_same(lab.Case(lambda: Top(lab.WIDTH), batch=sequence(lab)), ways=ways, steps=7)
