"""Find the blocks of a model: the units that a plan decides about.

A block is an outermost module that is repeated (its class occurs at least twice and it is more
than one of torch's own layers) or large (a good share of what autograd saves). Containers are
looked through: the four stages of a ResNet are not blocks, their residual blocks are. So are large
modules that do little but call a list of like ones, as the encoder and the decoder of a T5. Where
the layers of a Sequential are torch's own, a stretch from one weight to the next forms a block. A
module that the user has marked is a block where it neither contains one nor lies in one. A model
with none of these is one block.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice

from torch import nn

from leanstep.ir import Block, Graph, ModuleCall
from leanstep.ir.blocks import saves_in

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# A module that saves at least this share of the step's activations is a block of its own.
LARGE_SHARE = 0.25

# A module is a stack if its layers save at least this share of what it saves. A layer that mixes
# experts stays one block: its attention and its router save more than the rest.
STACK_SHARE = 0.8


def find_blocks(model: nn.Module, graph: Graph, marked: Collection[str] = ()) -> tuple[Block, ...]:
    """Every call of every block, in the order of the step; `marked` are paths of modules."""
    modules = dict(model.named_modules())
    called = {call.path for call in graph.calls}
    shares = _saved_shares(graph)
    repeated = Counter(type(m) for path, m in modules.items() if path in called and _is_unit(m))
    stacks = {type(m) for path, m in modules.items() if _is_stack(path, m, shares)}
    paths: list[str] = []
    stretches: list[tuple[str, tuple[str, ...]]] = []
    for path, module in modules.items():
        if path not in called or _is_inside(path, paths, stretches):
            continue
        is_repeated = _is_unit(module) and repeated[type(module)] >= 2
        if type(module) in stacks and path not in marked:
            continue
        is_wanted = path in marked and _is_alone(path, module, modules, repeated)
        if path and (
            is_repeated or is_wanted or _is_large(path, module, modules, shares, repeated)
        ):
            paths.append(path)
        elif _is_container(module) and isinstance(module, nn.Sequential):
            stretches.extend((path, children) for children in _stretches(module))
    if not paths and not stretches:
        paths.append("")
    return tuple(sorted(_blocks(graph, paths, stretches), key=lambda block: block.start))


def guess_blocks(
    model: nn.Module, marked: Collection[str] = ()
) -> tuple[list[str], list[tuple[str, tuple[str, ...]]]]:
    """The blocks as far as the modules alone tell, before any step was seen.

    Paths of modules, and stretches of Sequentials; what a recorded step makes a block lies in one
    of them. They are what is recomputed in the first step of a lazily fitted model.
    """
    modules = dict(model.named_modules())
    repeated = Counter(type(m) for m in modules.values() if _is_unit(m))
    paths: list[str] = []
    stretches: list[tuple[str, tuple[str, ...]]] = []
    for path, module in modules.items():
        if _is_inside(path, paths, stretches):
            continue
        is_wanted = _is_unit(module) or path in marked
        is_repeated = _is_unit(module) and repeated[type(module)] >= 2
        has_layers = max(_layers_by_kind(path, module).values(), default=0) >= 2
        if (
            path
            and is_wanted
            and not has_layers
            and (is_repeated or _is_alone(path, module, modules, repeated))
        ):
            paths.append(path)
        elif _is_container(module) and isinstance(module, nn.Sequential):
            stretches.extend((path, children) for children in _stretches(module))
    return paths, stretches


def _is_unit(module: nn.Module) -> bool:
    """Whether a module is more than a container or one of torch's own layers."""
    if _is_container(module) or "forward" in vars(module):
        # A forward of its own, put on the instance, is out of reach of the engines.
        return False
    is_torchs_own = type(module).__module__.startswith("torch.nn.modules")
    return not is_torchs_own or _has_callable_children(module)


def _is_container(module: nn.Module) -> bool:
    """Whether a module only holds others; a Sequential with a forward of its own does more."""
    return any(
        isinstance(module, kind) and type(module).forward is kind.forward for kind in CONTAINERS
    )


def _has_callable_children(module: nn.Module) -> bool:
    return any(not _is_container(child) for child in module.children())


def _is_inside(path: str, paths: list[str], stretches: list[tuple[str, tuple[str, ...]]]) -> bool:
    owners = [*paths, *(f"{p}.{c}".removeprefix(".") for p, cs in stretches for c in cs)]
    return any(path == owner or path.startswith(f"{owner}.") for owner in owners)


def _is_large(
    path: str,
    module: nn.Module,
    modules: dict[str, nn.Module],
    shares: dict[str, float],
    repeated: Counter[type],
) -> bool:
    if not _is_unit(module) or shares.get(path, 0.0) < LARGE_SHARE:
        return False
    return _is_alone(path, module, modules, repeated)


