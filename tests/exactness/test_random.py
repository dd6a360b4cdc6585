"""Random numbers: the same ones, drawn once."""

import pytest
import torch
from torch import nn
from torch.nn import functional

FORMS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout in place": lambda x: functional.dropout(x * 1.0, 0.3, inplace=True),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "feature alpha dropout": lambda x: functional.feature_alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x: functional.dropout1d(x.unsqueeze(0), 0.3)[0],
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rand": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "gumbel softmax": lambda x: functional.gumbel_softmax(x),
}


@pytest.mark.parametrize("form", FORMS)
def test_dropout_in_every_form(lab, form):
    def body(self, x):
        return x + self.b(FORMS[form](torch.relu(self.a(x))))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


def test_draws_of_the_user_between_blocks(lab):
    class Noisy(lab.Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x) + 0.1 * torch.randn_like(x)
            return x

    def body(self, x):
        return self.b(nn.functional.dropout(torch.relu(self.a(x))))

    lab.check_same(lab.Case(lambda: Noisy([lab.Block(body) for _ in range(3)])))
