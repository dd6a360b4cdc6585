"""When a planned step that differs is wrong, and when the model does not repeat itself."""

import torch

from leanstep.step.outcome import Outcome, differences, run_for_outcome, widened
from leanstep.step.training import make_step

FIRST, SECOND, THIRD = (f"gradient of {name}" for name in ("head", "middle", "stem"))


def outcome(head=1.0, middle=1.0, stem=1.0, loss=1.0, count=0):
    """Gradients in the order that backward makes them."""
    return Outcome(
        loss=torch.tensor(loss),
        gradients={
            "head": torch.tensor([head]),
            "middle": torch.tensor([middle]),
            "stem": torch.tensor([stem]),
        },
        buffers={"count": torch.tensor(count)},
        random_states=(),
    )


def spread_of(*runs):
    found = {}
    for run in runs:
        found = widened(found, outcome(), run, sums_in_order=False)
    return found


def test_what_repeats_itself_must_be_equal():
    assert differences(outcome(), outcome(), {}) == ((), ())
    assert differences(outcome(), outcome(middle=1.001), {}) == ((SECOND,), ())


def test_what_moves_by_itself_may_move_about_as_far():
    spread = spread_of(outcome(middle=1.001))
    assert differences(outcome(), outcome(middle=1.003), spread) == ((), (SECOND,))
    assert differences(outcome(), outcome(middle=1.1), spread) == ((SECOND,), ())


def test_a_gradient_behind_one_that_moves_may_move_though_it_was_not_seen_to():
    """Rounding may hide it in the runs that were seen: 'stem' is made of what shook 'middle'."""
    spread = spread_of(outcome(middle=1.001))
    assert differences(outcome(), outcome(stem=1.0005), spread) == ((), (THIRD,))
    assert differences(outcome(), outcome(stem=1.2), spread) == ((THIRD,), ())


def test_a_gradient_that_is_rounding_alone_does_not_excuse_every_other():
    """A key's bias in attention has none but for rounding, which moves by its whole size."""
    spread = spread_of(outcome(middle=2.0))
    assert differences(outcome(), outcome(stem=3.0), spread) == ((THIRD,), ())
    assert differences(outcome(), outcome(stem=1.02), spread) == ((THIRD,), ())


def test_a_buffer_is_not_excused_by_gradients():
    spread = spread_of(outcome(middle=1.001))
    assert differences(outcome(), outcome(count=1), spread) == (("buffer count",), ())


def test_a_gradient_before_one_that_moves_must_be_equal():
    spread = spread_of(outcome(middle=1.001))
    assert differences(outcome(), outcome(head=1.0005), spread) == ((FIRST,), ())


def test_a_count_that_moves_may_be_anything_and_excuses_nobody_else():
    spread = spread_of(outcome(count=3))
    assert differences(outcome(), outcome(count=9), spread) == ((), ("buffer count",))
    assert differences(outcome(), outcome(stem=1.0005), spread) == ((THIRD,), ())


def test_where_sums_have_an_order_what_moves_is_drawn_anew_and_excuses_nobody_else():
    spread = widened({}, outcome(), outcome(middle=5.0), sums_in_order=True)
    assert differences(outcome(), outcome(middle=-3.0), spread) == ((), (SECOND,))
    assert differences(outcome(), outcome(stem=1.0005), spread) == ((THIRD,), ())


def test_not_a_number_is_never_near():
    spread = spread_of(outcome(middle=1.001))
    new = outcome(middle=float("nan"))
    assert differences(outcome(), new, spread) == ((SECOND,), ())


def test_gradients_are_named_in_the_order_they_get_ready():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    unused = torch.nn.Parameter(torch.zeros(1))
    model.register_parameter("unused", unused)
    step = make_step(model, torch.ones(2, 3), lambda model, batch: model(batch).sum(), None)
    found = run_for_outcome(step)
    order = list(found.gradients)
    assert {name.partition(".")[0] for name in order[:2]} == {"1"}
    assert order[-1] == "unused" and found.gradients["unused"] is None
    assert not model[0].weight._post_accumulate_grad_hooks
