"""Batch plans: every row once, within the budget, with the shared beginning and the chunks that the costs ask for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.hf_batch import Budget, Row, plan_batches
from lockstep.sampling import draw_rows
from lockstep.types import Draw

budgets = st.builds(
    Budget,
    cache_tokens=st.integers(30, 200),
    max_new_tokens=st.integers(1, 10),
    forward_tokens=st.integers(0, 20),
    prefill_tokens=st.integers(1, 60),
    share_prefix=st.booleans(),
)
prompt_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20).map(tuple), min_size=1, max_size=10)


def plan(prompts, num_samples, budget, *, first_slot=0):
    return plan_batches(prompts, rows=draw_rows(Draw(0, 0, first_slot), len(prompts), num_samples), budget=budget)


@given(prompt_lists, st.integers(1, 9), budgets)
@settings(deadline=None, max_examples=300)
def test_every_row_once_and_within_the_budget(prompts, num_samples, budget):
    batches = plan(prompts, num_samples, budget, first_slot=5)
    made = [(row, group.ids) for batch in batches for group in batch.groups for row in group.rows]
    wanted = [(Row(5 + place, index), ids) for place, ids in enumerate(prompts) for index in range(num_samples)]
    assert sorted(made, key=str) == sorted(wanted, key=str)
    for batch in batches:
        width = max(len(group.ids) for group in batch.groups)
        assert len(batch.rows) * (width + budget.max_new_tokens) <= budget.cache_tokens
        assert len({group.ids[: batch.shared] for group in batch.groups}) == 1
        assert all(len(group.ids) > batch.shared for group in batch.groups)
        assert budget.share_prefix or batch.shared == 0
        for chunk in batch.chunks:
            lengths = [len(group.ids) - batch.shared for group in chunk]
            assert sum(max(lengths) - length for length in lengths) <= budget.forward_tokens * len(chunk)
            assert len(chunk) == 1 or len(chunk) * max(lengths) <= budget.prefill_tokens


def test_equal_prompts_are_one_group():
    budget = Budget(cache_tokens=1000, max_new_tokens=2, forward_tokens=8)
    (batch,) = plan([(1, 2), (3, 4), (1, 2)], 2, budget)
    assert [(group.ids, [row.slot for row in group.rows]) for group in batch.groups] == [
        ((1, 2), [0, 0, 2, 2]),
        ((3, 4), [1, 1]),
    ]


def test_the_shared_beginning_is_computed_once_where_it_pays():
    prompts = [(9,) * 10 + (place,) for place in range(4)]
    for forward_tokens, shared in ((29, 10), (30, 0)):
        budget = Budget(cache_tokens=1000, max_new_tokens=2, forward_tokens=forward_tokens)
        (batch,) = plan(prompts, 1, budget)
        assert batch.shared == shared


def test_a_long_prompt_is_not_padded_to():
    prompts = [tuple(range(place, place + length)) for place, length in enumerate((4, 5, 40))]
    budget = Budget(cache_tokens=1000, max_new_tokens=2, forward_tokens=8)
    (batch,) = plan(prompts, 1, budget)
    assert [[len(group.ids) for group in chunk] for chunk in batch.chunks] == [[4, 5], [40]]


def test_a_group_larger_than_a_batch_is_split_evenly():
    budget = Budget(cache_tokens=40, max_new_tokens=6, forward_tokens=8)
    batches = plan([(1, 2, 3, 4)], 9, budget)
    assert [len(batch.rows) for batch in batches] == [3, 3, 3]


def test_a_row_that_does_not_fit_is_refused():
    budget = Budget(cache_tokens=10, max_new_tokens=8, forward_tokens=8)
    with pytest.raises(ValueError, match=r"3 tokens with 8 new ones .* the 10 tokens of cache .*batch_tokens"):
        plan([(1, 2, 3)], 1, budget)