def _is_alone(
    path: str, module: nn.Module, modules: dict[str, nn.Module], repeated: Counter[type]
) -> bool:
    """Whether a module can be run as one block, and has no repeated ones inside."""
    inner = (m for p, m in modules.items() if p.startswith(f"{path}."))
    has_blocks = any(_is_unit(m) and repeated[type(m)] >= 2 for m in inner)
    return not has_blocks and "forward" not in vars(module)


def _is_stack(path: str, module: nn.Module, shares: dict[str, float]) -> bool:
    """Whether nearly all of a large module is a list of like modules: those are the blocks then.

    Small ones are blocks, and so is a list of simple ones, such as the convolutions of a residual
    block: inside a block more can be dropped than at its border.
    """
    if not path or not _is_unit(module) or shares.get(path, 0.0) < LARGE_SHARE:
        return False
    layers = list(_layers(path, module))
    kinds = _layers_by_kind(path, module)
    inside = sum(shares.get(p, 0.0) for p, layer in layers if kinds[type(layer)] >= 2)
    return inside >= STACK_SHARE * shares[path]


def _layers(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is in a module's lists, if more than a few simple ops."""
    for name, child in module.named_children():
        for place, layer in child.named_children() if _is_container(child) else ():
            if _is_unit(layer) and any(map(_is_unit, islice(layer.modules(), 1, None))):
                yield f"{path}.{name}.{place}", layer


def _layers_by_kind(path: str, module: nn.Module) -> Counter[type]:
    return Counter(type(layer) for _, layer in _layers(path, module))


def _stretches(module: nn.Sequential) -> Iterator[tuple[str, ...]]:
    """Cut a Sequential of torch's own layers before each layer with a weight matrix."""
    children = list(module.named_children())
    if len(children) < 2 or any(_is_unit(c) or _is_container(c) for _, c in children):
        return
    if len(children) < len(module):
        # A child stands in two places: its name does not say which of its calls is meant.
        return
    stretch: list[str] = []
    for name, child in children:
        if stretch and any(p.dim() > 1 for p in child.parameters()):
            yield tuple(stretch)
            stretch = []
        stretch.append(name)
    yield tuple(stretch)


def _saved_shares(graph: Graph) -> dict[str, float]:
    """The share of the saved bytes that each module saves, those inside it included."""
    seen: set[int] = set()
    totals: Counter[str] = Counter()
    for save in graph.saves:
        storage = graph.storages[save.value.storage]
        if save.value.storage in seen or storage.birth < 0:
            continue
        seen.add(save.value.storage)
        for path in _ancestors(graph.calls, save.call):
            totals[path] += storage.nbytes
    whole = totals[""] or 1
    return {path: nbytes / whole for path, nbytes in totals.items()}


def _ancestors(calls: tuple[ModuleCall, ...], index: int) -> Iterator[str]:
    while index >= 0:
        yield calls[index].path
        index = calls[index].parent


def _blocks(
    graph: Graph, paths: list[str], stretches: list[tuple[str, tuple[str, ...]]]
) -> Iterator[Block]:
    wanted = set(paths)
    children_of: dict[str, list[tuple[str, ...]]] = {}
    for path, children in stretches:
        children_of.setdefault(path, []).append(children)
    for index, call in enumerate(graph.calls):
        if _inside_another(graph.calls, call, wanted):
            continue
        found = [_whole_block(graph, index)] if call.path in wanted else []
        found.extend(_stretch_blocks(graph, index, children_of.get(call.path, [])))
        # Without gradients, or inside backward, a call saves nothing: there is nothing to decide.
        yield from (block for block in found if block.occurrence >= 0)


def _whole_block(graph: Graph, index: int) -> Block:
    call = graph.calls[index]
    saves = saves_in(graph, {index})
    return Block(call.path, call.class_name, call.occurrence, call.start, call.stop, saves)


def _inside_another(calls: tuple[ModuleCall, ...], call: ModuleCall, wanted: set[str]) -> bool:
    return any(path in wanted for path in _ancestors(calls, call.parent))


def _stretch_blocks(graph: Graph, parent: int, stretches: list[tuple[str, ...]]) -> Iterator[Block]:
    """The stretches of one call of a Sequential, told apart by the order of its children.

    Not by their paths: a layer that stands in several Sequentials has the path of the first.
    """
    calls = [index for index, call in enumerate(graph.calls) if call.parent == parent]
    if len(calls) != sum(map(len, stretches)):
        return
    for children in stretches:
        own, calls = calls[: len(children)], calls[len(children) :]
        yield Block(
            path=graph.calls[parent].path,
            class_name="Sequential",
            occurrence=graph.calls[parent].occurrence,
            start=graph.calls[own[0]].start,
            stop=graph.calls[own[-1]].stop,
            saves=saves_in(graph, set(own)),
            children=children,
        )
