"""What comes and goes in a step, counted on a few rows or on meta, is what the same code makes of real tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from helpers_models import tiny_qwen3_moe
from helpers_train import PLAIN, Unsharded, adapt, make_actor, make_items
from lockstep.config import TrainConfig, build_config
from lockstep.data.packing import pack
from lockstep.known_warnings import while_recomputing
from lockstep.plan_activations import META, cache_bytes, longest_batch, longest_sample, measure_activations
from lockstep.plan_peaks import LiveBytes, measure_logits, measure_step
from lockstep.plan_run import RunModels
from lockstep.rollout.hf_cache import new_cache
from lockstep.rollout.hf_decode import LastLogits
from lockstep.testing import tiny_llama
from lockstep.train.distill import Distillation
from lockstep.train.logprobs import forward_with_head, head_of, token_logprobs
from lockstep.train.optim import Optimizer
from lockstep.types import Sampling, TrainItem

VOCABULARY = 2048
SCORING: list[dict[str, Any]] = [
    {},
    {"sampling": Sampling(temperature=0.7, top_p=0.9)},
    {"entropy_gradient": True},
    {"chunk_tokens": 16},
    {"chunk_tokens": 16, "sampling": Sampling(temperature=0.7, top_k=5), "entropy_gradient": True},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("how", SCORING, ids=str)
def test_chunks_of_logits_are_as_many_as_measured_on_a_few_rows(how):
    told = {"sampling": PLAIN, "entropy_gradient": False, "chunk_tokens": 1024, "dtype": torch.float32, **how}
    model = adapt(tiny_llama(vocab_size=VOCABULARY)).to(told["dtype"])
    (batch,) = pack(make_items(3, 4, vocab=VOCABULARY), mode="packed", max_tokens=8192, pad_id=0)
    rows = min(told["chunk_tokens"], batch.num_tokens)
    scoring = {key: value for key, value in told.items() if key != "dtype"}
    with LiveBytes(model.parameters(), at_least=rows * VOCABULARY) as live:
        scored = token_logprobs(model, batch, with_entropy=True, **scoring)
        (scored.logprobs.sum() + (scored.entropy.sum() if told["entropy_gradient"] else 0)).backward()
    measured = measure_logits(num_tokens=batch.num_tokens, vocabulary=VOCABULARY, distillation=None, **told)
    assert measured.rows == rows
    # A nucleus is looked for among as many sorted tokens as it takes: of random weights, and of the measurement's equal ones, all.
    assert measured.nbytes == live.peak
    assert 3 <= measured.num_live <= 8


def test_a_teachers_whole_vocabulary_takes_chunks_of_its_own():
    how: dict[str, Any] = {
        "num_tokens": 100,
        "chunk_tokens": 1024,
        "vocabulary": VOCABULARY,
        "dtype": torch.float32,
        "sampling": PLAIN,
        "entropy_gradient": False,
    }
    plain, whole, top, sampled = (
        measure_logits(**how, distillation=kind and Distillation(1.0, kind)).num_live
        for kind in (None, "whole", "top_k", "sampled")
    )
    assert whole >= plain + 1 and plain == sampled <= top


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,)], ids=str)
def test_a_step_makes_as_much_as_measured_on_a_few_elements(dtypes):
    params = [torch.nn.Parameter(torch.randn(numel).to(dtypes[0])) for numel in (50, 300, 4000)]
    optimizer = Optimizer([(str(place), each) for place, each in enumerate(params)], train=TrainConfig(), num_steps=2)
    optimizer.step(0.1)
    known = [
        *params,
        *(each.grad for each in params),
        *(slot for each in params for slot in optimizer.torch.state[each].values()),
    ]
    with LiveBytes(known, at_least=50) as live:
        optimizer.step(0.1)
    assert live.peak == round(measure_step(dtypes, train=TrainConfig()) * 4350)


def tiny_qwen3(**options: Any) -> Any:
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **options)).eval()


def tiny_gpt2(**options: Any) -> Any:
    quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **quiet, **options)
    ).eval()


PASSES = [
    (tiny_llama, "sdpa", "shared_prefix", False, torch.float32),
    (tiny_llama, "sdpa", "shared_prefix", True, torch.float32),
    (tiny_llama, "sdpa", "packed", True, torch.bfloat16),
    (tiny_llama, "eager", "padded", False, torch.bfloat16),
    (tiny_qwen3, "sdpa", "padded", True, torch.float32),
    (tiny_qwen3, "eager", "packed", True, torch.float32),
    (tiny_gpt2, "sdpa", "shared_prefix", False, torch.float32),
]


# The name that every transformers >= 5.0 has; the newer one came during 5.x.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(("make", "attention", "mode", "recomputes", "dtype"), PASSES, ids=str)
def test_activations_on_meta_are_those_of_a_real_pass(make, attention, mode, recomputes, dtype):
    (batch,) = pack(make_items(4, 4), mode=mode, max_tokens=8192, pad_id=0)
    model = adapt(make(attn_implementation=attention)).to(dtype).train()
    if recomputes:
        with while_recomputing():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):  # whatever is made once, at first use, is there the second time
        model.zero_grad()
        index = [
            batch.input_ids,
            batch.position_ids,
            batch.block_ids,
            batch.branch_ids,
            batch.predictors,
            batch.targets,
        ]
        with LiveBytes([*model.parameters(), *model.buffers(), *index]) as live:
            rows = forward_with_head(model, head_of(model), batch, lambda rows_ND: rows_ND)
            saved = live.now
            rows.sum().backward()
    found = measure_activations(
        model, head_of(model), replace(batch, mode="shared_prefix").to(META), with_gradient=True, recomputes=recomputes
    )
    assert (found.saved, found.peak, found.refused) == (saved, live.peak, "")


def test_without_a_gradient_little_is_left_and_a_model_that_looks_at_values_says_so():
    (batch,) = pack(make_items(4, 4), mode="shared_prefix", max_tokens=8192, pad_id=0)
    model = tiny_llama()
    trained = measure_activations(model, head_of(model), batch.to(META), with_gradient=True)
    frozen = measure_activations(model, head_of(model), batch.to(META), with_gradient=False)
    assert frozen.saved < 0.1 * trained.saved and frozen.peak < 0.5 * trained.peak
    experts = tiny_qwen3_moe(experts_implementation="eager")
    told = measure_activations(experts, head_of(experts), batch.to(META), with_gradient=True)
    assert told.peak == 0 and "Qwen3Moe" in told.refused and "cannot be run without values" in told.refused


def config_of(**sections: Any) -> Any:
    tree = {"model": {"path": "none"}, "data": {"train": {"task": "sums"}, "prompt": {"max_tokens": 20}}}
    tree |= {
        "reward": [{"name": "last_number"}],
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 5},
    }
    return build_config(tree | sections)


def test_the_longest_micro_batch_is_a_full_one_or_all_of_a_ranks_samples():
    model = tiny_llama()
    # Three groups: a prompt of 20 and four completions, whose last token predicts nothing.
    assert longest_batch(config_of(), model, 2).padded_tokens == 3 * (20 + 4 * 4)
    # Of 24 rows of 25 tokens a micro-batch of 110 takes four; however they are cut, the largest is told.
    for size, rows in ((110, 4), (60, 2)):
        how = {"micro_batch_tokens": size, "packing": "padded"}
        assert longest_batch(config_of(train=how), model, 1).padded_tokens == rows * 25
    short = longest_batch(config_of(train={"micro_batch_tokens": 60, "packing": "padded"}), model, 2)
    assert short.padded_tokens == 2 * 25 and short.input_ids.is_meta


def test_the_longest_sample_ends_where_the_recipe_or_the_model_ends_it():
    model = tiny_llama(max_position_embeddings=256)
    talk = {"name": "calculator", "max_turns": 3, "max_observation_tokens": 7}
    told = [
        (config_of(), (20, 5)),
        (config_of(environment=talk), (20, 3 * 5 + 2 * 7)),  # nothing stands behind the last reply
        (config_of(environment={**talk, "max_tokens": 40}), (20, 20)),
        (config_of(environment={**talk, "max_tokens": 22}), (20, 5)),  # the first reply is sampled all the same
        (config_of(environment={**talk, "max_turns": 90}), (20, 236)),
        (config_of(data={"train": {"task": "sums"}, "prompt": {"max_tokens": 1024}}), (251, 5)),
    ]
    assert [longest_sample(config, model) for config, _ in told] == [expected for _, expected in told]


def test_the_cache_is_the_engines_own_for_as_many_tokens_as_it_may_hold():
    engine, cache, ids = tiny_llama(), new_cache(7), torch.ones(1, 7, dtype=torch.long)
    with torch.no_grad():
        LastLogits(engine)(ids, ids, torch.arange(7)[None], cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    for limit, tokens in ((65536, 3 * 4 * 25), (100, 100)):
        rollout = {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 5, "batch_tokens": limit}
        run = RunModels(config_of(rollout=rollout), (), engine, ())
        assert cache_bytes(run, 2) == tokens * held // 7


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_a_whole_update_takes_what_is_told(recomputes):
    """Of one rank without FSDP: activations, gradients, logits and the optimizer's first step."""
    model = adapt(tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=4))
    if recomputes:
        with while_recomputing():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    items = [TrainItem((5,) * 20, tuple(range(3, 8)), (-7.0,) * 5, 1.0 - 2 * (i % 2), i // 4) for i in range(24)]
    config = config_of(train={"packing": "shared_prefix"})
    actor = make_actor(Unsharded(model), packing="shared_prefix")
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        actor.update(items, step=0)
    batch = longest_batch(config, model, 1)
    logits = measure_logits(
        num_tokens=batch.num_tokens,
        chunk_tokens=1024,
        vocabulary=VOCABULARY,
        dtype=torch.float32,
        sampling=PLAIN,
        entropy_gradient=False,
        distillation=None,
    )
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    found = measure_activations(model, head_of(model), batch, with_gradient=True, recomputes=recomputes)
    told = trained + max(found.saved + logits.nbytes, found.peak)
    # Token ids, masks and the loss's numbers per token are not told: eight bytes here and there against kilobytes of each token.
    assert 0.95 * told < live.peak < 1.01 * told, (live.peak, told, found, logits)
