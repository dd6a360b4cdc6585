"""Replays as programs of torch's interpreter, on the device: draws too are inside of them."""

import pytest
import torch
import torch.nn.functional as F
import twins
from torch import nn

from leanstep.engines import straight

pytestmark = [
    pytest.mark.gpu,
    # What has no deterministic form says so.
    pytest.mark.filterwarnings("ignore"),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(64), nn.Linear(64, 192)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self._parts(x))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + F.dropout(mixed.transpose(1, 2).flatten(2), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.2)

    def _parts(self, x):
        return self.qkv(self.norm(x)).chunk(3, dim=-1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("pick", [twins.everything, twins.some(0), twins.some(1)])
def test_bits_and_peak_are_those_of_ops_one_by_one(pick, dtype, monkeypatch) -> None:
    written = []
    write = straight._written

    def noted(stretch):
        written.append({str(one.op.func) for one in stretch})
        return write(stretch)

    monkeypatch.setattr(straight, "_written", noted)

    def loss(model, batch):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return model(batch).float().square().mean()

    batch = torch.randn(8, 32, 64)
    case = twins.Case(lambda: nn.Sequential(Layer(), Layer()), loss, batch, device="cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert case.differences(pick=pick, steps=9) == []
    finally:
        torch.use_deterministic_algorithms(False)
    if pick is twins.everything:
        assert any("aten.native_dropout.default" in names for names in written)


def test_a_program_that_does_not_fit_raises_what_leaves_it_to_python() -> None:
    from leanstep.torch_private.interpreter import GraphWriter

    writer = GraphWriter()
    given = writer.input()
    wide = writer.call(torch.ops.aten.repeat.default, [given, [1 << 22, 1 << 20]], {})
    program = writer.finish(wide)

    # torch's interpreter makes another error of it; op by op, eager's own is raised again.
    with pytest.raises(RuntimeError, match="Tried to allocate"):
        program(torch.ones(4, 4, device="cuda"))
