"""Distillation in the update: the gradient of the definition, in every layout, without whole logits; what a recipe may ask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from helpers_data import tiny_tokenizer
from helpers_loop import recipe
from helpers_teacher import KINDS, another_model, by_definition, make_teacher
from helpers_train import Unsharded, adapt, largest_gap, make_actor, make_items
from lockstep.config import TeacherConfig, build_config
from lockstep.data.advantages import advantages, uses_groups
from lockstep.data.packing import dummy_micro_batch, pack
from lockstep.errors import ConfigError, ModelError
from lockstep.model.lora import inject_frozen_lora
from lockstep.testing import tiny_llama
from lockstep.train.logprobs import token_logprobs
from lockstep.train.step import UpdateResult
from lockstep.train.teacher import check_same_tokens
from lockstep.types import Sampling, TrainItem

MODES = ("padded", "packed", "shared_prefix")
WARM = Sampling(temperature=0.7, max_new_tokens=16)
# fp32 against float64: logits of order 1 with 1e-7 each over two layers; gradients are of order 0.01 to 1.
SINGLE_PRECISION = 1e-6
REORDERED = 1e-6


def distil(
    items: list[TrainItem], *, sampling: Sampling = WARM, teacher: dict[str, Any] | None = None, **train: Any
) -> tuple[Unsharded, UpdateResult]:
    sharded = Unsharded(adapt(tiny_llama()))
    told = make_teacher(another_model(), sampling, **(teacher or {}))
    actor = make_actor(sharded, sampling=sampling, teacher=told, **{"algorithm": "distill", **train})
    return sharded, actor.update(items, step=0)


def naive(items: list[TrainItem], kind: str, *, temperature: float = 0.7) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of the token mean, and the KL of each token."""
    student, teacher = adapt(tiny_llama()).double(), another_model().double()
    values, losses = by_definition(student, teacher, items, kind=kind, temperature=temperature)
    losses.mean().backward()
    gradients = {name: p.grad.float() for name, p in student.named_parameters() if p.requires_grad}
    return gradients, values.detach()


def without_advantages(items: list[TrainItem]) -> list[TrainItem]:
    return [TrainItem(each.prompt_ids, each.ids, each.rollout_logprobs, 0.0, each.group) for each in items]


