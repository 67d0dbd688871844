"""What is compared, as data: for each definition ours and theirs, and, where they differ, by intent, why.

A row without a reason must agree to `TOLERANCE`; a row with one must not (a reason that no longer holds is an error too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import parity_trl as trl
import parity_verl as verl
from parity_batch import Batch, Result
from parity_ours import (
    Run,
    distributions,
    gradients_alone,
    likeliest,
    our_advantages,
    our_gae,
    our_kl,
    our_loss,
    our_reverse_kl,
    our_value_loss,
    our_weights,
)
from trl import RLOOTrainer

from lockstep.train.corrections import Correction
from lockstep.train.distill import reverse_kl_topk
from lockstep.train.losses import CISPO, GSPO, Clip, KLTerm


@dataclass(frozen=True)
class Row:
    peer: str
    what: str
    ours: Run
    theirs: Run
    why: str = ""
    """Empty: they agree."""


ALONE = (0, 0, 0, 1, 1, 2)
"""Groups, the last of which has one sample."""
TIS, SEQ_TIS = Correction("token", "truncate", high=2.0), Correction("sequence", "truncate", high=2.0)
ICEPOP, MIS = Correction("token", "mask", low=0.5, high=1.5), Correction("sequence", "mask", high=3.0)
DUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}


def verl_advantage_rows() -> list[Row]:
    rows = [
        Row("verl", "GRPO", our_advantages("grpo"), lambda b: verl.advantages(b, "grpo")),
        Row("verl", "GRPO, groups as tensors", our_advantages("grpo"), lambda b: verl.advantages(b, "grpo_vectorized")),
        Row(
            "verl",
            "GRPO without std (Dr.GRPO)",
            our_advantages("dr_grpo"),
            lambda b: verl.advantages(b, "grpo", norm_adv_by_std_in_grpo=False),
        ),
        Row("verl", "RLOO", our_advantages("rloo"), lambda b: verl.advantages(b, "rloo")),
        Row("verl", "REINFORCE++", our_advantages("reinforce_pp"), verl.reinforce_pp),
        Row(
            "verl",
            "REINFORCE++-baseline",
            our_advantages("reinforce_pp_baseline"),
            lambda b: verl.advantages(b, "reinforce_plus_plus_baseline"),
        ),
        Row("verl", "GAE, returns", our_gae(whiten=False), lambda b: verl.gae(b, 0.9, 0.8)[1]),
        Row("verl", "GAE, whitened advantages", our_gae(whiten=True), lambda b: verl.gae(b, 0.9, 0.8)[0]),
    ]
    why = "a group of one: 0 here (nothing to compare); verl takes mean 0 and std 1, so the raw reward is the advantage"
    rows += [
        Row(
            "verl",
            f"{name}, a group of one",
            our_advantages(algorithm, groups=ALONE),
            lambda b, name=verl_name: verl.advantages(b, name, groups=ALONE),
            why,
        )
        for name, algorithm, verl_name in (("GRPO", "grpo", "grpo"), ("RLOO", "rloo", "rloo"))
    ]
    rows.append(
        Row(
            "verl",
            "RLOO as tensors, a group of one",
            our_advantages("rloo", groups=ALONE),
            lambda b: verl.advantages(b, "rloo_vectorized", groups=ALONE),
        )
    )
    return rows


def verl_loss_rows() -> list[Row]:
    rows = [
        Row(
            "verl",
            f"PPO clip 0.2/0.28, dual 1.5, {how}",
            our_loss(Clip(0.2, 0.28, dual=1.5), how),
            lambda b, how=how: verl.policy_loss(b, "vanilla", how, **DUAL),
        )
        for how in verl.MODES
    ]
    small = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
    rows += [
        Row(
            "verl",
            f"GSPO-token, {how}",
            our_loss(GSPO(0.03, 0.04, gradient="token"), how),
            lambda b, how=how: verl.policy_loss(b, "gspo", how, **small),
        )
        for how in ("seq_mean_token_mean", "token_mean")
    ]
    rows.append(
        Row(
            "verl",
            "GSPO, sequence gradient",
            our_loss(GSPO(0.03, 0.04), "seq_mean_token_mean"),
            lambda b: verl.policy_loss(b, "gspo", "seq_mean_token_mean", **small),
        )
    )
    rows.append(
        Row(
            "verl",
            "CISPO 0.2/0.28",
            our_loss(CISPO(0.2, 0.28), "token_mean"),
            lambda b: verl.policy_loss(b, "cispo", "token_mean", clip_ratio_low=0.2, clip_ratio_high=0.28),
        )
    )
    rows.append(
        Row(
            "verl",
            "PPO clip times token TIS",
            our_loss(Clip(0.2, 0.28, dual=1.5), "token_mean", rules=(TIS,)),
            lambda b: verl.policy_loss(
                b, "vanilla", "token_mean", weights=b.padded(verl.weights(b, "token", 2.0).value), **DUAL
            ),
        )
    )
    rows.append(Row("verl", "value loss, clip 0.5", our_value_loss, lambda b: verl.value_loss(b, 0.5)))
    return rows


def verl_other_rows() -> list[Row]:
    rows = [
        Row("verl", f"KL in the loss, {theirs}", our_kl(ours), lambda b, name=theirs: verl.kl(b, name), why)
        for ours, theirs, why in (
            ("k2", "k2", ""),
            ("k3", "k3", ""),
            ("k3_k2", "k3+", ""),
            ("k1", "k1", "k1's own gradient is 0 in expectation; here it is weighted by p/sg(p), so it is the KL's"),
            ("k1", "k1+", "right on average both; verl takes k2's gradient x dlogp, weighting gives (1 + x) dlogp"),
        )
    ]
    rows += [
        Row("verl", "token TIS 2", our_weights(TIS), lambda b: verl.weights(b, "token", 2.0)),
        Row("verl", "sequence TIS 2", our_weights(SEQ_TIS), lambda b: verl.weights(b, "sequence", 2.0)),
        Row("verl", "IcePop 0.5-1.5", our_weights(ICEPOP), lambda b: verl.weights(b, "token", "0.5_1.5")),
    ]
    for level, name in (("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        rule = Correction(level, "reject", low=1 / 1.3, high=1 / 0.7)
        mirrored = Correction(level, "reject", low=0.7, high=1.3)
        why = "verl bounds p_rollout/p_old, here it is p_old/p_rollout: the same numbers keep other samples"
        rows.append(
            Row(
                "verl",
                f"reject by {name}, bounds inverted",
                our_weights(rule),
                lambda b, name=name: verl.kept(b, name, "0.7_1.3"),
            )
        )
        rows.append(
            Row(
                "verl",
                f"reject by {name}, bounds as they stand",
                our_weights(mirrored),
                lambda b, name=name: verl.kept(b, name, "0.7_1.3"),
                why,
            )
        )
    student, teacher = likeliest()
    rows.append(
        Row(
            "verl",
            "top-k KL terms, tail dropped",
            lambda _: Result(reverse_kl_topk(student, teacher, tail="drop")),
            lambda _: Result(verl.topk_kl(student, teacher)),
        )
    )
    rows.append(
        Row(
            "verl",
            "top-k distillation loss",
            lambda _: Result(reverse_kl_topk(student, teacher)),
            lambda _: Result(verl.topk_kl(teacher, student)),
            "verl's top-k loss is the forward KL over the teacher's K tokens; here the reverse KL with the rest as one bucket",
        )
    )
    return rows


def trl_advantage_rows() -> list[Row]:
    return [
        Row("TRL", "GRPO", our_advantages("grpo", eps=1e-4, per_token=False), trl.advantages),
        Row(
            "TRL",
            "GRPO, scale_rewards=batch",
            our_advantages("grpo_batch_std", eps=1e-4, per_token=False),
            lambda b: trl.advantages(b, scale_rewards="batch"),
        ),
        Row(
            "TRL",
            "GRPO, scale_rewards=none (Dr.GRPO)",
            our_advantages("dr_grpo", per_token=False),
            lambda b: trl.advantages(b, scale_rewards="none"),
        ),
        Row("TRL", "RLOO", our_advantages("rloo", per_token=False), lambda b: trl.advantages(b, RLOOTrainer)),
        Row(
            "TRL",
            "GRPO, both at their defaults",
            our_advantages("grpo", per_token=False),
            trl.advantages,
            "eps: 1e-6 here and in verl, 1e-4 in TRL",
        ),
    ]


def trl_loss_rows() -> list[Row]:
    clip = Clip(0.2, 0.28)
    per_type = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "seq_mean_token_mean", "dr_grpo": "constant_length"}
    rows = [
        Row("TRL", f"loss_type={name}", our_loss(clip, how), lambda b, name=name: trl.grpo_loss(b, loss_type=name))
        for name, how in per_type.items()
    ]
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
    kl = {"loss_type": "dapo", "beta": 0.1}
    rows += [
        Row(
            "TRL",
            "delta=1.5 (dual clip)",
            our_loss(Clip(0.2, 0.28, dual=1.5), "token_mean"),
            lambda b: trl.grpo_loss(b, delta=1.5),
        ),
        Row(
            "TRL",
            "cispo, epsilon_high=1.28",
            our_loss(CISPO(1.0, 0.28), "token_mean"),
            lambda b: trl.grpo_loss(b, loss_type="cispo", epsilon_high=1.28),
        ),
        Row(
            "TRL",
            "GSPO: grpo, sequence level",
            our_loss(GSPO(0.03, 0.04), "seq_mean_token_mean"),
            lambda b: trl.grpo_loss(b, loss_type="grpo", **sequence),
        ),
        Row(
            "TRL",
            "luspo, sequence level",
            our_loss(GSPO(0.03, 0.04), "seq_mean_token_sum"),
            lambda b: trl.grpo_loss(b, loss_type="luspo", **sequence),
        ),
        Row(
            "TRL",
            "KL in the loss, beta=0.1",
            our_loss(clip, "token_mean", kl=KLTerm("k3", 0.1)),
            lambda b: trl.grpo_loss(b, **kl),
        ),
        Row(
            "TRL",
            "the same, use_bias_correction_kl",
            our_loss(clip, "token_mean", kl=KLTerm("k3_weighted", 0.1)),
            lambda b: trl.grpo_loss(b, use_bias_correction_kl=True, **kl),
        ),
        Row(
            "TRL",
            "entropy bonus, dapo",
            our_loss(clip, "token_mean", entropy_coef=0.1),
            lambda b: trl.grpo_loss(b, entropy_coef=0.1),
        ),
        Row(
            "TRL",
            "entropy bonus, grpo",
            our_loss(clip, "seq_mean_token_mean", entropy_coef=0.1),
            lambda b: trl.grpo_loss(b, loss_type="grpo", entropy_coef=0.1),
            "the bonus is a token mean in TRL whatever the loss; here it is aggregated as the loss is",
        ),
        Row(
            "TRL",
            "RLOO loss, one update per rollout: gradient",
            gradients_alone(our_loss(clip, "seq_mean_token_sum", on_policy=True)),
            gradients_alone(lambda b: trl.rloo_loss(b, on_policy=True)),
        ),
        Row(
            "TRL",
            "distillation at its default, reverse KL",
            lambda _: our_reverse_kl(*distributions()),
            lambda _: trl.reverse_kl(*distributions()),
        ),
        Row(
            "TRL",
            "RLOO loss, one update per rollout: value",
            our_loss(clip, "seq_mean_token_sum", on_policy=True),
            lambda b: trl.rloo_loss(b, on_policy=True),
            "TRL sums -A over samples (one ratio for a whole sample), here over tokens; the gradients agree, see above",
        ),
        Row(
            "TRL",
            "RLOO loss, off-policy",
            our_loss(clip, "seq_mean_token_sum"),
            lambda b: trl.rloo_loss(b, on_policy=False),
            "TRL clips the product of a sample's token ratios, here each token's",
        ),
    ]
    return rows


def trl_weight_rows() -> list[Row]:
    modes = {
        "token_truncate": (Correction("token", "truncate", low=0.5, high=1.5), 0.5, 1.5),
        "token_mask": (ICEPOP, 0.5, 1.5),
        "sequence_truncate": (SEQ_TIS, None, 2.0),
        "sequence_mask": (MIS, None, 3.0),
    }
    rows = [
        Row(
            "TRL",
            f"vLLM correction, {mode}",
            our_weights(rule),
            lambda b, mode=mode, low=low, high=high: trl.weights(b, mode, low=low, high=high),
        )
        for mode, (rule, low, high) in modes.items()
    ]

    def theirs(batch: Batch, **settings: Any) -> Result:
        weights = trl.weights(batch, "sequence_mask", low=None, high=1.5).value
        return trl.grpo_loss(batch, weights=batch.padded(weights), **settings)

    rule = Correction("sequence", "mask", high=1.5)
    rows.append(
        Row("TRL", "dapo times sequence_mask 1.5", our_loss(Clip(0.2, 0.28), "token_mean", rules=(rule,)), theirs)
    )
    rows.append(
        Row(
            "TRL",
            "the same with a KL, beta=0.1",
            our_loss(Clip(0.2, 0.28), "token_mean", rules=(rule,), kl=KLTerm("k3", 0.1)),
            lambda b: theirs(b, beta=0.1),
            "a sample left out is left out whole here; in TRL its KL still counts",
        )
    )
    return rows


def all_rows() -> list[Row]:
    return [
        *verl_advantage_rows(),
        *verl_loss_rows(),
        *verl_other_rows(),
        *trl_advantage_rows(),
        *trl_loss_rows(),
        *trl_weight_rows(),
    ]
