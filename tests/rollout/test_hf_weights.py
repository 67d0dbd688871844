"""Updates of the embedded engine: what is served after each kind, and after each fault."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from helpers_models import tiny_mixtral, tiny_qwen3_moe
from helpers_rollout import (
    digest_for,
    greedy,
    ids_of,
    make_engine,
    manifest_of,
    max_difference,
    push,
    random_prompts,
    sharp_llama,
    tiny_gpt2,
)
from lockstep.errors import StaleWeights, TransportError
from lockstep.types import Bucket, Draw, Sampling

# PEFT 0.21 reads a property that transformers 5.24 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SAMPLING = Sampling(max_new_tokens=8)
PROMPTS = random_prompts([4, 7, 5])
TARGET = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def make_adapter(model=None, *, seed=0, dtype=torch.float32, **options):
    """A trainer's PEFT model with a non-zero adapter, the adapter's file tensors, and its JSON configuration."""
    options = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    trainer = get_peft_model(copy.deepcopy(model or sharp_llama()), LoraConfig(**options)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trainer.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = (noise if "lora_" in name else parameter + 0.1 * noise).to(dtype)
    tensors = get_peft_model_state_dict(trainer, save_embedding_layers=False)
    config = trainer.peft_config["default"].to_dict()
    text = json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    return trainer, {name: tensor.detach().clone() for name, tensor in tensors.items()}, json.loads(text)


def difference(engine, model) -> float:
    """How far the engine's logprobs are from what `model` says of the same samples."""
    samples = engine.generate(PROMPTS, SAMPLING, num_samples=4, draw=Draw(0, 0))
    assert {sample.policy_version for sample in samples} == {engine.policy_version}
    return max_difference(model, samples, SAMPLING)


# Adapter updates


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": r".*layers\.1\..*_proj"},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
        {"lora_dropout": 0.5, "init_lora_weights": "gaussian"},
    ],
    ids=["all-linear", "rslora", "patterns", "dora", "embedding", "regex", "modules-to-save", "dropout"],
)
def test_an_adapter_is_served_as_trained(options):
    """B28: what the engine computes changes with the adapter, to exactly what the trainer computes."""
    model = sharp_llama()
    trainer, tensors, config = make_adapter(model, **options)
    engine = make_engine(model)
    assert difference(engine, trainer) > 1e-2
    push(engine, tensors, "adapter", version=3, config=config)
    assert engine.policy_version == 3
    assert difference(engine, trainer) < 1e-4