ITEMS = without_advantages(make_items(4, 3, seed=2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_the_gradient_of_the_definition_in_every_layout(kind):
    expected, values = naive(ITEMS, kind)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 0.005
    for packing in MODES:
        for micro_batch_tokens in (25, 8192):
            sharded, result = distil(ITEMS, teacher=KINDS[kind], packing=packing, micro_batch_tokens=micro_batch_tokens)
            assert largest_gap(sharded.clipped, expected) < SINGLE_PRECISION
            assert result.stats["distill/kl"].mean == pytest.approx(values.mean().item(), abs=1e-5)
            assert result.stats["distill/kl"].count == values.numel()
            assert result.stats["loss"].mean == pytest.approx(values.mean().item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["whole", "top_k"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1024])
def test_chunks_change_nothing(kind, chunk_tokens):
    student, batch = adapt(tiny_llama()), pack(ITEMS, mode="packed", max_tokens=8192, pad_id=0)[0]
    expected, values = naive(ITEMS, kind)
    with make_teacher(another_model(), WARM, **KINDS[kind]).answering(batch) as answer:
        scored = token_logprobs(student, batch, sampling=WARM, chunk_tokens=chunk_tokens, teacher=answer)
        (scored.taught.divergence.mean() + 0 * scored.logprobs.sum()).backward()
    torch.testing.assert_close(scored.taught.divergence.detach(), values.float(), atol=1e-5, rtol=0)
    found = {name: p.grad for name, p in student.named_parameters() if p.requires_grad}
    assert largest_gap(found, expected) < SINGLE_PRECISION


class Rows(TorchDispatchMode):
    """The most rows of the vocabulary's width that any operation returns."""

    def __init__(self, vocabulary: int, but: int):
        super().__init__()
        self.vocabulary, self.but, self.most = vocabulary, but, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[-1] == self.vocabulary:
                rows = value.numel() // self.vocabulary
                self.most = max(self.most, rows if rows != self.but else 0)  # a weight, transposed
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [8, 1024])
def test_neither_models_logits_exist_for_more_tokens_than_a_chunk(kind, chunk_tokens):
    """[T, V] is never whole, in forward and backward, of the student or of the teacher; and nothing as wide is kept."""
    vocab, hidden = 2048, 32
    items = without_advantages(make_items(6, 4, vocab=vocab))
    (batch,) = pack(items, mode="shared_prefix", max_tokens=8192, pad_id=0)
    assert batch.num_tokens > 64 and batch.num_tokens != hidden
    student = adapt(tiny_llama(vocab_size=vocab))
    teacher = make_teacher(
        another_model(vocab_size=vocab), WARM, vocabulary=vocab, chunk_tokens=chunk_tokens, **KINDS[kind]
    )
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() // vocab if tensor.shape[-1:] == (vocab,) and tensor.shape[0] != hidden else 0)
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with Rows(vocab, but=hidden) as rows, saved, teacher.answering(batch) as answer:
        scored = token_logprobs(student, batch, sampling=WARM, chunk_tokens=chunk_tokens, teacher=answer)
        found = scored.taught.divergence if kind != "sampled" else scored.logprobs
        (found.sum() + 0 * scored.logprobs.sum()).backward()
    assert rows.most == min(chunk_tokens, batch.num_tokens)
    assert (sum(kept) == 0) == (chunk_tokens == 8)


def test_a_teacher_that_is_the_student_teaches_nothing():
    for kind in ("whole", "top_k"):
        sharded = Unsharded(adapt(tiny_llama()))
        teacher = make_teacher(copy.deepcopy(sharded.module), WARM, **KINDS[kind])
        result = make_actor(sharded, sampling=WARM, teacher=teacher, algorithm="distill").update(ITEMS, step=0)
        assert result.stats["distill/kl"].mean == pytest.approx(0, abs=1e-6)
        assert result.grad_norm < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_updates_draw_the_policy_to_the_teacher(kind):
    sharded, told = Unsharded(adapt(another_model(), zero_b=True)), adapt(another_model(), seed=7)
    whole, teacher = make_teacher(told, WARM), make_teacher(told, WARM, **KINDS[kind])
    actor = make_actor(sharded, sampling=WARM, teacher=teacher, algorithm="distill", lr=0.02)
    (batch,) = pack(ITEMS, mode="padded", max_tokens=8192, pad_id=0)

    def distance() -> float:
        with whole.answering(batch) as answer, torch.no_grad():
            return token_logprobs(sharded.module, batch, sampling=WARM, teacher=answer).taught.divergence.mean().item()

    before = distance()
    for step in range(10):
        actor.update(ITEMS, step=step)
    # These tokens are not the policy's own: what they say by themselves is less than what the whole distribution says.
    assert distance() < (0.9 if kind == "sampled" else 0.6) * before


def test_beside_rewards_its_gradient_is_added_with_its_weight():
    items = make_items(3, 3, seed=5)
    plain = Unsharded(adapt(tiny_llama()))
    make_actor(plain, sampling=WARM).update(items, step=0)
    taught, _ = distil(items, algorithm="grpo", teacher={"coef": 0.3})
    alone, _ = distil(without_advantages(items))
    expected = {name: plain.clipped[name] + 0.3 * alone.clipped[name] for name in plain.clipped}
    assert largest_gap(taught.clipped, expected) < REORDERED


def test_what_is_watched():
    _, whole = distil(ITEMS)
    _, top = distil(ITEMS, teacher=KINDS["top_k"])
    _, everything = distil(ITEMS, teacher={"top_k": 999})
    teacher = another_model()
    q = torch.cat(
        [
            torch.log_softmax(
                teacher(input_ids=torch.tensor([[*i.prompt_ids, *i.ids]])).logits[0, len(i.prompt_ids) - 1 : -1] / 0.7,
                -1,
            )
            for i in ITEMS
        ]
    )
    ids = torch.tensor([token for each in ITEMS for token in each.ids])
    sampled = q.gather(1, ids[:, None]).mean().item()
    for result in (whole, top):
        assert result.stats["distill/teacher_logprob"].mean == pytest.approx(sampled, abs=1e-5)
    mass = q.exp().topk(5).values.sum(-1).mean().item()
    assert top.stats["distill/top_k_mass"].mean == pytest.approx(mass, abs=1e-5)
    assert "distill/top_k_mass" not in whole.stats
    # k of the whole vocabulary: only the rest's rounding differs.
    assert everything.stats["distill/kl"].mean == pytest.approx(whole.stats["distill/kl"].mean, abs=1e-5)
    assert 0 < top.stats["distill/kl"].mean < whole.stats["distill/kl"].mean
    assert whole.stats["pg_loss"].mean == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_without_tokens_has_the_same_statistics(kind):
    _, nothing = distil([], teacher=KINDS[kind])
    _, something = distil(ITEMS, teacher=KINDS[kind])
    assert nothing.stats.keys() == something.stats.keys()
    assert nothing.stats["skipped"].mean == 1


def test_a_dummy_is_answered_too():
    for options in KINDS.values():
        with make_teacher(another_model(), WARM, **options).answering(dummy_micro_batch(0)) as answer:
            scored = token_logprobs(adapt(tiny_llama()), dummy_micro_batch(0), sampling=WARM, teacher=answer)
        assert scored.taught.logprobs.shape == (0,)


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 6}])
def test_a_cut_of_the_sampling_does_not_cut_what_is_compared(cut):
    expected, values = naive(ITEMS, "whole")
    sharded, result = distil(ITEMS, sampling=Sampling(temperature=0.7, max_new_tokens=16, **cut))
    assert result.stats["distill/kl"].mean == pytest.approx(values.mean().item(), abs=1e-5)
    assert largest_gap(sharded.clipped, expected) < SINGLE_PRECISION


