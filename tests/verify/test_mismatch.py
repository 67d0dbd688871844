"""Every mismatch metric against NumPy on the pooled tokens, whatever the cuts and ranks; and the alarms."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import EngineMismatch
from lockstep.testing import run_ranks
from lockstep.train.mismatch import MismatchSums, mismatch_over_ranks, mismatch_sums
from lockstep.verify.mismatch import Alarm, check_metrics

HEALTHY = {"rollout_probs_diff_mean": 1e-5, "token_mult_prob_error": 1.0001, "rollout_kl_k3": 1e-9}


def tokens(count: int, seed: int, noise: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(count, generator=draw) * 6
    return rollout + torch.randn(count, generator=draw) * noise, rollout


def with_numpy(trainer: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    """The definitions of verl, NeMo-RL and TRL, written down once more on whole arrays."""
    ours, theirs = trainer.double().numpy(), rollout.double().numpy()
    p, q, r = np.exp(ours), np.exp(theirs), np.exp(ours - theirs)
    weights = r / r.mean()
    return {
        "rollout_probs_diff_mean": np.abs(p - q).mean(),
        "rollout_probs_diff_max": np.abs(p - q).max(),
        "rollout_probs_diff_std": np.abs(p - q).std(ddof=1),
        "rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        "rollout_kl_k1": (theirs - ours).mean(),
        "rollout_kl_k3": (r - np.log(r) - 1).mean(),
        "rollout_ratio_mean": r.mean(),
        "rollout_ratio_min": r.min(),
        "rollout_ratio_max": r.max(),
        "rollout_eff_sample_size": 1 / (weights**2).mean(),
        "token_mult_prob_error": np.exp(np.abs(ours - theirs)).mean(),
        "rollout_tokens_not_finite": 0.0,
    }


@given(
    st.integers(2, 300),
    st.integers(0, 10**6),
    st.sampled_from([1e-6, 0.05, 1.0]),
    st.lists(st.integers(0, 300), max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_equals_numpy_on_pooled_tokens_however_they_are_cut(count, seed, noise, cuts):
    trainer, rollout = tokens(count, seed, noise)
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    sums = MismatchSums()
    for start, stop in pairwise(bounds):
        sums += mismatch_sums(trainer[start:stop], rollout[start:stop])
    expected = with_numpy(trainer, rollout)
    assert sums.metrics().keys() == expected.keys()
    for name, value in sums.metrics().items():
        # float64 sums against NumPy's own order of summing; k3 of tiny noise is a difference of near-equal numbers there.
        assert value == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def check_ranks(world) -> dict[str, float]:
    trainer, rollout = tokens(101, 7)
    cut = slice(0, 90) if world.rank == 0 else slice(90, 90) if world.rank == 1 else slice(90, 101)
    return mismatch_over_ranks(mismatch_sums(trainer[cut], rollout[cut]), world).metrics()


def test_ranks_add_up_and_one_may_have_no_token():
    expected = with_numpy(*tokens(101, 7))
    for metrics in run_ranks(3, check_ranks):
        assert metrics == pytest.approx(expected, rel=1e-9)


def test_tokens_that_are_not_finite_are_counted_and_enter_nothing():
    trainer, rollout = tokens(50, 3)
    dirty = torch.cat([trainer, torch.tensor([float("nan"), -1.0, -2.0])])
    other = torch.cat([rollout, torch.tensor([-1.0, float("-inf"), float("nan")])])
    metrics = mismatch_sums(dirty, other).metrics()
    assert metrics.pop("rollout_tokens_not_finite") == 3
    clean = mismatch_sums(trainer, rollout).metrics()
    assert metrics == {name: value for name, value in clean.items() if name != "rollout_tokens_not_finite"}
    with pytest.raises(EngineMismatch, match="rollout_tokens_not_finite is 3"):
        check_metrics(mismatch_sums(dirty, other).metrics(), dtype="bfloat16", dropout=0.0, step=1)


def test_no_token_one_token_and_constant_probabilities():
    none = torch.empty(0)
    assert mismatch_sums(none, none).metrics() == {"rollout_tokens_not_finite": 0.0}
    one = mismatch_sums(torch.tensor([-1.0]), torch.tensor([-1.0])).metrics()
    assert one["rollout_probs_diff_std"] == 0 and one["rollout_ratio_mean"] == 1
    assert "rollout_actor_probs_pearson_corr" not in one
    same = torch.full((1000,), -0.7)
    assert "rollout_actor_probs_pearson_corr" not in mismatch_sums(same, same).metrics()
    with pytest.raises(ValueError, match="equal length"):
        mismatch_sums(same, same[:3])


def test_one_token_cannot_make_a_metric_infinite():
    metrics = mismatch_sums(torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, -1.0])).metrics()
    assert all(np.isfinite(value) for value in metrics.values())


def test_raw_logprobs_at_half_the_temperature_and_b74s_numbers():
    # CASES B74: logits [2, 1, 0], T = 0.5: -0.142932 processed, -0.407606 raw.
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    processed, raw = (torch.log_softmax(logits / t, 0)[0] for t in (0.5, 1.0))
    assert float(processed) == pytest.approx(-0.142932, abs=1e-6) and float(raw) == pytest.approx(-0.407606, abs=1e-6)
    metrics = mismatch_sums(processed[None], raw[None]).metrics()
    assert metrics["rollout_ratio_mean"] == pytest.approx(math.exp(0.407606 - 0.142932), abs=1e-5)
    with pytest.raises(EngineMismatch, match="temperature"):
        check_metrics(metrics, dtype="bfloat16", dropout=0.0, step=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alarms_stop_warn_and_keep_quiet(dtype, caplog):
    assert check_metrics(HEALTHY, dtype=dtype, dropout=0.0, step=1) == []
    (said,) = check_metrics(
        {**HEALTHY, "token_mult_prob_error": 1.051 if dtype == "bfloat16" else 1.03}, dtype=dtype, dropout=0.0, step=2
    )
    assert "step 2: token_mult_prob_error is 1.0" in said and said in caplog.text
    (said,) = check_metrics({**HEALTHY, "rollout_actor_probs_pearson_corr": 0.9}, dtype=dtype, dropout=0.0, step=2)
    assert "below" in said
    broken = {**HEALTHY, "rollout_probs_diff_mean": float("nan")}
    with pytest.raises(EngineMismatch, match="rollout_probs_diff_mean is nan"):
        check_metrics(broken, dtype=dtype, dropout=0.0, step=2)
    assert check_metrics(broken, dtype=dtype, dropout=0.1, step=2) == []


def test_alarms_can_be_changed():
    low = {**HEALTHY, "rollout_actor_probs_pearson_corr": 0.98}
    with pytest.raises(EngineMismatch, match=r"pearson_corr is 0.98, below 0.99"):
        check_metrics(
            low,
            dtype="bfloat16",
            dropout=0.0,
            step=1,
            changed={"rollout_actor_probs_pearson_corr": Alarm(None, 0.99, "below")},
        )
    quiet = {"rollout_actor_probs_pearson_corr": Alarm(None, None, "below")}
    assert check_metrics(low, dtype="bfloat16", dropout=0.0, step=1, changed=quiet) == []
