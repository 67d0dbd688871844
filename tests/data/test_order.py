"""The prompt order: complete epochs, no repeats within a batch, and nothing to restore on resume."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import PromptOrder

sizes = st.integers(1, 23).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def stream(order, num_steps, count):
    return [order.take(step, count) for step in range(num_steps)]


@given(size=sizes, seed=st.integers(0, 5), shuffle=st.booleans())
def test_no_prompt_twice_in_a_batch_and_every_epoch_is_complete(size, seed, shuffle):
    num_prompts, count = size
    batches = stream(PromptOrder(num_prompts, seed, shuffle), 40, count)
    assert all(len(set(batch)) == count for batch in batches)
    flat = [index for batch in batches for index in batch]
    for start in range(0, len(flat) - num_prompts + 1, num_prompts):
        assert sorted(flat[start : start + num_prompts]) == list(range(num_prompts))


@given(size=sizes, seed=st.integers(0, 5), steps=st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_a_step_does_not_depend_on_what_was_asked_before(size, seed, steps):
    """Also what makes a resumed run equal: it asks a new object for step k first."""
    num_prompts, count = size
    used = PromptOrder(num_prompts, seed, shuffle=True)
    for step in steps:
        assert used.take(step, count) == PromptOrder(num_prompts, seed, shuffle=True).take(step, count)


def test_epochs_and_seeds_differ():
    order = PromptOrder(50, seed=1, shuffle=True)
    first, second = order.take(0, 50), order.take(1, 50)
    assert first != second
    assert first != list(range(50))
    assert first != PromptOrder(50, seed=2, shuffle=True).take(0, 50)


def test_unshuffled_is_the_data_sets_order():
    assert stream(PromptOrder(5, seed=1, shuffle=False), 3, 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_more_than_there_are_repeats_as_evenly_as_it_can():
    counts = Counter(PromptOrder(3, seed=0, shuffle=True).take(4, 8))
    assert sorted(counts.values()) == [2, 3, 3]


def test_every_place_in_the_epoch_is_equally_likely():
    """Keeping the just-seen prompts for later must not favour any: 4 prompts, 4000 epochs, first place."""
    order = PromptOrder(4, seed=3, shuffle=True)
    flat = [index for step in range(5334) for index in order.take(step, 3)]
    firsts = Counter(flat[start] for start in range(0, 16000, 4))
    assert all(abs(count - 1000) < 150 for count in firsts.values())  # about five standard deviations


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="at least 1; 0 came"):
        PromptOrder(0, seed=0, shuffle=True)