def test_several_optimizer_steps_ask_the_teacher_in_each():
    _, result = distil(ITEMS, epochs=2, mini_batches=2, lr=0.05)
    first, last = result.mini_batches[0].stats["distill/kl"], result.mini_batches[-1].stats["distill/kl"]
    assert result.num_optimizer_steps == 4
    assert last.mean < first.mean


@pytest.mark.parametrize("kind", ["whole", "top_k"])
@pytest.mark.parametrize("rows", [60, 72])
def test_a_head_that_is_padded_otherwise_is_compared_on_the_students_rows(kind, rows):
    """Of one tokenizer; its ids are below 60 here. More rows: the teacher's distribution over the student's; fewer: 0 there."""
    items = without_advantages(make_items(2, 3, vocab=58))
    big = another_model(vocab_size=max(rows, 64)).double()
    model = another_model(vocab_size=max(rows, 64))
    if rows < 64:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:rows].clone(), requires_grad=False)
    student = adapt(tiny_llama())
    (batch,) = pack(items, mode="padded", max_tokens=8192, pad_id=0)
    with make_teacher(model, WARM, **KINDS[kind]).answering(batch) as answer, torch.no_grad():
        found = token_logprobs(student, batch, sampling=WARM, teacher=answer).taught.divergence
    expected = []
    for each in items:
        ids = torch.tensor([[*each.prompt_ids, *each.ids]])
        place = slice(len(each.prompt_ids) - 1, -1)
        p = torch.log_softmax(student(input_ids=ids).logits[0, place].double() / 0.7, -1).detach()
        shared = min(rows, 64)
        q = torch.full_like(p, -50.0)
        q[:, :shared] = torch.log_softmax(big(input_ids=ids).logits[0, place, :shared] / 0.7, -1)
        if kind == "top_k":
            top = q.topk(5).indices
            p, q = p.gather(1, top), q.gather(1, top)
            p, q = (torch.cat([each, (1 - each.exp().sum(-1, keepdim=True)).log()], -1) for each in (p, q))
        expected.append((p.exp() * (p - q)).sum(-1))
    # 50 nats at the rows that it lacks, times probabilities that are good to 1e-7.
    torch.testing.assert_close(found, torch.cat(expected).float(), atol=3e-5, rtol=0)


