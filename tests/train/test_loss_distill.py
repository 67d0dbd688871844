"""Reverse KL to a teacher, whole and from its likeliest tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.distill import clean_rows, distillation_advantages, reverse_kl, reverse_kl_topk

INF = float("inf")


def logprobs(seed: int, num: int = 4, vocabulary: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(num, vocabulary, generator=generator, dtype=torch.float64), -1)


def top(student: torch.Tensor, teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = teacher.topk(k).indices
    return student.gather(1, index), teacher.gather(1, index)


def test_it_is_torchs_kl():
    student, teacher = logprobs(0).requires_grad_(), logprobs(1)
    ours = reverse_kl(student, teacher)
    theirs = torch.nn.functional.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)  # float64 rounding
    (one,) = torch.autograd.grad(ours.sum(), student, retain_graph=True)
    (other,) = torch.autograd.grad(theirs.sum(), student)
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_the_gradient_of_the_logits_is_that_of_the_definition():
    logits = torch.tensor([[0.5, 0.0, -0.3]], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[0.0, 0.4, 0.1]], dtype=torch.float64), -1)
    value = reverse_kl(torch.log_softmax(logits, -1), teacher)
    value.sum().backward()
    assert value.item() == pytest.approx(0.0971780, abs=1e-7)  # as B91's
    given = torch.tensor([[0.224834, -0.129154, -0.095680]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, given, atol=1e-6, rtol=0)


@given(seed=st.integers(0, 1000), k=st.integers(1, 11))
def test_a_bucket_for_the_rest_is_a_kl_and_never_more_than_the_whole(seed, k):
    student, teacher = logprobs(seed), logprobs(seed + 1)
    whole, part = reverse_kl(student, teacher), reverse_kl_topk(*top(student, teacher, k))
    # 1 - sum is known to 1e-16 and the teacher's rest is above 1e-6 here, so its logarithm is known to 1e-10.
    assert (part >= -1e-10).all()
    assert (part <= whole + 1e-10).all()


def test_all_tokens_are_the_whole_whatever_the_tail():
    student, teacher = logprobs(3), logprobs(4)
    for tail in ("bucket", "renormalise", "drop"):
        part = reverse_kl_topk(*top(student, teacher, 12), tail=tail)
        torch.testing.assert_close(part, reverse_kl(student, teacher), atol=1e-12, rtol=0)


def test_dropping_the_tail_can_reward_moving_mass_there_and_a_bucket_does_not():
    teacher = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    outside = torch.tensor([[0.1, 0.9]], dtype=torch.float64).log()
    assert reverse_kl_topk(outside[:, :1], teacher[:, :1], tail="drop").item() < 0
    assert reverse_kl_topk(teacher[:, :1], teacher[:, :1], tail="drop").item() == 0
    bucket = reverse_kl_topk(outside[:, :1], teacher[:, :1]).item()
    assert bucket == pytest.approx(reverse_kl(outside, teacher).item())


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "drop"])
def test_extremes_are_finite(tail):
    student = torch.tensor([[0.0, -200.0], [-0.5, -INF]], requires_grad=True)
    teacher = torch.tensor([[-INF, 0.0], [-0.5, -1.0]])
    values = reverse_kl_topk(student, teacher, tail=tail)
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(student.grad).all()
    assert values[0].item() == pytest.approx(50.0, rel=0.4)  # the floor; a bucket's rest is rounding


def test_a_student_that_excludes_all_of_the_teachers_tokens_is_all_rest():
    logits = torch.tensor([[1.0, -INF, -INF, 0.0]], requires_grad=True)
    student, teacher = torch.log_softmax(logits, -1)[:, 1:3], torch.tensor([[0.5, 0.25]]).log()
    value = reverse_kl_topk(student, teacher)
    assert value.item() == pytest.approx(-torch.tensor(0.25).log().item())
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.tolist() == [[0, 0, 0, 0]]


def test_masked_rows_change_nothing():  # B92
    sequences = Sequences.of([4], mask=torch.tensor([True, False, True, True]))
    student = logprobs(0)
    student[1] = float("nan")
    student.requires_grad_()
    values = reverse_kl(clean_rows(student, sequences), clean_rows(logprobs(1), sequences))
    total = sequences.sums(values).sum()
    total.backward()
    assert total.item() == pytest.approx(reverse_kl(logprobs(0), logprobs(1))[[0, 2, 3]].sum().item())
    assert torch.isfinite(student.grad).all()
    assert not student.grad[1].any()


def test_as_advantages_of_sampled_tokens():
    p, q = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -INF])
    found = distillation_advantages(p, q)
    assert not found.requires_grad
    assert found.tolist() == [-0.5, -48.0]


@pytest.mark.parametrize("tail", ["whole", "bucket", "renormalise", "drop"])
def test_bf16_rows_are_computed_with_in_fp32_and_rows_that_broadcast_are_refused(tail):
    rows = [torch.log_softmax(torch.randn(4, 6), -1).bfloat16() for _ in range(2)]

    def kl(student: Tensor, teacher: Tensor) -> Tensor:
        return reverse_kl(student, teacher) if tail == "whole" else reverse_kl_topk(student, teacher, tail=tail)

    assert torch.equal(kl(*rows), kl(*(row.float() for row in rows)))
    with pytest.raises(ValueError, match=r"expected a row of each model per token; \[4, \d\] and \[1, \d\] came"):
        kl(rows[0], rows[1][:1])


def test_an_unknown_tail_is_refused():
    with pytest.raises(ValueError, match="expected a tail of bucket, renormalise or drop; 'mean' came"):
        reverse_kl_topk(logprobs(0), logprobs(1), tail="mean")
