"""What blocks are called with and what they return: any structure, any object, changing."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional

STEPS = 8
Pair = namedtuple("Pair", "hidden gate")


class Output(OrderedDict):
    """An ordered dictionary whose keys are attributes too, as model libraries return them."""

    def __init__(self, **fields):
        super().__init__((name, value) for name, value in fields.items() if value is not None)
        self.__dict__.update(fields)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    parts: list
    note: str = "plain"
    nothing: None = None


def inner(self, x):
    return functional.gelu(self.norm(self.a(x)))


def model_of(lab, body, run, count=2):
    """A model whose forward walks over its blocks by `run(blocks, x)`."""

    class Model(lab.Stack):
        def forward(self, x):
            return run(self.blocks, self.first(x))

    return lambda: Model([lab.Block(body) for _ in range(count)])


def keywords(self, *, hidden, mask=None, scale=1.0, **rest):
    out = inner(self, hidden) * scale
    out = out if mask is None else out.masked_fill(mask, 0.0)
    return {"hidden": hidden + self.b(out), "rest": rest}


def run_keywords(blocks, x):
    mask = (torch.arange(x.shape[-1], device=x.device) % 5 == 0).expand_as(x)
    for block in blocks:
        x = block(hidden=x, mask=mask, scale=0.5, note="text", nothing=None)["hidden"]
    return x


def ordered(self, x):
    hidden = inner(self, x)
    return Output(hidden=x + self.b(hidden), extra=None, both=(hidden, hidden * 2))


def run_ordered(blocks, x):
    for block in blocks:
        out = block(x)
        x = out.hidden + out[1][1] * 0.1
    return x


def dataclass(self, result):
    hidden = inner(self, result.hidden)
    return Result(result.hidden + self.b(hidden), [hidden, [result.parts]], note=result.note + "!")


def run_dataclass(blocks, x):
    result = Result(x, [])
    for block in blocks:
        result = block(result)
    return result.hidden + result.parts[0]


def named(self, pair):
    hidden = inner(self, pair.hidden) * torch.sigmoid(pair.gate)
    return Pair(pair.hidden + self.b(hidden), gate=hidden)


def run_named(blocks, x):
    pair = Pair(x, x)
    for block in blocks:
        pair = block(pair)
    return pair.hidden * pair.gate


def nested(self, tree, *more):
    hidden = inner(self, tree["deep"][0]["x"])
    return {"deep": [{"x": tree["deep"][0]["x"] + self.b(hidden)}], "all": [tree, (hidden, None)]}


def run_nested(blocks, x):
    tree = {"deep": [{"x": x}]}
    for block in blocks:
        tree = block(tree, None, [x, [x, (x,)]], True)
    return tree["deep"][0]["x"] + tree["all"][1][0]


def callable_argument(self, x, activation, *, after=None):
    return x + after(self.b(activation(self.a(x))))


def run_callable(blocks, x):
    for number, block in enumerate(blocks):
        x = block(x, functional.gelu if number else torch.tanh, after=lambda out: out * 0.5)
    return x


def mutable_default(self, x, seen=[]):  # noqa: B006
    seen.append(x.shape[0])
    del seen[3:]
    return x + self.b(inner(self, x)) / len(seen)


def generator_argument(self, xs):
    return sum(self.b(inner(self, x)) for x in xs)


def run_generator(blocks, x):
    for block in blocks:
        x = x + block(part * 0.5 for part in (x, x.sin()))
    return x


def generator_result(self, x):
    hidden = inner(self, x)
    return (part for part in (x + self.b(hidden), hidden))


def run_generator_result(blocks, x):
    for block in blocks:
        x, hidden = block(x)
        x = x + hidden
    return x


def run_plain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


FORMS = {
    "keywords": (keywords, run_keywords),
    "ordered dictionary": (ordered, run_ordered),
    "dataclass": (dataclass, run_dataclass),
    "named tuple": (named, run_named),
    "nested": (nested, run_nested),
    "callable": (callable_argument, run_callable),
    "generator": (generator_argument, run_generator),
    "generator as result": (generator_result, run_generator_result),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_structure_goes_in_and_out(lab, form):
    lab.check_same(lab.Case(model_of(lab, *FORMS[form])), steps=6)


def test_a_mutable_default_is_followed(lab):
    def make():
        mutable_default.__defaults__[0].clear()
        return model_of(lab, mutable_default, run_plain)()

    lab.check_same(lab.Case(make), ways=["replay, all dropped", "module"], steps=STEPS)


def test_numbers_and_words_that_change_from_step_to_step(lab):
    def body(self, x, scale, kind="gelu", *, keep=True):
        hidden = self.a(x) * scale
        hidden = functional.gelu(hidden) if kind == "gelu" else torch.tanh(hidden)
        return (x if keep else 0) + self.b(hidden)

    class Told(lab.Stack):
        def forward(self, x, index=0):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, 1.0 + index, ("gelu", "tanh")[index % 2], keep=index % 3 != 1)
            return x

    def step(model, optimizer, batch, index):
        loss = model(batch, (0, 1, 2, True, 2, 3, 0, 1)[index]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    make = lambda: Told([lab.Block(body) for _ in range(2)])  # noqa: E731
    lab.check_same(lab.Case(make, whole_step=step), steps=STEPS)


def test_one_and_one_point_nought_are_told_apart(lab):
    def body(self, x, exponent):
        return x + self.b((self.a(x) ** 2 + 1) ** exponent * (torch.ones_like(x) * exponent))

    class Told(lab.Stack):
        def forward(self, x, exponent=1):
            for block in self.blocks:
                x = block(x, exponent)
            return x

    def step(model, optimizer, batch, index):
        loss = model(batch * 0.1, (1, 1, 1, 1, 1, 1.0, True, 1)[index]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    make = lambda: Told([lab.Block(body) for _ in range(2)])  # noqa: E731
    lab.check_same(lab.Case(make, whole_step=step), steps=STEPS)


class Cache:
    """What attention layers write their keys to."""

    def __init__(self):
        self.keys, self.length = {}, 0

    def update(self, layer, key):
        old = self.keys.get(layer)
        self.keys[layer] = key if old is None else torch.cat([old, key])
        self.length += 1
        return self.keys[layer]


@pytest.mark.parametrize("detached", [True, False])
def test_a_cache_that_the_block_writes(lab, detached):
    def body(self, x, cache, layer):
        key = self.a(x)
        keys = cache.update(layer, key.detach() if detached else key)
        weights = torch.softmax(x @ keys.T / 7, -1)
        return x + self.b(weights @ keys)

    class Cached(lab.Stack):
        def forward(self, x):
            cache = Cache()
            for part in x.chunk(2):
                for layer, block in enumerate(self.blocks):
                    part = block(part, cache, layer)
            assert cache.length == 2 * len(self.blocks)
            return part

    make = lambda: Cached([lab.Block(body) for _ in range(2)])  # noqa: E731
    lab.check_same(lab.Case(make))


def attending(self, x, cache, layer):
    keys = cache.update(layer, self.a(x))
    return x + self.b(torch.softmax(x @ keys.T / 7, -1) @ keys)


class Decoder:
    """Builds a stack whose blocks share a cache, as decoders do; at some steps it is not new."""

    def __init__(self, lab, is_new):
        class Decoding(lab.Stack):
            def forward(self, x, index=0):
                cache = Cache()
                if not is_new(index):
                    cache.update(1, x[: index + 1] * 0.5)
                for layer, block in enumerate(self.blocks):
                    x = block(x, cache, layer)
                return x

        self.make = lambda: Decoding([lab.Block(attending) for _ in range(3)])

    @staticmethod
    def step(model, optimizer, batch, index):
        loss = model(batch * 0.1, index).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]


@pytest.mark.parametrize(
    "is_new", [lambda index: True, lambda index: index not in (5, 6, 9)], ids=["always", "mostly"]
)
def test_a_cache_that_is_passed_along_in_training(lab, is_new):
    decoder = Decoder(lab, is_new)
    lab.check_same(lab.Case(decoder.make, whole_step=decoder.step), steps=12)


def test_calls_with_a_cache_run_by_their_recording(lab):
    from leanstep.engines.attach import runner_of

    decoder = Decoder(lab, lambda index: True)
    case = lab.Case(decoder.make, whole_step=decoder.step)
    model, applied = case.fitted()
    case.train(model, 8)
    assert runner_of(model.blocks[1]).replays[0].reused >= 3
    applied.remove()


def test_tensors_in_an_object_that_is_read(lab):
    class Bag:
        def __init__(self, x):
            self.gate, self.scale = torch.sigmoid(x), 2.0

    def body(self, x, bag):
        return x + self.b(functional.gelu(self.a(x)) * bag.gate * bag.scale)

    def run(blocks, x):
        bag = Bag(x)
        for block in blocks:
            x = block(x, bag)
        return x

    lab.check_same(lab.Case(model_of(lab, body, run)))


def test_a_batch_that_is_a_dictionary_with_more_than_tensors(lab):
    class Reading(lab.Stack):
        def forward(self, x, scale=1.0, name=None, sizes=()):
            x = self.first(x) * scale
            for block in self.blocks:
                x = block(x)
            return x.sum() / sum(sizes)

    def body(self, x):
        return x + self.b(inner(self, x))

    batch = {"x": lab.rows(), "scale": 0.5, "name": "first", "sizes": [1, 2]}
    loss = lambda model, batch: model(**batch)  # noqa: E731
    make = lambda: Reading([lab.Block(body) for _ in range(2)])  # noqa: E731
    lab.check_same(lab.Case(make, loss=loss, batch=batch))


def test_outputs_that_go_unused(lab):
    """Their gradients stay None."""

    def body(self, x):
        return x + functional.gelu(self.a(x)), torch.tanh(self.b(x))

    def run(blocks, x):
        for block in blocks:
            x, _ = block(x)
        return x

    case = lab.Case(model_of(lab, body, run))
    lab.check_same(case)
    model, applied = case.fitted()
    lab.mean_square(model, case.batch).backward()
    assert model.blocks[0].b.weight.grad is None
    applied.remove()


def test_one_of_several_outputs_in_turns(lab):
    def body(self, x):
        hidden = functional.gelu(self.a(x))
        return hidden, torch.tanh(self.b(hidden)), hidden.sin()

    def step(model, optimizer, batch, index):
        x = model.first(batch)
        for block in model.blocks:
            x = x + block(x)[index % 3]
        loss = x.pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    def run(blocks, x):
        for block in blocks:
            x = x + sum(block(x))
        return x

    lab.check_same(lab.Case(model_of(lab, body, run), whole_step=step), steps=STEPS)


def test_an_encoder_output_that_every_decoder_layer_reads(lab):
    """Its gradient is a sum, taken in the order that autograd takes it."""

    def body(self, x, memory):
        weights = torch.softmax(self.a(x) @ memory.T, -1)
        return self.norm(x + self.b(weights @ memory))

    class Decoder(lab.Stack):
        def forward(self, x):
            memory = torch.tanh(self.first(x))
            for block in self.blocks:
                x = block(x, memory)
            return x * memory

    lab.check_same(lab.Case(lambda: Decoder([lab.Block(body) for _ in range(5)])))


def test_skips_across_blocks(lab):
    class Bridged(lab.Stack):
        def forward(self, x):
            x, skips = self.first(x), []
            half = len(self.blocks) // 2
            for block in self.blocks[:half]:
                x = block(x, None)
                skips.append(x)
            for block in self.blocks[half:]:
                x = block(x, skips.pop())
            return x

    def body(self, x, skip):
        x = x if skip is None else torch.cat([x, skip]).view(2, *x.shape).sum(0)
        return self.b(functional.gelu(self.norm(self.a(x))))

    lab.check_same(lab.Case(lambda: Bridged([lab.Block(body) for _ in range(4)])))


def test_an_output_that_is_an_argument_or_a_parameter(lab):
    def body(self, x):
        return x, self.a.weight, self.b(functional.gelu(self.a(x)))

    def run(blocks, x):
        for block in blocks:
            same, weight, new = block(x)
            assert same is x
            x = same + new @ weight
        return x

    lab.check_same(lab.Case(model_of(lab, body, run)))


def test_a_block_that_returns_nothing(lab):
    class Writing(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, store):
            store["x"] = store["x"] + self.b(functional.gelu(self.a(store["x"])))

    class Top(lab.Stack):
        def forward(self, x):
            store = {"x": self.first(x)}
            for block in self.blocks:
                assert block(store) is None
            return store["x"]

    make = lambda: Top([Writing(lab.WIDTH) for _ in range(2)])  # noqa: E731
    lab.check_same(lab.Case(make))
