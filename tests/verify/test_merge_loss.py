"""What survives a merge, against the same on whole tensors with PyTorch alone; and the choice that follows from it."""

import pytest
import torch

from helpers_sharded import save_model
from helpers_verify import make_trainer, probe_model, update
from lockstep.export.stream import export_weights
from lockstep.export.what import FullExport, MergedExport
from lockstep.rollout.base import Abilities
from lockstep.testing import run_ranks
from lockstep.verify import merge_loss
from lockstep.verify.merge_loss import LayerLoss, MergeLoss, choose_mode, measure_merge_loss
from lockstep.verify.swaps import whole

SERVED = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(probe_model(), tmp_path_factory.mktemp("model"))


def exported(sharded, what, dtype):
    with export_weights(sharded, what, dtype=dtype) as stream:
        return {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}


def by_hand(sharded, served):
    """Layer -> (relative error, cosine, share changed), from two whole exports and B A."""
    merged, base = (exported(sharded, what, served) for what in (MergedExport(), FullExport()))
    out = {}
    for name, a in _factors(sharded, "lora_A"):
        b = dict(_factors(sharded, "lora_B"))[name]
        wanted = 3.0 * b.float() @ a.float()
        hub = name.removeprefix("base_model.model.") + ".weight"
        survived = merged[hub].double() - base[hub].double()
        error = (survived - wanted).norm() / wanted.norm()
        cosine = (survived * wanted).sum() / (survived.norm() * wanted.norm())
        out[f"{name}.base_layer.weight"] = (float(error), float(cosine), float((survived != 0).double().mean()))
    return out


def _factors(sharded, kind):
    for name, _ in sharded.trainable():
        if f".{kind}." in name:
            yield name.partition(f".{kind}.")[0], whole(sharded, name, sharded.local_flat(name))


def check_measured(world, folder, backend, base):
    sharded = make_trainer(world, folder, backend=backend, dtype=base)
    update(sharded, seed=1, size=3e-4)
    names = [tensor.name for tensor in sharded.plan.parameters]
    before = {name: sharded.local_flat(name).clone() for name in names}
    merge_loss.WINDOW_ELEMENTS = 100  # several windows, that end where neither ranks nor rows do
    found = {}
    for served in SERVED if base == torch.float32 else SERVED[:1]:
        loss = measure_merge_loss(sharded, served=served)
        expected = by_hand(sharded, served)
        assert {each.name for each in loss.layers} == set(expected)
        for each in loss.layers:
            got = (each.relative_error, each.cosine, each.share_changed)
            # fp32 products of other shapes; where the update survives whole, its error is rounding itself.
            assert got == pytest.approx(expected[each.name], rel=2e-3, abs=1e-4), (each.name, served)
        found[loss.served] = (loss.total.relative_error, loss.total.cosine, loss.total.count)
    assert all(torch.equal(before[name], sharded.local_flat(name)) for name in names)
    return found


def check_many(world, folder):
    return {
        (backend, str(base)): check_measured(world, folder, backend, base)
        for backend, base in [("fsdp2", torch.float32), ("fsdp1", torch.float32), ("fsdp2", torch.bfloat16)]
    }


def check_first_step(world, folder):
    """Before training nothing can be lost; the step that Adam would make can be judged."""
    sharded = make_trainer(world, folder)
    nothing = measure_merge_loss(sharded, served=torch.bfloat16)
    predicted = measure_merge_loss(sharded, served=torch.bfloat16, first_step_lr=1e-4)
    for name, _ in sharded.trainable():
        if "lora_B" in name:
            numel = sharded.local_flat(name).numel()
            signs = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(numel)) * 2.0 - 1
            sharded.write_local(name, signs * 1e-4)
    real = measure_merge_loss(sharded, served=torch.bfloat16, first_step_lr=1.0)  # B is not zero: measured as it is
    return (
        nothing.total.wanted2,
        nothing.total.relative_error,
        predicted.total.relative_error,
        real.total.relative_error,
    )


def test_equals_whole_tensors_on_any_number_of_ranks(folder):
    (one,), two, three = (run_ranks(ranks, check_many, folder) for ranks in (1, 2, 3))
    for each in (*two, *three):
        for case, found in one.items():
            assert each[case].keys() == found.keys()
            for served, numbers in found.items():
                assert each[case][served] == pytest.approx(numbers, rel=1e-3, abs=1e-4), (case, served)
    fp32 = one["fsdp2", "torch.float32"]
    assert fp32["bfloat16"][0] > fp32["float16"][0] > 100 * fp32["float32"][0]
    assert fp32["float32"][1] > 0.9999


def test_the_first_step_is_foretold(folder):
    ((nothing, undefined, predicted, real),) = run_ranks(1, check_first_step, folder)
    assert nothing == 0 and undefined != undefined
    assert predicted == pytest.approx(real, rel=0.05)


def loss(relative_error, served="bfloat16", unmeasured=()):
    layer = LayerLoss("w", 1.0, relative_error**2, 1.0, 0.5, 3.0, 10.0)
    return MergeLoss(served, (layer,), unmeasured)


def engine(*kinds):
    return Abilities(frozenset(kinds), "bfloat16", keeps_prefixes=True)


@pytest.mark.parametrize(
    ("measured", "abilities", "mode", "why"),
    [
        (loss(0.9), engine("adapter", "merged"), "adapter", "loses 90.00% of the update (cosine 0.500, limit 2%)"),
        (loss(1e-4, "float32"), engine("adapter", "merged"), "merged", "loses 0.01%"),
        (loss(1e-4), engine("adapter"), "adapter", "no merged weights"),
        (loss(0.9), engine("merged"), "merged", "no adapters; merging into bfloat16 loses 90.00%"),
        (None, engine("adapter", "merged"), "adapter", "not known"),
        (None, engine("merged", "full"), "merged", "takes merged weights and no adapters"),
        (loss(1e-4, unmeasured=("conv",)), engine("adapter", "merged"), "adapter", "merging conv"),
    ],
)
def test_auto_chooses_and_says_why(measured, abilities, mode, why):
    choice = choose_mode(measured, abilities)
    assert choice.mode == mode and why in choice.why


def test_auto_refuses_an_engine_that_takes_neither():
    with pytest.raises(ValueError, match=r"takes \['full'\]"):
        choose_mode(None, engine("full"))


def test_the_table_names_the_worst_first():
    layers = (
        LayerLoss("good", 1.0, 0.01, 1.0, 1.0, 5.0, 10.0),
        LayerLoss("bad", 1.0, 4.0, 1.0, 0.1, 1.0, 10.0),
        LayerLoss("none", *[0.0] * 5, 1.0),
    )
    lines = MergeLoss("bfloat16", layers).lines()
    assert [line.split()[0] for line in lines[1:]] == ["all", "bad", "good", "none"]
    assert "2.000" in lines[2] and "10.00%" in lines[2] and "nan" in lines[4]
