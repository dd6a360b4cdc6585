"""Stand-ins for tensors: the same shapes, types and sharing, without memory.

Two tensors on one storage get stand-ins on one storage, and a tensor has one stand-in however
often it is met: tied weights stay tied. Wherever a tensor lies (host, GPU, `meta`), its stand-in
is a fake tensor of the CPU, the only device on which fakes work in every build of torch.
"""

from collections import defaultdict
from typing import Any

import torch

from leanstep.torch_private.fake import is_fake, replace_tensors
from leanstep.torch_private.modes import past_every_mode
from leanstep.torch_private.tensors import local_tensor, on_storage_of, storage_address, tree_map


class StandIns:
    """Make stand-ins and remember them; use it inside a mode of fake tensors."""

    def __init__(self) -> None:
        # The real tensor is kept beside its stand-in: an address is an identity while it lives.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor; a fake one stands for itself, and so does one made of fakes."""
        if is_fake(real) or is_fake(local_tensor(real)):
            return real
        if id(real) not in self._known:
            self._known[id(real)] = (real, self._make(real))
        return self._known[id(real)][1]

    def tree(self, values: Any) -> Any:
        """The same nest of lists, tuples and dicts with stand-ins for its tensors."""
        return tree_map(self._leaf, values)

    def model(self, model: torch.nn.Module) -> None:
        """Put stand-ins into a model; its owner puts the tensors back."""
        for module in model.modules():
            replace_tensors(module, self.tensor)

    def optimizer(self, real: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer over the stand-ins of a model's parameters, with state like the real one."""
        # Not by copy.copy: it would go through the optimizer's own way of being pickled.
        mine = object.__new__(type(real))
        others = {name: value for name, value in vars(real).items() if name != "state"}
        vars(mine).update({name: self._copied(value) for name, value in others.items()})
        mine.state = defaultdict(dict)
        for parameter, entry in real.state.items():
            mine.state[self._leaf(parameter)] = self.tree(dict(entry))
        return mine

    def _copied(self, value: Any) -> Any:
        return self.tree(value) if type(value) in (list, dict, tuple) else value

    def _leaf(self, value: Any) -> Any:
        return self.tensor(value) if isinstance(value, torch.Tensor) else value

    def _make(self, real: torch.Tensor) -> torch.Tensor:
        is_trained = real.requires_grad and real.is_leaf
        with torch.no_grad():
            made = self._plain(real)
        if isinstance(real, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=real.requires_grad)
        return made.requires_grad_(is_trained)

    def _plain(self, real: torch.Tensor) -> torch.Tensor:
        if real.layout is not torch.strided or real.is_quantized:
            return torch.empty(real.shape, dtype=real.dtype)
        with past_every_mode():
            address, nbytes = storage_address(real), real.untyped_storage().nbytes()
            place = (real.storage_offset(), real.size(), real.stride())
        if address not in self._storages:
            self._storages[address] = torch.empty(nbytes, dtype=torch.uint8)
        return on_storage_of(self._storages[address], real.dtype, place)
