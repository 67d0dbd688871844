"""The sampling distribution against slow references and transformers' own, and the draws against it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lockstep.sampling import FIRST_NUCLEUS, check_sampling, draw_rows, draw_tokens, row_uniforms, sampling_logprobs
from lockstep.types import Draw, Sampling

INF = float("inf")


def logits_strategy(max_size: int = 40):
    row = st.lists(st.floats(-12, 12, width=32), min_size=2, max_size=max_size)
    return row.map(lambda values: torch.tensor([values], dtype=torch.float32))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.5, 1, 1.0, 1.3, 2]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.8, 0.95, 1.0]),
)


def slow_kept(logits: list[float], sampling: Sampling) -> set[int]:
    """The definition, token by token, in double precision."""
    scaled = [value / sampling.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if sampling.top_k:
        floor = scaled[order[min(sampling.top_k, len(order)) - 1]]
        order = [token for token in order if scaled[token] >= floor]
    weights = [np.exp(scaled[token] - scaled[order[0]]) for token in order]
    kept, reached = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if sampling.top_p < 1 and reached / sum(weights) >= sampling.top_p:
            break
        kept.add(token)
        reached += weight
    return {token for token in order if scaled[token] >= min(scaled[kept_token] for kept_token in kept)}


def is_near_a_boundary(logits: torch.Tensor, sampling: Sampling) -> bool:
    """Whether a cumulative probability, or the gap between two logits, is too close to call in fp32."""
    scaled = (logits / sampling.temperature).double()
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(sampling.top_k, scaled.shape[1])).values[:, -1:], -INF)
    ranked = scaled.sort(descending=True).values
    reached = ranked.softmax(-1).cumsum(-1)
    gaps = ranked.diff().abs()
    return bool(((reached - sampling.top_p).abs() < 1e-5).any() or (gaps < 1e-5).any())


def kept_set(logprobs: torch.Tensor) -> set[int]:
    return set((logprobs[0] > -INF).nonzero().squeeze(1).tolist())


@given(logits_strategy(), samplings)
@settings(deadline=None, max_examples=200)
def test_distribution_sums_to_one(logits, sampling):
    logprobs = sampling_logprobs(logits, sampling)
    assert logprobs.dtype == torch.float32
    assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-5)


@given(logits_strategy(), samplings)
@settings(deadline=None, max_examples=200)
def test_kept_tokens_are_the_slow_references(logits, sampling):
    if sampling.top_p < 1 and is_near_a_boundary(logits, sampling):
        return
    logprobs = sampling_logprobs(logits, sampling)
    kept = slow_kept(logits[0].tolist(), sampling)
    assert kept_set(logprobs) == kept
    index = sorted(kept)
    expected = (logits[0, index].double() / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs[0, index].double(), expected, atol=1e-5, rtol=0)


@given(logits_strategy(), samplings)
@settings(deadline=None, max_examples=200)
def test_kept_tokens_are_transformers(logits, sampling):
    if is_near_a_boundary(logits, sampling):
        return
    ids = torch.zeros(1, 1, dtype=torch.long)
    expected = TemperatureLogitsWarper(float(sampling.temperature))(ids, logits)
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(ids, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(ids, expected)
    assert kept_set(sampling_logprobs(logits, sampling)) == kept_set(expected)


@pytest.mark.parametrize("top_p", [0.5, 0.999])
def test_nucleus_in_a_large_vocabulary(top_p):
    """Rows whose nucleus fits the first look, and rows whose does not (the flat one), in one batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4 * FIRST_NUCLEUS, generator=generator) * torch.tensor([[8.0], [1.0], [0.01]])
    logprobs = sampling_logprobs(logits, Sampling(top_p=top_p))
    for row in range(3):
        sizes = len(kept_set(logprobs[row : row + 1]))
        reached = logits[row].double().softmax(-1).sort(descending=True).values.cumsum(-1)
        assert abs(sizes - (int((reached < top_p).sum()) + 1)) <= 1
        assert abs(logprobs[row].exp().sum().item() - 1) < 1e-4


def test_temperature_divides_logits():
    """B74: logprob of index 0 of [2, 1, 0] at T=0.5; neither the raw one nor logprob / T."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert sampling_logprobs(logits, Sampling(temperature=0.5))[0, 0].item() == pytest.approx(-0.142932, abs=1e-6)
    assert sampling_logprobs(logits, Sampling())[0, 0].item() == pytest.approx(-0.407606, abs=1e-6)
    assert sampling_logprobs(logits, Sampling(temperature=0))[0, 0].item() == pytest.approx(-0.407606, abs=1e-6)
    as_int = sampling_logprobs(logits, Sampling(temperature=2))
    assert torch.equal(as_int, sampling_logprobs(logits, Sampling(temperature=2.0)))


def test_truncated_distribution_is_renormalised():
    """B76: probabilities [.5, .3, .15, .05] at top_p=.8 behave as [.625, .375]."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    expected = torch.tensor([[0.625, 0.375, 0.0, 0.0]])
    torch.testing.assert_close(sampling_logprobs(logits, Sampling(top_p=0.8)).exp(), expected)
    torch.testing.assert_close(sampling_logprobs(logits, Sampling(top_k=2)).exp(), expected)


