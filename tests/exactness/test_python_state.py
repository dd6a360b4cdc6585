"""Values that a block's Python reads from elsewhere: each is seen at the call where it changes."""

import contextvars
import functools
import itertools
import os
import threading
import time
import types
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

# Recordings are in use from the fifth call on; what is read changes after that.
STEPS = 9
CHANGE_AT = 5

WAYS = ["replay, all dropped", "module"]

SCALE = 1.0
FACTORS = {"scale": 1.0}
NESTED = {"outer": [{"scale": 1.0}]}
CALLS = [0]
SETTING = contextvars.ContextVar("SETTING", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0


class Settings:
    scale = 1.0


OBJECT = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture(autouse=True)
def globals_as_they_were():
    yield
    put_back()


def put_back():
    global SCALE
    SCALE, FACTORS["scale"], NESTED["outer"][0]["scale"], CALLS[0] = 1.0, 1.0, 1.0, 0
    Settings.scale = OBJECT.inner.scale = LOCAL.scale = 1.0
    SETTING.set(1.0)
    os.environ.pop("SCALE_OF_A_TEST", None)
    read_default.__defaults__ = ([1.0],)


def read_global():
    return SCALE


def read_through_two_functions():
    return read_global() * 2


def read_dictionary():
    return FACTORS["scale"]


def read_nested():
    return NESTED["outer"][0]["scale"]


def read_class():
    return Settings.scale


def read_by_name():
    return getattr(Settings, "sca" + "le")


def read_object():
    return OBJECT.inner.scale


def read_thread_local():
    return LOCAL.scale


def read_context():
    return SETTING.get()


def read_environment():
    return float(os.environ.get("SCALE_OF_A_TEST", "1.0"))


def read_default(values=[1.0]):  # noqa: B006
    return values[0]


def read_global_table():
    return globals()["SCALE"]


read_partial = functools.partial(lambda table, name: table[name], FACTORS, "scale")


def set_all(value):
    global SCALE
    SCALE = FACTORS["scale"] = NESTED["outer"][0]["scale"] = value
    Settings.scale = OBJECT.inner.scale = LOCAL.scale = value
    SETTING.set(value)
    os.environ["SCALE_OF_A_TEST"] = str(value)
    read_default.__defaults__[0][0] = value


READERS = [
    read_global,
    read_through_two_functions,
    read_dictionary,
    read_nested,
    read_class,
    read_by_name,
    read_object,
    read_thread_local,
    read_context,
    read_environment,
    read_default,
    read_global_table,
    read_partial,
]


def step_that_changes(model, optimizer, batch, index):
    """A training step before which all globals change, once recordings are in use."""
    if index == 0:
        put_back()
    if index >= CHANGE_AT:
        set_all(1.0 + 0.25 * (index - CHANGE_AT))
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return [loss]


@pytest.mark.parametrize("read", READERS, ids=lambda read: getattr(read, "__name__", "partial"))
def test_a_value_reached_through_a_helper_is_seen_at_once(lab, read):
    def body(self, x):
        return x + self.b(functional.gelu(self.a(x) * read()))

    case = lab.Case(lambda: lab.stack_of(body), whole_step=step_that_changes)
    lab.check_same(case, ways=WAYS, steps=STEPS)


@pytest.mark.parametrize("read", READERS[:4], ids=lambda read: read.__name__)
def test_a_value_that_chooses_a_path_is_seen_at_once(lab, read):
    def body(self, x):
        hidden = self.a(x)
        hidden = torch.tanh(hidden) if read() > 1.1 else functional.gelu(hidden).sigmoid()
        return x + self.b(hidden)

    case = lab.Case(lambda: lab.stack_of(body), whole_step=step_that_changes)
    lab.check_same(case, ways=WAYS, steps=STEPS)


def counting_stack(lab, count):
    def body(self, x):
        return x + self.b(functional.gelu(self.a(x) * (1 + 0.1 * count())))

    return lab.stack_of(body)


def counter_in_closure():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


def counter_in_list():
    def count():
        CALLS[0] += 1
        return CALLS[0]

    CALLS[0] = 0
    return count


def counter_in_object():
    class Counter:
        def __init__(self):
            self.calls = 0

        def __call__(self):
            self.calls += 1
            return self.calls

    return Counter()


def counter_in_slots():
    class Counter:
        __slots__ = ("calls",)

        def __init__(self):
            self.calls = 0

        def more(self):
            self.calls += 1
            return self.calls

    return Counter().more


def counter_of_class():
    class Counter:
        calls = 0

        @classmethod
        def more(cls):
            cls.calls += 1
            return cls.calls

    return Counter.more


def counter_in_default():
    def count(calls=[0]):  # noqa: B006
        calls[0] += 1
        return calls[0]

    return count


def counter_on_function():
    def count():
        count.calls += 1
        return count.calls

    count.calls = 0
    return count


COUNTERS = [
    counter_in_closure,
    counter_in_list,
    counter_in_object,
    counter_in_slots,
    counter_of_class,
    counter_in_default,
    counter_on_function,
]


@pytest.mark.parametrize("make", COUNTERS, ids=lambda make: make.__name__)
def test_counters_outside_every_module_count_once(lab, make):
    lab.check_same(lab.Case(lambda: counting_stack(lab, make())), ways=WAYS, steps=STEPS)


def iterator():
    return functools.partial(next, itertools.cycle([1.0, 2.0, 3.0]))


def generator():
    def numbers():
        for number in range(1000):
            yield 1.0 + number % 3

    running = numbers()
    return lambda: next(running)


def loop_over_an_iterator():
    running = iter([1.0, 2.0, 3.0] * 100)

    def count():
        for number in running:
            return number
        return 0.0

    return count


def own_numpy_generator():
    draws = numpy.random.default_rng(1)
    return lambda: float(draws.random())


def steps_of_a_clock():
    ticks = itertools.count(1)

    def count():
        assert time.perf_counter() > 0
        return 1.0 / ticks.__next__()

    return count


@pytest.mark.parametrize(
    "make",
    [iterator, generator, loop_over_an_iterator, own_numpy_generator, steps_of_a_clock],
    ids=lambda make: make.__name__,
)
def test_iterators_move_once(lab, make):
    lab.check_same(lab.Case(lambda: counting_stack(lab, make())), ways=WAYS, steps=STEPS)


def test_a_helper_that_is_replaced_is_seen(lab):
    helpers = types.ModuleType("helpers_of_a_test")
    double, triple = lambda x: x * 2.0, lambda x: x * 3.0
    helpers.change = double

    def body(self, x):
        return x + self.b(functional.gelu(helpers.change(self.a(x))))

    def step(model, optimizer, batch, index):
        helpers.change = double if index < CHANGE_AT else triple
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    case = lab.Case(lambda: lab.stack_of(body), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=STEPS)


def test_an_attribute_that_is_none_or_a_tensor_is_seen(lab):
    def body(self, x):
        hidden = self.a(x)
        return x + self.b(functional.gelu(hidden if self.bias is None else hidden + 1.0))

    def change(block):
        block.bias = torch.ones(1)

    def step(model, optimizer, batch, index):
        for block in model.blocks:
            block.bias = torch.ones(1) if index < CHANGE_AT else None
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    case = lab.Case(lambda: lab.stack_of(body, change=change), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=STEPS)


def named_buffer(block):
    block.register_buffer("table", None)


def fill_the_buffer(block):
    block.table = torch.ones(1, device=block.a.weight.device)


def reads_whether_it_is_there(self, x):
    hidden = self.a(x)
    return x + self.b(functional.gelu(hidden if self.table is None else hidden + self.table))


def typed_buffer(block):
    block.register_buffer("table", torch.ones(3))


def change_its_type(block):
    block.table = block.table.double()


def reads_of_which_type_it_is(self, x):
    scale = 1.0 if self.table.dtype is torch.float32 else 2.0
    return x + self.b(functional.gelu(self.a(x) * scale))


def change_its_size(block):
    block.table = block.table[:2]


def reads_how_large_it_is(self, x):
    return x + self.b(functional.gelu(self.a(x) * (len(self.table) / 4)))


def convolution_without_bias(block):
    block.a = nn.Conv1d(4, 4, 3, padding=1, bias=False)


def give_it_a_frozen_bias(block):
    bias = torch.ones(4, device=block.b.weight.device)
    block.a.bias = nn.Parameter(bias, requires_grad=False)


def convolves(self, x):
    hidden = self.a(x.view(-1, 4, x.shape[1])).reshape(x.shape)
    return x + self.b(functional.gelu(hidden))


HELD = [
    (named_buffer, reads_whether_it_is_there, fill_the_buffer),
    (typed_buffer, reads_of_which_type_it_is, change_its_type),
    (typed_buffer, reads_how_large_it_is, change_its_size),
    (convolution_without_bias, convolves, give_it_a_frozen_bias),
]


@pytest.mark.parametrize(("prepare", "body", "change"), HELD, ids=lambda part: part.__name__)
def test_buffers_and_frozen_parameters_that_come_or_change_are_seen(lab, prepare, body, change):
    def step(model, optimizer, batch, index):
        for block in model.blocks if index == CHANGE_AT else ():
            change(block)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    case = lab.Case(lambda: lab.stack_of(body, change=prepare), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=STEPS)


def asks_for_a_leaf(self, x):
    return x + self.b(functional.gelu(self.a(x) * (1.0 if x.is_leaf else 2.0)))


def asks_for_a_gradient(self, x):
    scale = 1.0 if self.a.weight.grad is None else 2.0
    return x + self.b(functional.gelu(self.a(x) * scale))


@pytest.mark.parametrize("body", [asks_for_a_leaf, asks_for_a_gradient], ids=lambda b: b.__name__)
def test_what_autograd_knows_of_a_tensor_is_seen(lab, body):
    def step(model, optimizer, batch, index):
        rows = batch.clone().requires_grad_()
        changed = index >= CHANGE_AT
        if changed:
            model.blocks[0](batch).mean().backward()
        loss = model.blocks[0](rows * 1.0 if changed else rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss, rows.grad]

    def loss(model, batch):
        return model.blocks[0](batch.clone().requires_grad_()).pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(body), loss=loss, whole_step=step)
    lab.check_same(case, ways=WAYS, steps=STEPS)


class Scheduled(nn.Module):
    """A block whose factor is an attribute of its class."""

    factor = 1.0

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    @property
    def scale(self):
        return 2 * type(self).factor

    def forward(self, x):
        return x + self.b(functional.gelu(self.a(x) * self.scale * self.factor))


def test_attributes_of_the_class_are_seen(lab):
    def step(model, optimizer, batch, index):
        Scheduled.factor = 1.0 if index < CHANGE_AT else 1.0 + 0.1 * index
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    def make():
        Scheduled.factor = 1.0
        return lab.Stack([Scheduled(lab.WIDTH) for _ in range(2)])

    lab.check_same(lab.Case(make, whole_step=step), steps=STEPS)
