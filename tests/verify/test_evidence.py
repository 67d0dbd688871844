"""The regression against NumPy's, and how often noise alone is taken for a fault."""

import math

import numpy as np
import pytest
import torch

from lockstep.verify.evidence import Evidence, evidence
from lockstep.verify.verdict import Scores, band_of, judge

NAME = "adapter off"


def noise(draw: torch.Generator, count: int) -> torch.Tensor:
    """Heavy-tailed, as rounding of log-probabilities is: its size differs from token to token."""
    return torch.randn(count, generator=draw).double() * torch.randn(count, generator=draw).double().exp()


def test_share_and_its_error_are_least_squares():
    draw = torch.Generator().manual_seed(0)
    trainer = -torch.rand(200, generator=draw).double()
    x = torch.randn(200, generator=draw).double() * 1e-2
    d = 0.3 * x + noise(draw, 200) * 1e-3
    fit = evidence(trainer + d, trainer, trainer + x).fit(0.0)
    xs, ds = x.numpy(), d.numpy()
    share = float(np.linalg.lstsq(xs[:, None], ds, rcond=None)[0][0])
    left = ds - share * xs
    error = math.sqrt((xs**2 * left**2).sum() * 200 / 199) / (xs**2).sum()
    assert (fit.share, fit.error) == pytest.approx((share, error), rel=1e-9)
    assert fit.residual == pytest.approx(float(np.sqrt(((ds - xs) ** 2).mean())), rel=1e-9)


def test_evidence_adds_over_checks():
    draw = torch.Generator().manual_seed(1)
    e, t, h = (torch.randn(90, generator=draw) for _ in range(3))
    parts = evidence(e[:30], t[:30], h[:30]) + evidence(e[30:], t[30:], h[30:])
    assert parts.fit(1e-6).share == pytest.approx(evidence(e, t, h).fit(1e-6).share, rel=1e-9)
    with pytest.raises(ValueError, match="equal lengths"):
        evidence(e, t, h[:5])


def test_nothing_is_said_where_nothing_is_at_stake():
    same = torch.full((20,), -1.0)
    fit = evidence(same + 1e-3, same, same).fit(1e-6)
    assert math.isnan(fit.share) and fit.lead == 0 and not fit.explains_better and not fit.is_ruled_out
    assert Evidence().fit(1e-6).lead == 0


@pytest.mark.parametrize("effect", [0.0, 1e-3, 1e-2, 1e-1])
def test_shared_rounding_noise_is_never_a_lost_update(effect):
    """16 bits: engine, trainer and hypothesis each round on their own, and the trainer's rounding is in both differences."""
    alarms, leads = 0, []
    for seed in range(400):
        draw = torch.Generator().manual_seed(seed)
        truth = -torch.rand(64, generator=draw).double()
        engine, trainer = (truth + noise(draw, 64) * 0.005 for _ in range(2))
        assumed = truth + torch.randn(64, generator=draw).double() * effect + noise(draw, 64) * 0.005
        judged = judge(
            [Scores(engine, trainer, {NAME: assumed})], band=band_of("bfloat16", "bfloat16"), noise=0.02, before={}
        )
        alarms += judged.fault is not None
        leads.append(judged.fits[NAME].lead)
    assert alarms == 0
    if effect >= 0.1:
        assert sorted(leads)[380] < -1.5  # and there it is found less likely in 95% of the checks


def test_checks_together_see_what_one_cannot():
    """An update that never arrives, of the noise's own size: 40 checks of 16 tokens each."""
    sums: dict[str, Evidence] = {}
    faults = []
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        truth = -torch.rand(16, generator=draw).double()
        lost = truth + torch.randn(16, generator=draw).double() * 0.015
        engine, trainer, assumed = (
            each + torch.randn(16, generator=draw).double() * 0.01 for each in (lost, truth, lost)
        )
        judged = judge(
            [Scores(engine, trainer, {NAME: assumed})], band=band_of("bfloat16", "bfloat16"), noise=0.014, before=sums
        )
        sums = judged.sums
        faults.append(judged.fault)
    assert faults[0] is None and "over the checks so far" in (faults[-1] or "")


def test_the_limit_is_calibrated_within_bounds():
    t = torch.full((50,), -1.0)
    for size, noise_before, limit, is_fault in (
        (1e-3, None, 2e-3, False),
        (3e-3, None, 2e-3, True),
        (1e-4, 1e-7, 5e-5, True),
        (4e-4, 1e-4, 5e-4, False),
    ):
        judged = judge([Scores(t + size, t, {})], band=band_of("float32", "float32"), noise=noise_before, before={})
        assert judged.limit == pytest.approx(limit) and (judged.fault is not None) == is_fault
    assert band_of("float32", "bfloat16") == band_of("bfloat16", "bfloat16")
    with pytest.raises(ValueError, match=r"canary\.tolerance"):
        band_of("float32", "int4")
    broken = judge([Scores(t * math.nan, t, {})], band=band_of("float32", "float32"), noise=None, before={})
    assert broken.fault is not None
