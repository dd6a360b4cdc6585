"""What the zoo of architectures has found, each in the least model that shows it."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import leanstep  # noqa: E402
from leanstep.engines.attach import runner_of  # noqa: E402

WIDTH = 64
WIDE = 8 * WIDTH
ROWS = 256


class Picks(nn.Module):
    """A wide layer, and a way to pick a few of what it makes."""

    def __init__(self, pick) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDE)
        self.pick = pick

    def forward(self, x):
        return x + self.pick(self.layer(x)).mean()


def fitted(model, batch, budget="100%"):
    def loss(model, batch):
        return model(batch).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)


INDEX = torch.arange(8)
PICKS = {
    "gather": lambda x: x.gather(1, INDEX.expand(ROWS, -1)),
    "index": lambda x: x[:, INDEX],
    "index_select": lambda x: x.index_select(1, INDEX),
    "masked_select": lambda x: x.masked_select(x > 1),
    "max": lambda x: x.max(dim=1).values,
    "topk": lambda x: x.topk(4, dim=1).values,
}


@pytest.mark.parametrize("name", PICKS)
def test_backward_of_indexing_writes_into_its_zeros(name):
    """Recorded, it does not: the prediction counted a copy that is never made (DeBERTa)."""
    model = nn.Sequential(*(Picks(PICKS[name]) for _ in range(2)))

    verdict = fitted(model, torch.randn(ROWS, WIDTH)).verdict

    assert verdict.exact
    assert verdict.predicted_peak_bytes == pytest.approx(verdict.measured_peak_bytes, rel=0.01)


class Routed(nn.Module):
    """A layer that sees a third of the rows, and at every sixth call all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDE), 0

    def forward(self, x):
        self.calls += 1
        chosen = torch.arange(len(x)) % 3 <= (2 if self.calls % 6 == 3 else 0)
        return x + self.layer(x[chosen]).tanh().sin().mean()


def test_the_peak_of_sizes_that_change_is_the_largest_of_several_steps():
    """One step was measured, and the next could be larger (Switch Transformers)."""
    model = nn.Sequential(Routed(), Routed())

    verdict = fitted(model, torch.randn(ROWS, WIDTH)).verdict

    assert verdict.exact
    assert verdict.within_budget


def test_a_decoder_that_passes_a_cache_along_runs_by_its_recordings():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 200, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    fitted = leanstep.fit(model, batch, budget="80%", verify=False)
    for _ in range(8):
        model(**batch).loss.backward()
    replays = [runner_of(m).replays[0] for m in model.modules() if runner_of(m)]
    assert replays
    assert all(replay.reused >= 3 for replay in replays)
    fitted.remove()
