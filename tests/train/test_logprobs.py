"""Log-probabilities of completion tokens: equal in every layout, under the sampling distribution, in bounded memory."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    RecurrentGemmaConfig,
)

from helpers_train import PLAIN, adapt, item, largest_gap, make_items, whole_gradients
from lockstep.data.packing import MicroBatch, dummy_micro_batch, pack
from lockstep.errors import LockstepError, ModelError
from lockstep.sampling import sampling_logprobs
from lockstep.testing import tiny_llama
from lockstep.train.logprobs import probe_packing, token_logprobs
from lockstep.types import Sampling, TrainItem

MODES = ("padded", "packed", "shared_prefix")
# fp32 sums taken in another order: logits of these models are of order 1 and carry about 1e-7 each, over two layers.
EXACT_ARITHMETIC = 1e-5


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def one_batch(items: list[TrainItem], mode: str, *, pad_id: int = 0) -> MicroBatch:
    (batch,) = pack(items, mode=mode, max_tokens=8192, pad_id=pad_id)
    return batch


def one_by_one(model: nn.Module, items: list[TrainItem], temperature: float = 1.0) -> Tensor:
    """The definition: every item alone, unpadded, whole logits, plain log-softmax."""
    out = []
    for each in items:
        ids = torch.tensor([[*each.prompt_ids, *each.ids]])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
        first = len(each.prompt_ids) - 1
        out += [logprobs[first + k, token] for k, token in enumerate(each.ids)]
    return torch.stack(out)


def weighted_gradients(module: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    """Gradients of a sum in which every token counts differently."""
    module.zero_grad()
    (logprobs * torch.linspace(-1, 1, logprobs.numel())).sum().backward()
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return whole_gradients(SimpleNamespace(trainable=lambda: trainable))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_every_layout_gives_the_logprobs_and_gradients_of_the_items_alone(build, attention):
    model = build()
    model.set_attn_implementation(attention)
    model = adapt(model, fan_in_fan_out=build is tiny_gpt2)  # GPT-2's Conv1D stores [in, out]
    items = [*make_items(3, 3, seed=1, longest=6), item(range(50), [1, 2, 3], group=9)]
    expected = one_by_one(model, items)
    gradients = weighted_gradients(model, expected)
    assert max(float(g.abs().max()) for g in gradients.values()) > 0.1
    for mode in MODES:
        batch = one_batch(items, mode)
        assert (batch.block_ids.max() > 0) == (mode != "padded")  # some rows do hold several blocks
        assert (batch.branch_ids.max() > 1) == (mode == "shared_prefix")
        scored = token_logprobs(model, batch, sampling=PLAIN)
        torch.testing.assert_close(scored.logprobs, expected, atol=EXACT_ARITHMETIC, rtol=0)
        assert largest_gap(weighted_gradients(model, scored.logprobs), gradients) < EXACT_ARITHMETIC


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_padding_on_either_side_changes_nothing(build):  # B79
    model = build()
    ids, prompt = [5, 6, 7, 8], 1
    expected = one_by_one(model, [item(ids[:prompt], ids[prompt:])])
    company = item([9] * 4, [1, 2, 3], group=1)
    for mode in MODES:
        logprobs = token_logprobs(model, one_batch([item(ids[:prompt], ids[prompt:]), company], mode), sampling=PLAIN)
        torch.testing.assert_close(logprobs.logprobs[:3], expected, atol=EXACT_ARITHMETIC, rtol=0)
    right = one_batch([item(ids[:prompt], ids[prompt:])], "padded")
    left = MicroBatch(
        "padded",
        torch.tensor([[0, 0, *ids]]),
        torch.tensor([[0, 0, 0, 1, 2, 3]]),
        torch.tensor([[-1, -1, 0, 0, 0, 0]]),
        torch.zeros(1, 6, dtype=torch.int64),
        right.items,
        right.predictors + 2,
        right.targets,
        right.item_ids,
    )
    logprobs = token_logprobs(model, left, sampling=PLAIN).logprobs
    torch.testing.assert_close(logprobs, expected, atol=EXACT_ARITHMETIC, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_in_padding_is_irrelevant(mode):
    model = tiny_llama()
    items = [item([1, 2, 3], [4, 5, 6, 7]), item([8, 9], [10], group=1)]
    plain = token_logprobs(model, one_batch(items, mode), sampling=PLAIN).logprobs
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = 1e4
    garbage = one_batch(items, mode, pad_id=63)
    assert (garbage.input_ids == 63).any()
    assert torch.equal(token_logprobs(model, garbage, sampling=PLAIN).logprobs, plain)


def test_nan_at_positions_that_predict_nothing_reaches_neither_values_nor_gradients():  # B92
    model = adapt(tiny_llama())
    batch = one_batch(make_items(2, 2), "padded")
    clean = token_logprobs(model, batch, sampling=PLAIN).logprobs
    gradients = weighted_gradients(model, clean)
    predicts = torch.zeros(batch.padded_tokens, dtype=torch.bool)
    predicts[batch.predictors] = True
    predicts = predicts.view_as(batch.input_ids)[..., None]
    norm = model.get_base_model().model.norm
    hook = norm.register_forward_hook(lambda _m, _i, hidden: torch.where(predicts, hidden, torch.nan))
    dirty = token_logprobs(model, batch, sampling=PLAIN).logprobs
    assert torch.equal(dirty, clean)
    assert largest_gap(weighted_gradients(model, dirty), gradients) == 0
    hook.remove()


class Table(nn.Module):
    """A causal LM whose logits at each position are given: hidden states are the logits, the head is the identity."""

    def __init__(self, logits_BTV: Tensor):
        super().__init__()
        size = logits_BTV.shape[-1]
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation="sdpa"))
        self.logits_BTV = nn.Parameter(logits_BTV)
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight = nn.Parameter(torch.eye(size), requires_grad=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.logits_BTV))


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.5, -0.142932), (1, -0.407606), (1.0, -0.407606), (0, -0.407606)]
)
def test_logits_are_divided_by_the_temperature(temperature, expected):  # B74; greedy (0) is scored at temperature 1
    model = Table(torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]))
    logprobs = token_logprobs(
        model, one_batch([item([1], [0])], "padded"), sampling=Sampling(temperature=temperature)
    ).logprobs
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)  # the expected values have six decimals


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_temperature_reaches_every_layout(temperature):
    model, items = tiny_llama(), make_items(2, 3)
    expected = one_by_one(model, items, temperature)
    for mode in MODES:
        sampling = Sampling(temperature=temperature)
        logprobs = token_logprobs(model, one_batch(items, mode), sampling=sampling).logprobs
        torch.testing.assert_close(logprobs, expected, atol=EXACT_ARITHMETIC, rtol=0)


def test_truncated_sampling_is_scored_over_what_it_keeps():  # B76
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    model = Table(logits.expand(1, 3, 4).clone())
    batch = one_batch([item([3], [0, 1])], "padded")
    scored = token_logprobs(model, batch, sampling=Sampling(top_p=0.8), with_entropy=True)
    # 1e-6: probabilities are given to about seven digits in fp32.
    torch.testing.assert_close(scored.logprobs.exp(), torch.tensor([0.625, 0.375]), atol=1e-6, rtol=0)
    entropy = -(0.625 * math.log(0.625) + 0.375 * math.log(0.375))
    torch.testing.assert_close(scored.entropy, torch.full((2,), entropy), atol=1e-6, rtol=0)
    scored.logprobs.sum().backward()
    assert torch.isfinite(model.logits_BTV.grad).all()
    assert model.logits_BTV.grad[0, 0, 2:].abs().max() == 0


def test_a_sampled_token_is_never_outside_the_trainers_mask():  # B76: the last bit of a logit must not make a ratio 0
    model = Table(torch.tensor([[[3.0, 2.0, 1.0, 0.0]] * 2]))
    logprobs = token_logprobs(model, one_batch([item([0], [3])], "padded"), sampling=Sampling(top_k=2)).logprobs
    assert torch.isfinite(logprobs).all()


def test_the_loss_of_two_tokens_reads_positions_2_and_3_only():  # B94
    batch = one_batch([item([5, 6, 7], [1, 2])], "padded")
    model = Table(torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)))
    token_logprobs(model, batch, sampling=PLAIN).logprobs.sum().backward()
    used = model.logits_BTV.grad[0].abs().sum(-1) > 0
    assert used.tolist() == [False, False, True, True, False]


def test_entropy_is_that_of_the_sampling_distribution_and_carries_no_gradient():
    logits = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    batch = one_batch([item([1], [0, 2])], "padded")
    scored = token_logprobs(Table(logits), batch, sampling=Sampling(temperature=2), with_entropy=True)
    p = torch.softmax(torch.tensor([1.0, 0.5, 0.0]), -1)
    expected = torch.tensor([float(-(p * p.log()).sum()), math.log(3)])
    torch.testing.assert_close(scored.entropy, expected, atol=1e-6, rtol=0)  # fp32 rounding of values near 1
    assert not scored.entropy.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 1024])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=2), Sampling(top_p=0.7)])
def test_the_entropys_gradient_is_that_of_the_plain_formula(sampling, chunk_tokens):
    """With tokens that the sampling excludes: they have probability 0, log-probability -inf, and no part in it."""
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0], [0.3, 0.1, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    batch = one_batch([item([1], [0, 1])], "padded")
    how = {"sampling": sampling, "chunk_tokens": chunk_tokens, "with_entropy": True, "entropy_gradient": True}
    table = Table(logits)
    scored = token_logprobs(table, batch, **how)
    scored.entropy.sum().backward()
    by_hand = logits[0, :2].clone().requires_grad_()
    entropy = torch.zeros(())
    for row in by_hand.unbind():
        kept = torch.isfinite(sampling_logprobs(row.detach()[None], sampling)[0])
        logprobs = torch.log_softmax(row[kept] / sampling.temperature, -1)
        entropy = entropy - (logprobs.exp() * logprobs).sum()
    entropy.backward()
    torch.testing.assert_close(table.logits_BTV.grad[0, :2], by_hand.grad, atol=1e-6, rtol=0)
    assert float(by_hand.grad.abs().max()) > 0.01
    with torch.no_grad():
        assert torch.equal(token_logprobs(table, batch, **how).entropy, scored.entropy)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("chunk_tokens", [8, 1024])
def test_logits_of_all_tokens_never_exist_at_once(chunk_tokens):
    vocab = 2048
    model = adapt(tiny_llama(vocab_size=vocab))
    batch = one_batch(make_items(4, 4, vocab=vocab), "shared_prefix")
    model(input_ids=batch.input_ids, use_cache=False)  # outside the count: whatever is made once, at first use
    with Largest() as largest:
        scored = token_logprobs(model, batch, sampling=PLAIN, chunk_tokens=chunk_tokens, with_entropy=True)
        scored.logprobs.sum().backward()
    whole = batch.num_tokens * vocab
    # The head's weight itself, [vocab, 32], is the largest thing that is allowed to pass by.
    assert vocab * 32 < whole
    assert (largest.numel <= vocab * 32) == (chunk_tokens == 8)
    assert (largest.numel >= whole) == (chunk_tokens == 1024)


def test_no_chunk_keeps_its_logits_for_backward():
    vocab = 2048
    model = adapt(tiny_llama(vocab_size=vocab))
    batch = one_batch(make_items(4, 4, vocab=vocab), "shared_prefix")
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor.shape[-1:] == (vocab,) and tensor.shape[0] != 32 else 0)  # not the weight
        return tensor

    totals = []
    for chunk_tokens in (8, 1024):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            token_logprobs(model, batch, sampling=PLAIN, chunk_tokens=chunk_tokens, with_entropy=True)
        totals.append(sum(kept))
    assert totals[0] == 0
    assert totals[1] >= batch.num_tokens * vocab


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
)
def test_chunks_give_the_gradients_of_the_whole_whatever_the_head_is(tied, options):
    model = adapt(tiny_llama(tie_word_embeddings=tied), **options)
    items = make_items(3, 3)
    expected = one_by_one(model, items)
    gradients = weighted_gradients(model, expected)
    for chunk_tokens in (1, 7, 1024):
        scored = token_logprobs(model, one_batch(items, "padded"), sampling=PLAIN, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(scored.logprobs, expected, atol=EXACT_ARITHMETIC, rtol=0)
        assert largest_gap(weighted_gradients(model, scored.logprobs), gradients) < EXACT_ARITHMETIC


def test_the_softmax_is_in_fp32_whatever_the_models_dtype():
    model = tiny_llama().to(torch.bfloat16)
    items = make_items(2, 3)
    logprobs = token_logprobs(model, one_batch(items, "padded"), sampling=PLAIN).logprobs
    assert logprobs.dtype == torch.float32
    # bf16 logits of order 0.1 to 1 are rounded to 2^-9 of themselves, in another order in a batch than alone; a softmax
    # in bf16 would be off by 2^-8 of log(64), i.e. by up to 1.6e-2, on top.
    torch.testing.assert_close(logprobs, one_by_one(model, items), atol=8e-3, rtol=0)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
RECURRENT = SMALL | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (Gemma2Config(**SMALL, final_logit_softcapping=0.05, attn_logit_softcapping=None), "packed"),
        (RecurrentGemmaConfig(**RECURRENT, logits_soft_cap=0.05), "padded"),
    ],
)
def test_logits_that_the_model_caps_behind_its_head_are_capped(config, mode):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    items = make_items(2, 3)
    expected = one_by_one(model, items)
    assert (expected + math.log(64)).abs().max() < 0.1  # so near to uniform only by the cap
    for chunk_tokens in (4, 1024):
        logprobs = token_logprobs(model, one_batch(items, mode), sampling=PLAIN, chunk_tokens=chunk_tokens).logprobs
        torch.testing.assert_close(logprobs, expected, atol=EXACT_ARITHMETIC, rtol=0)


class Scaling(Table):
    def forward(self, **inputs: object) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(**inputs).logits * 0.5)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=-1.0), Sampling(temperature=float("nan")), Sampling(top_p=0.0)]
)
def test_a_sampling_that_cannot_be_is_refused(sampling):
    with pytest.raises(ValueError, match=r"temperature must be|top_p must be"):
        token_logprobs(Table(torch.zeros(1, 2, 4)), one_batch([item([1], [2])], "padded"), sampling=sampling)


def test_an_unknown_change_of_the_logits_is_an_error_and_leaves_no_trace():
    model = Scaling(torch.zeros(1, 2, 4))
    with pytest.raises(LockstepError, match="changed what it returned"):
        token_logprobs(model, one_batch([item([1], [2])], "padded"), sampling=PLAIN)
    assert "forward" not in model.head.__dict__
    assert model(input_ids=None).logits.shape == (1, 2, 4)


def test_an_override_of_the_heads_forward_is_used_and_put_back():
    model = Table(torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]))
    plain = model.head.forward

    def doubled(hidden: Tensor) -> Tensor:
        return 2 * plain(hidden)

    model.head.forward = doubled
    logprobs = token_logprobs(model, one_batch([item([1], [0])], "padded"), sampling=PLAIN).logprobs
    assert logprobs.item() == pytest.approx(-0.142932, abs=1e-6)  # as at temperature 0.5; six decimals given
    assert model.head.__dict__["forward"] is doubled


def test_the_dummy_reaches_every_trainable_parameter_with_a_zero_gradient():  # B34
    model = adapt(tiny_llama())
    scored = token_logprobs(model, dummy_micro_batch(0), sampling=PLAIN, with_entropy=True)
    assert scored.logprobs.shape == scored.entropy.shape == (0,)
    scored.logprobs.sum().backward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in trainable)


def test_flash_attention_is_given_packed_rows_as_one():
    """Flash attention finds packed sequences in a single row only: seen here by what the model is called with."""
    calls = []

    class Recorder(Table):
        def forward(self, **inputs: object) -> SimpleNamespace:
            calls.append(inputs)
            return super().forward(**inputs)

    items = [item([1] * 6, [2, 3]), item([4] * 5, [5])]
    model = Recorder(torch.randn(1, 14, 8, generator=torch.Generator().manual_seed(0)))
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation="flash_attention_2"))
    token_logprobs(model, one_batch(items, "packed"), sampling=PLAIN)
    assert calls[0]["input_ids"].shape == (1, 14)
    assert calls[0]["position_ids"].tolist() == [[*range(7), *range(5), 0, 1]]
    assert calls[0]["attention_mask"] is None


def test_the_probe_tells_models_that_follow_position_ids_from_those_that_do_not():
    llama = adapt(tiny_llama())
    assert isinstance(llama, PeftModel)
    llama.train()
    for mode in MODES:
        probe_packing(llama, mode, sampling=PLAIN, pad_id=0)
    assert llama.training
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, init_std=0.3
    )
    opt = OPTForCausalLM(config).eval()
    probe_packing(opt, "shared_prefix", sampling=PLAIN, pad_id=1)
    with pytest.raises(ModelError, match="packed gives opt other log-probabilities than padded"):
        probe_packing(opt, "packed", sampling=PLAIN, pad_id=1)