def test_an_adapter_on_conv1d_layers():
    model = tiny_gpt2()
    trainer, tensors, config = make_adapter(model, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    engine = make_engine(model)
    push(engine, tensors, "adapter", config=config)
    assert difference(engine, trainer) < 1e-4


def test_an_adapter_keeps_its_dtype():
    """An fp32 adapter on a bf16 base (and the reverse) is served in the dtype it was sent in, bit for bit."""
    for base, wire in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        _, tensors, config = make_adapter(dtype=wire)
        engine = make_engine(sharp_llama().to(base))
        push(engine, tensors, "adapter", config=config)
        served = engine._adapter.serving()
        assert {tensor.dtype for tensor in served.tensors.values()} == {wire}
        assert len(engine.generate(PROMPTS, SAMPLING, num_samples=1, draw=Draw(0, 0))) == 3


@pytest.mark.parametrize("kind", ["adapter", "merged", "full"])
def test_after_an_update_the_engine_is_as_one_that_never_generated(kind):
    """B30: the same prompts before and after an update under the same names, bit for bit those of a cold engine; versions count."""
    model = sharp_llama()
    warm = make_engine(model)
    for version in (1, 2):
        warm.generate(PROMPTS, SAMPLING, num_samples=2, draw=Draw(0, 0))
        _, tensors, config = make_adapter(model, seed=version)
        if kind != "adapter":
            tensors, config = {name: value + 0.01 * version for name, value in model.state_dict().items()}, None
        cold = make_engine(model)
        for engine in (warm, cold):
            push(engine, tensors, kind, version=version, config=config)
        assert warm.policy_version == version
        samples = [engine.generate(PROMPTS, SAMPLING, num_samples=2, draw=Draw(0, 0)) for engine in (warm, cold)]
        assert samples[0] == samples[1]


def test_updates_follow_each_other_and_own_their_memory():
    model = sharp_llama()
    engine = make_engine(model)
    for version in (1, 2, 3):
        trainer, tensors, config = make_adapter(model, seed=version)
        push(engine, tensors, "adapter", version=version, config=config)
        for tensor in tensors.values():
            tensor.zero_()
        assert difference(engine, trainer) < 1e-4


def test_another_configuration_is_another_adapter():
    """B16, B17: rank, alpha and targets come from each manifest, not from the first."""
    model = sharp_llama()
    engine = make_engine(model)
    for options in ({}, {"lora_alpha": 64}, {"r": 2}, {"target_modules": ["q_proj"]}, {"use_rslora": True}):
        trainer, tensors, config = make_adapter(model, **options)
        push(engine, tensors, "adapter", config=config)
        assert difference(engine, trainer) < 1e-4


def test_the_old_adapter_is_served_until_the_commit():
    model = sharp_llama()
    old, tensors, config = make_adapter(model, seed=1)
    new, new_tensors, new_config = make_adapter(model, seed=2, r=2)
    engine = make_engine(model)
    push(engine, tensors, "adapter", version=1, config=config)
    engine.begin(manifest_of(new_tensors, "adapter", version=2, config=new_config))
    assert difference(engine, old) < 1e-4
    engine.receive(Bucket(tuple(new_tensors.items())))
    assert difference(engine, old) < 1e-4
    assert engine.policy_version == 1
    engine.commit(digest_for(new_tensors))
    assert difference(engine, new) < 1e-4
    assert engine.policy_version == 2


def test_an_update_takes_no_random_numbers():
    _, tensors, config = make_adapter()
    engine = make_engine()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    push(engine, tensors, "adapter", config=config)
    assert torch.equal(torch.rand(3), expected)


def flip_one_bit(tensors):
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    last = list(damaged)[-1]
    damaged[last].view(torch.int32).view(-1)[0] ^= 1
    return damaged


@pytest.mark.parametrize("first", [True, False], ids=["first-update", "later-update"])
@pytest.mark.parametrize("same_config", [True, False])
def test_a_flipped_bit_is_refused_and_rolled_back(first, same_config):
    model = sharp_llama()
    old, tensors, config = make_adapter(model, seed=1)
    new, new_tensors, new_config = make_adapter(model, seed=2, r=4 if same_config else 2)
    engine = make_engine(model)
    if not first:
        push(engine, tensors, "adapter", version=1, config=config)
    engine.begin(manifest_of(new_tensors, "adapter", version=2, config=new_config))
    engine.receive(Bucket(tuple(flip_one_bit(new_tensors).items())))
    with pytest.raises(TransportError, match="version 2: the engine holds other bytes"):
        engine.commit(digest_for(new_tensors))
    assert engine.policy_version == (0 if first else 1)
    assert difference(engine, model if first else old) < 1e-4
    engine.abort("the sender cleans up whatever happened")
    push(engine, new_tensors, "adapter", version=2, config=new_config)
    assert difference(engine, new) < 1e-4


def test_abort_in_adapter_mode_serves_the_old_version():
    model = sharp_llama()
    old, tensors, config = make_adapter(model, seed=1)
    engine = make_engine(model)
    push(engine, tensors, "adapter", version=1, config=config)
    engine.begin(manifest_of(tensors, "adapter", version=2, config=config))
    engine.receive(Bucket(tuple(flip_one_bit(tensors).items())))
    engine.abort("rank 1 is gone")
    assert engine.policy_version == 1
    assert difference(engine, old) < 1e-4


def test_names_that_bind_to_nothing_are_refused():
    """B102: a prefix that the engine's model does not have; the error shows a name of both sides."""
    _, tensors, config = make_adapter()
    engine = make_engine()
    renamed = {name.replace("model.layers", "language_model.model.layers"): each for name, each in tensors.items()}
    with pytest.raises(
        TransportError, match=r"no tensor 'base_model.model.language_model.* nearest is \['base_model.model.model"
    ):
        engine.begin(manifest_of(renamed, "adapter", config=config))
    assert engine.policy_version == 0 and greedy(engine, PROMPTS)


def test_an_adapter_that_leaves_modules_out_is_refused():
    """B28: an adapter that binds to some modules only, or to none."""
    _, tensors, config = make_adapter()
    engine = make_engine()
    partial = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    for some in (partial, {}):
        with pytest.raises(TransportError, match=r"leaves out (14|28) of the engine's tensors, first \['base_model"):
            engine.begin(manifest_of(some, "adapter", config=config))


def test_shapes_of_another_rank_are_refused():
    _, tensors, config = make_adapter()
    engine = make_engine()
    with pytest.raises(TransportError, match=r"engine's has shape \[8, 32\], the manifest says \[4, 32\]"):
        engine.begin(manifest_of(tensors, "adapter", config={**config, "r": 8}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type LORA; 'IA3' came"),
        ({"bias": "lora_only"}, "changes base weights .*sync.mode=merged"),
        ({"init_lora_weights": "pissa"}, "changes base weights .*sync.mode=merged"),
        ({"no_such_option": 1}, "PEFT refuses .*no_such_option"),
        ({"target_modules": ["nothing_here"]}, "PEFT cannot put .*nothing_here"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused(change, message):
    _, tensors, config = make_adapter()
    engine = make_engine()
    with pytest.raises(TransportError, match=message):
        engine.begin(manifest_of(tensors, "adapter", config={**config, **change}))
    with pytest.raises(TransportError, match="peft_type LORA; None came"):
        engine.begin(manifest_of(tensors, "adapter"))
    push(engine, tensors, "adapter", config=config)


# Faults in what arrives, in all kinds


def begin_of_kind(engine, kind):
    """An open update of the kind; its tensors."""
    if kind == "adapter":
        _, tensors, config = make_adapter()
        engine.begin(manifest_of(tensors, kind, config=config))
    else:
        tensors = {name: tensor.clone() for name, tensor in sharp_llama(seed=1).state_dict().items()}
        engine.begin(manifest_of(tensors, kind))
    return tensors


@pytest.mark.parametrize("kind", ["adapter", "merged", "full"])
def test_faulty_tensors_are_refused_by_name(kind):
    engine = make_engine()
    tensors = begin_of_kind(engine, kind)
    (name, tensor), *rest = tensors.items()
    with pytest.raises(TransportError, match=r"unknown tensor .*nearest expected name is"):
        engine.receive(Bucket(((name + ".x", tensor),)))
    with pytest.raises(TransportError, match="manifest says"):
        engine.receive(Bucket(((name, tensor[:1]),)))
    with pytest.raises(TransportError, match="manifest says"):
        engine.receive(Bucket(((name, tensor.double()),)))
    engine.receive(Bucket(((name, tensor),)))
    with pytest.raises(TransportError, match="came twice"):
        engine.receive(Bucket(((name, tensor),)))
    engine.receive(Bucket(tuple(rest[:-1])))
    with pytest.raises(TransportError, match=f"1 of {len(tensors)} tensors never came"):
        engine.commit(digest_for(tensors))
    assert engine.policy_version == 0


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_calls_out_of_order_are_refused(kind):
    engine = make_engine()
    for call in (lambda: engine.receive(Bucket(())), lambda: engine.commit("")):
        with pytest.raises(TransportError, match="came without a begin"):
            call()
    engine.abort("nothing is open")
    begin_of_kind(engine, kind)
    with pytest.raises(TransportError, match=r"update to version 1 is open; commit or abort it first"):
        begin_of_kind(engine, kind)


# Merged and full updates: in place


@pytest.mark.parametrize("kind", ["merged", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_whole_weights_are_served(kind, tied):
    model, new = (sharp_llama(tie_word_embeddings=tied, seed=seed) for seed in (0, 1))
    tensors = dict(new.state_dict())
    if tied:
        del tensors["lm_head.weight"]
    engine = make_engine(model)
    push(engine, tensors, kind, version=4)
    assert engine.policy_version == 4
    assert difference(engine, new) < 1e-4


def test_nothing_is_served_while_weights_are_overwritten():
    new = sharp_llama(seed=1)
    tensors = dict(new.state_dict())
    engine = make_engine()
    engine.begin(manifest_of(tensors, "merged", version=2))
    with pytest.raises(StaleWeights, match="overwritten with version 2"):
        greedy(engine, PROMPTS)
    engine.receive(Bucket(tuple(tensors.items())))
    with pytest.raises(StaleWeights):
        greedy(engine, PROMPTS)
    engine.commit(digest_for(tensors))
    assert difference(engine, new) < 1e-4


def test_abort_in_merged_mode_stops_serving_until_the_next_update():
    new = sharp_llama(seed=1)
    tensors = dict(new.state_dict())
    _, adapter, config = make_adapter()
    engine = make_engine()
    engine.begin(manifest_of(tensors, "merged", version=2))
    engine.receive(Bucket(tuple(tensors.items())[:3]))
    engine.abort("rank 1 is gone")
    with pytest.raises(StaleWeights, match=r"version 2 was aborted .*rank 1 is gone.*complete merged or full update"):
        greedy(engine, PROMPTS)
    with pytest.raises(TransportError, match="needs whole base weights, but the update to version 2 was aborted"):
        engine.begin(manifest_of(adapter, "adapter", config=config))
    push(engine, tensors, "merged", version=3)
    assert engine.policy_version == 3
    assert difference(engine, new) < 1e-4


def test_a_flipped_bit_in_merged_mode_stops_serving():
    new = sharp_llama(seed=1)
    tensors = dict(new.state_dict())
    engine = make_engine()
    engine.begin(manifest_of(tensors, "merged"))
    engine.receive(Bucket(tuple(flip_one_bit(tensors).items())))
    with pytest.raises(TransportError, match="holds other bytes"):
        engine.commit(digest_for(tensors))
    with pytest.raises(StaleWeights):
        greedy(engine, PROMPTS)
    push(engine, tensors, "merged")
    assert difference(engine, new) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weigth": t.pop("model.layers.0.mlp.up_proj.weight")}),
         r"no tensor 'model.layers.0.mlp.up_proj.weigth'.*nearest is \['model.layers.0.mlp.up_proj.weight'\]"),
        (lambda t: t.pop("model.norm.weight"), r"leaves out 1 of the engine's tensors, first \['model.norm.weight'\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"engine's has shape \[32\], the manifest says \[5\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.bfloat16)}), "nothing is cast silently"),
    ],
)  # fmt: skip
def test_manifests_that_do_not_fit_are_refused_before_anything_is_written(change, message):
    model = sharp_llama()
    old, adapter, config = make_adapter(model)
    tensors = dict(sharp_llama(seed=1).state_dict())
    change(tensors)
    engine = make_engine(model)
    push(engine, adapter, "adapter", config=config)
    with pytest.raises(TransportError, match=message):
        engine.begin(manifest_of(tensors, "merged", version=2))
    assert engine.policy_version == 1
    assert difference(engine, old) < 1e-4


def test_tied_tensors_come_once():
    tied = sharp_llama(tie_word_embeddings=True)
    with pytest.raises(TransportError, match=r"tied tensors \[.*\] are one in the engine"):
        make_engine(tied).begin(manifest_of(dict(tied.state_dict()), "merged"))


def test_merged_weights_replace_an_adapter():
    """B31: the adapter's effect is in the merged weights, and must not be applied on top of them."""
    model = sharp_llama()
    trainer, adapter, config = make_adapter(model)
    engine = make_engine(model)
    push(engine, adapter, "adapter", version=1, config=config)
    merged = copy.deepcopy(trainer).merge_and_unload()
    push(engine, dict(merged.state_dict()), "merged", version=2)
    assert difference(engine, trainer) < 1e-4
    with pytest.raises(TransportError, match=r"applied twice: the engine's base holds the merged weights of version 2"):
        engine.begin(manifest_of(adapter, "adapter", version=3, config=config))
    push(engine, dict(model.state_dict()), "full", version=3)
    push(engine, adapter, "adapter", version=4, config=config)
    assert difference(engine, trainer) < 1e-4


def test_in_place_updates_own_their_memory():
    new = sharp_llama(seed=1)
    tensors = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    engine = make_engine()
    push(engine, tensors, "full")
    for tensor in tensors.values():
        tensor.zero_()
    assert difference(engine, new) < 1e-4


def test_adapter_updates_share_nothing_with_what_was_sampled_before():
    """Samples of the old version keep their stamp and their numbers."""
    model = sharp_llama()
    engine = make_engine(model)
    before = engine.generate(PROMPTS, SAMPLING, num_samples=2, draw=Draw(0, 0))
    kept = [(sample.policy_version, sample.ids, sample.logprobs) for sample in before]
    _, tensors, config = make_adapter(model)
    push(engine, tensors, "adapter", version=1, config=config)
    after = engine.generate(PROMPTS, SAMPLING, num_samples=2, draw=Draw(0, 0))
    assert ids_of(after) != ids_of(before)
    assert kept == [(sample.policy_version, sample.ids, sample.logprobs) for sample in before]


@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_mixtral])
def test_fused_experts_take_merged_weights_under_their_checkpoint_names(build, tmp_path):
    """The engine keeps one 3-D parameter for what the checkpoint, and so the wire, has per expert."""
    engine, wanted = make_engine(build()), build(seed=1)
    wanted.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(".experts.1." in name for name in tensors)
    push(engine, tensors, "merged")
    for (name, own), (_, other) in zip(engine._model.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(own, other), name
    left_out = {name: tensor for name, tensor in tensors.items() if ".experts.1." not in name}
    with pytest.raises(TransportError, match=r"leaves out .* first \['model.layers.0.*experts.1"):
        push(engine, left_out, "merged", version=2)