def test_kept_ids_survive_the_mask():
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, 0.0]])
    logprobs = sampling_logprobs(logits, Sampling(top_k=1), keep_B=torch.tensor([2, 0]))
    assert kept_set(logprobs[:1]) == {1, 2}
    assert kept_set(logprobs[1:]) == {0}
    torch.testing.assert_close(logprobs[0, 1:], logits[0, 1:].log_softmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(temperature=2), Sampling(temperature=0.7, top_k=3, top_p=0.9)])
def test_gradients_are_finite_and_the_input_is_left_alone(sampling):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    before = logits.detach().clone()
    chosen = sampling_logprobs(logits.chunk(2)[0], sampling).amax(-1).sum()
    chosen.backward()
    assert torch.equal(logits.detach(), before)
    assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad[:2].abs().sum() > 0


def test_half_precision_logits_are_scored_in_fp32():
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(sampling_logprobs(logits, Sampling()), logits.float().log_softmax(-1))


def test_uniforms_depend_on_the_row_only():
    draw = Draw(seed=3, step=5)
    numbers = row_uniforms(draw, 7, 1, 1000)
    assert numbers.dtype == torch.float64 and numbers.min() >= 0 and numbers.max() < 1
    assert torch.equal(numbers[:10], row_uniforms(Draw(seed=3, step=5, first_slot=4), 7, 1, 10))
    others = [
        (Draw(3, 5, turn=1), 7, 1),
        (Draw(3, 5, turn=2), 7, 1),
        (Draw(4, 5), 7, 1),
        (Draw(3, 6), 7, 1),
        (draw, 8, 1),
        (draw, 7, 2),
        (draw, 1, 7),
        (Draw(5, 3), 7, 1),
    ]
    for other in others:
        assert not set(row_uniforms(*other, 1000).tolist()) & set(numbers.tolist())
    assert abs(numbers.mean().item() - 0.5) < 0.03


def test_rows_are_a_run_of_slots_or_those_that_are_named():
    assert draw_rows(Draw(0, 0, first_slot=4), 2, 3) == [[(4, 0), (4, 1), (4, 2)], [(5, 0), (5, 1), (5, 2)]]
    assert draw_rows(Draw(0, 0, turn=1, rows=((7, 2), (3, 0))), 2, 1) == [[(7, 2)], [(3, 0)]]
    assert draw_rows(Draw(0, 0), 0, 1) == []
    for draw, num_prompts, num_samples in ((Draw(0, 0, rows=((1, 0),)), 1, 2), (Draw(0, 0, rows=((1, 0),)), 2, 1)):
        with pytest.raises(ValueError, match="expected a row for each of"):
            draw_rows(draw, num_prompts, num_samples)
    with pytest.raises(ValueError, match=r"\(1, 0\) came twice"):
        draw_rows(Draw(0, 0, rows=((1, 0), (1, 0))), 2, 1)


def test_uniforms_are_these_numbers():
    """A stored run must be reproducible by any later version, on any platform."""
    expected = [0.4897185047750203, 0.7241042781897309, 0.7802634288321721]
    assert row_uniforms(Draw(seed=0, step=1), 2, 3, 3).tolist() == expected


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(uniforms, random):
    edges = [0.0, 1 - 2**-53, *uniforms]
    logits = torch.tensor([[random.choice([-INF, random.uniform(-3, 3)]) for _ in range(11)] + [0.5, -INF]])
    logprobs = logits.log_softmax(-1).repeat(len(edges), 1)
    ids = draw_tokens(logprobs, torch.tensor(edges, dtype=torch.float64))
    assert (logprobs.gather(1, ids[:, None]) > -INF).all()


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    logprobs = sampling_logprobs(logits, Sampling(temperature=1.5, top_k=3))
    count = 20000
    ids = draw_tokens(logprobs.repeat(count, 1), row_uniforms(Draw(0, 0), 0, 0, count))
    frequencies = ids.bincount(minlength=4).double() / count
    # Four standard deviations of a frequency over 20000 draws.
    torch.testing.assert_close(frequencies, logprobs[0].double().exp(), atol=4 * (0.25 / count) ** 0.5, rtol=0)


def test_a_row_of_nans_is_reported_by_its_logprob():
    logprobs = torch.full((1, 5), float("nan"))
    assert draw_tokens(logprobs, torch.tensor([0.5], dtype=torch.float64)).item() == 4


OUT_OF_RANGE = [
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": 1e-38},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -1},
    {"max_new_tokens": 0},
]


@pytest.mark.parametrize("values", OUT_OF_RANGE)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="came"):
        check_sampling(Sampling(**values))
