"""What a step computes, and whether two runs of it have computed the same.

Where the untouched step does not repeat itself, neither can the planned one. How far its numbers
move is its *spread*. A gradient is made of those that were ready before it: once one of these has
moved, it may move too, also if it did not in the runs that were seen.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from leanstep.step.training import TrainingStep

# How far a number has moved between runs, relative to its size; what has not is not in it.
Spread = Mapping[str, float]

# Few runs of the untouched model sample its spread; another may lie somewhat further out.
_SPREADS = 4.0

# What never moved by itself may move so far because of others: a unit in the last place of
# bfloat16. Some gradients are zero but for rounding (of a key's bias in attention), and move by
# their whole size; that excuses nobody else.
_MOST_BY_OTHERS = 2.0**-7

_LOSS, _GRADIENT = "the loss", "gradient of "


@dataclass(frozen=True)
class Outcome:
    """Everything a step computes, in host memory; gradients in the order they were ready."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_states: tuple[torch.Tensor, ...]

    def named(self) -> dict[str, torch.Tensor | None]:
        """Everything by a name for people."""
        return {
            _LOSS: self.loss,
            **{f"{_GRADIENT}{name}": g for name, g in self.gradients.items()},
            **{f"buffer {name}": b for name, b in self.buffers.items()},
            **{f"random state {place}": s for place, s in enumerate(self.random_states)},
        }


def run_for_outcome(step: TrainingStep) -> Outcome:
    """Run forward and backward; leaves traces."""
    names = {id(p): name for name, p in step.model.named_parameters()}
    parameters = {
        names.get(id(p), f"optimizer parameter {place}"): p
        for place, p in enumerate(step.parameters())
    }
    loss = step.compute_loss()
    with ExitStack() as stack:
        order = _seen_ready(parameters, stack)
        loss.backward()
    states = [torch.get_rng_state()]
    if step.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(step.device))
    return Outcome(
        loss=_host(loss),
        gradients={
            name: _host_or_none(parameters[name].grad)
            for name in dict.fromkeys((*order, *parameters))
        },
        buffers={name: _host(buffer) for name, buffer in step.model.named_buffers()},
        random_states=tuple(states),
    )


def _seen_ready(parameters: Mapping[str, torch.Tensor], stack: ExitStack) -> Iterable[str]:
    """The names of parameters, growing as their gradients get ready."""
    order: dict[str, None] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.is_leaf:
            handle = parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: order.setdefault(name)
            )
            stack.callback(handle.remove)
    return order


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _host_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _host(tensor)


def widened(known: Spread, old: Outcome, again: Outcome, *, sums_in_order: bool) -> Spread:
    """The spread, with what one more run of the same step shows.

    What moves where sums have an order is drawn anew, and may be anything.
    """
    found, spread = again.named(), dict(known)
    for name, tensor in old.named().items():
        other = found.get(name)
        if same(tensor, other):
            continue
        moved = math.inf
        if not sums_in_order and _has_distance(tensor) and tensor is not None and other is not None:
            moved = _relative_distance(tensor, other)
        spread[name] = max(spread.get(name, 0.0), moved)
    return spread


def differences(
    old: Outcome, new: Outcome, spread: Spread
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is not bit-equal: beyond the spread of the old one, and within it."""
    beyond: list[str] = []
    within: list[str] = []
    found, upstream = new.named(), 0.0
    for name, tensor in old.named().items():
        most = _SPREADS * spread.get(name, 0.0)
        if name == _LOSS or name.startswith(_GRADIENT):
            # Not by what is drawn anew: whatever that reaches, it moves every time.
            upstream = max(upstream, most if math.isfinite(most) else 0.0)
            most = most or min(upstream, _MOST_BY_OTHERS)
        if not same(tensor, found.get(name)):
            is_near = most > 0.0 and _is_near(tensor, found.get(name), most)
            (within if is_near else beyond).append(name)
    return tuple(beyond), tuple(within)


def _is_near(old: torch.Tensor | None, new: torch.Tensor | None, most: float) -> bool:
    if old is None or new is None:
        return False
    # A count or a random state has no distance: it is enough that it moves by itself.
    return most == math.inf or _relative_distance(old, new) <= most


def _has_distance(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


def _relative_distance(old: torch.Tensor, new: torch.Tensor) -> float:
    if old.shape != new.shape:
        return math.inf
    size = float(old.double().norm())
    return float((new.double() - old.double()).norm()) / (size or 1.0)


def distances(before: Outcome, new: Outcome) -> dict[str, tuple[float, float]]:
    """How far the loss and each gradient are off, relative to their size, and the tolerance."""
    found = new.named()
    return {
        name: _distance(tensor, found.get(name))
        for name, tensor in before.named().items()
        if tensor is not None and _has_distance(tensor)
    }


def _distance(old: torch.Tensor, new: torch.Tensor | None) -> tuple[float, float]:
    most = float(torch.finfo(old.dtype).eps) ** 0.5
    if same(old, new):
        return 0.0, most
    if new is None or not float(old.double().norm()):
        return math.inf, most
    return _relative_distance(old, new), most


def same(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits, NaN included; a missing one must stay missing."""
    if old is None or new is None:
        return old is None and new is None
    if (old.shape, old.dtype, old.layout) != (new.shape, new.dtype, new.layout):
        return False
    if old.layout is torch.sparse_coo:
        old, new = old.coalesce(), new.coalesce()
        return same(old.indices(), new.indices()) and same(old.values(), new.values())
    flat_old, flat_new = old.contiguous().view(-1), new.contiguous().view(-1)
    return torch.equal(flat_old.view(torch.uint8), flat_new.view(torch.uint8))