def test_a_teacher_that_caps_its_logits_is_heard_capped():
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, attn_logit_softcapping=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    model.set_attn_implementation("eager")
    (batch,) = pack(ITEMS, mode="padded", max_tokens=8192, pad_id=0)
    student = tiny_llama().requires_grad_(False)
    values, _ = by_definition(student, model, ITEMS, kind="whole", temperature=0.7)
    for chunk_tokens in (5, 1024):
        with make_teacher(model, WARM).answering(batch) as answer:
            scored = token_logprobs(student, batch, sampling=WARM, chunk_tokens=chunk_tokens, teacher=answer)
        torch.testing.assert_close(scored.taught.divergence, values.float(), atol=1e-5, rtol=0)


def test_distill_has_no_advantages_and_keeps_every_group():
    assert advantages([1.0, 0.0, 3.0], [0, 0, 1], algorithm="distill") == [0.0] * 3
    assert not uses_groups("distill")


def test_another_tokenizer_is_refused_by_its_first_difference():
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    size = len(ours)
    check_same_tokens(ours, theirs, rows=size, path="there")
    theirs.add_tokens(["new"])
    with pytest.raises(ModelError, match=rf"'there' has another tokenizer.*token {size} is 'new' there and None here"):
        check_same_tokens(ours, theirs, rows=size, path="there")
    with pytest.raises(ModelError, match=rf"token {size - 1} of the tokenizer has no row in a head of {size - 1}"):
        check_same_tokens(ours, ours, rows=size - 1, path="there")


def test_an_adapter_that_is_none_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"teacher\.adapter .* is not a PEFT folder"):
        inject_frozen_lora(tiny_llama(), str(tmp_path), dtype=torch.float32)


def test_an_adapter_is_put_on_it_frozen_and_in_its_dtype(tmp_path):
    taught = adapt(another_model(), seed=7)
    taught.save_pretrained(tmp_path)
    found = inject_frozen_lora(another_model(), str(tmp_path), dtype=torch.float32)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(found(input_ids=ids).logits, taught(input_ids=ids).logits)
    assert not any(param.requires_grad for param in found.parameters())
    half = inject_frozen_lora(another_model().to(torch.bfloat16), str(tmp_path), dtype=torch.bfloat16)
    assert {param.dtype for param in half.parameters()} == {torch.bfloat16}


def test_sections_that_do_not_fit_together_are_refused():
    with pytest.raises(ValidationError, match="top_k=3 belongs to divergence: reverse_kl"):
        TeacherConfig(path="x", divergence="sampled", top_k=3)
    tree = recipe("model", "run", rollout={"group_size": 1}, train={"algorithm": "distill"})
    with pytest.raises(ConfigError, match="distill learns from a teacher alone; give the section teacher"):
        build_config(tree)
    with pytest.raises(ConfigError, match=r"'teacher\.path' is required"):
        build_config({**tree, "teacher": {}})
    with pytest.raises(ConfigError, match=r"teacher\.path: it is empty"):
        build_config({**tree, "teacher": {"path": ""}})
    with pytest.raises(ConfigError, match=r"teacher\.coef: .*greater than 0"):
        build_config({**tree, "teacher": {"path": "x", "coef": 0}})
    told = {**tree, "teacher": {"path": "x"}}
    assert build_config(told).rollout.group_size == 1
    reward = {**tree["train"], "kl_coef": 0.1, "kl_kind": "k1", "kl_in": "reward"}
    with pytest.raises(ConfigError, match="a KL in the reward has no effect"):
        build_config({**told, "train": reward})
    with pytest.raises(ConfigError, match="group_size is 1"):
        build_config({**told, "train": {"algorithm": "grpo"}})
