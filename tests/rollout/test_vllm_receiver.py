"""The receiver inside vLLM against an imitation of vLLM's inside: nothing lost, nothing served that was not proven."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers_fake_vllm import VOCAB, adapter, checkpoint, fake_receiver, fake_worker
from lockstep.errors import TransportError
from lockstep.rollout.vllm_params import find_places
from lockstep.transport.inproc import push
from lockstep.types import Bucket, Manifest, TensorSpec


def manifest_of(version, kind, tensors, config=None):
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    return Manifest(version, kind, specs, config)


def send(receiver, version, kind, tensors, config=None):
    buckets = [Bucket(tuple(tensors.items())[first : first + 2]) for first in range(0, len(tensors), 2)]
    return push(buckets, receiver, manifest_of(version, kind, tensors, config))


@pytest.fixture
def worker():
    return fake_worker()


@pytest.fixture
def receiver(worker):
    return fake_receiver(worker)


def test_every_tensor_is_found_again_in_vllms_parameters(worker, receiver):
    tensors = checkpoint(1)
    model = worker.model_runner.model
    send(receiver, 4, "merged", tensors)
    places = find_places(model, manifest_of(4, "merged", tensors).specs)
    assert set(places.views) == set(tensors) and not places.elsewhere and not places.untouched
    assert all(torch.equal(places.views[name], tensor) for name, tensor in tensors.items())
    attention = model.model.layers[0].self_attn.qkv_proj.base_layer.weight
    assert torch.equal(attention[8:12], tensors["model.layers.0.self_attn.k_proj.weight"])
    facts = receiver.describe()
    assert (facts["version"], facts["kind"], facts["stale"], facts["not_read_back"]) == (4, "merged", None, [])
    assert facts["label"].startswith("lockstep:4:")


@pytest.mark.parametrize("name", sorted(checkpoint()))
def test_tensor_that_vllms_loader_drops_is_missed(worker, receiver, name):
    worker.model_runner.model.forgets = name
    with pytest.raises(TransportError, match="parameters hold other bytes"):
        send(receiver, 4, "merged", checkpoint(1))
    assert "version 4" in receiver.describe()["stale"] and receiver.describe()["version"] == 0
    worker.model_runner.model.forgets = None
    send(receiver, 5, "full", checkpoint(1))
    assert receiver.describe()["stale"] is None


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"]
)
def test_manifest_that_leaves_a_parameter_out_is_refused_at_the_begin(receiver, name):
    tensors = {key: value for key, value in checkpoint().items() if key != name}
    with pytest.raises(TransportError, match="leaves out 1 of"):
        receiver.begin(manifest_of(1, "merged", tensors))
    assert receiver.describe()["stale"] is None and receiver.describe()["label"] == "default"


def test_part_of_a_fused_parameter_alone_is_refused(receiver):
    tensors = {name: tensor for name, tensor in checkpoint().items() if "k_proj" not in name}
    with pytest.raises(TransportError, match=r"leaves out .*k_proj"):
        send(receiver, 1, "merged", tensors)
    assert receiver.describe()["version"] == 0


def test_tensor_that_has_no_use_is_refused(receiver):
    tensors = checkpoint() | {"model.layers.0.self_attn.rotary.weight": torch.zeros(3)}
    with pytest.raises(TransportError, match="rotary"):
        send(receiver, 1, "merged", tensors)


def test_head_and_embedding_that_are_tied_come_once(receiver):
    tensors = checkpoint() | {"lm_head.weight": torch.zeros(VOCAB, 8)}
    with pytest.raises(TransportError, match="one in the engine"):
        receiver.begin(manifest_of(1, "merged", tensors))


def test_packed_weights_are_refused(worker, receiver):
    layer = worker.model_runner.model.model.layers[0].mlp.down_proj.base_layer
    layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(TransportError, match=r"packed .*down_proj"):
        receiver.begin(manifest_of(1, "merged", checkpoint()))
    assert receiver.describe()["packed"]


def test_other_dtype_is_refused(receiver):
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint().items()}
    with pytest.raises(TransportError, match="nothing is cast"):
        receiver.begin(manifest_of(1, "merged", tensors))


def test_engine_of_several_workers_is_refused():
    with pytest.raises(TransportError, match="2 workers"):
        fake_receiver(fake_worker(world_size=2))


def serve(worker, receiver, name="lockstep-1-x", lora_id=1):
    path = receiver.handle("stage", {})["path"]
    request = SimpleNamespace(lora_name=name, lora_int_id=lora_id, lora_path=path)
    worker.model_runner.lora_manager.add_adapter(request)
    return receiver.handle("serve", {"name": name})


@pytest.mark.parametrize("extra", [{}, {"use_rslora": True}, {"lora_alpha": 2}])
def test_adapter_is_served_after_its_slot_was_read(worker, receiver, extra):
    tensors, config = adapter()
    send(receiver, 3, "adapter", tensors, config | extra)
    assert receiver.describe()["version"] == 0, "a staged adapter is not served yet"
    assert serve(worker, receiver)["not_read_back"] == []
    facts = receiver.describe()
    assert (facts["version"], facts["serving"], facts["label"]) == (3, "lockstep-1-x", "default")


@pytest.mark.parametrize("part", ["q_proj.lora_A", "v_proj.lora_B", "down_proj.lora_B"])
def test_matrix_that_never_reaches_its_slot_is_missed(worker, receiver, part):
    tensors, config = adapter()
    worker.model_runner.lora_manager.loses = part
    send(receiver, 3, "adapter", tensors, config)
    with pytest.raises(TransportError, match="does not hold the adapter's"):
        serve(worker, receiver)
    assert receiver.describe()["version"] == 0


@pytest.mark.parametrize("module", ["self_attn.o_proj", "self_attn.qkv_proj"])
def test_what_an_earlier_adapter_left_in_a_slot_is_seen(worker, receiver, module):
    """In a module that the new one has nothing for, and beyond the new one's rank."""
    tensors, config = adapter()
    send(receiver, 3, "adapter", tensors, config)
    layer = worker.model_runner.lora_manager._adapter_manager.modules[f"model.layers.0.{module}"]
    layer.lora_b_stacked[0][0, 0, 0, 3] = 1.0
    with pytest.raises(TransportError, match=module):
        serve(worker, receiver)


def test_scaling_is_applied_once_however_often_vllm_loads_it(worker, receiver):
    tensors, config = adapter()
    send(receiver, 3, "adapter", tensors, config)
    manager = worker.model_runner.lora_manager
    serve(worker, receiver)
    path = next(iter(receiver._adapters._staged))
    manager.remove_all_adapters()
    manager.add_adapter(SimpleNamespace(lora_name="again", lora_int_id=9, lora_path=path))
    slot = manager._adapter_manager.modules["model.layers.0.mlp.down_proj"].lora_b_stacked[0][0, 0, :, :2]
    assert torch.equal(slot, tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"] * 3.0)


def test_adapters_that_requests_may_still_use_are_kept_and_no_more(worker, receiver):
    manager, paths = worker.model_runner.lora_manager, []
    for version in range(1, 7):
        tensors, config = adapter(seed=version)
        send(receiver, version, "adapter", tensors, config)
        serve(worker, receiver, name=f"lockstep-{version}-x", lora_id=version)
        paths.append(list(receiver._adapters._staged)[-1])
    assert list(receiver._adapters._staged) == paths[-4:]
    old = SimpleNamespace(lora_name="lockstep-3-x", lora_int_id=3, lora_path=paths[2])
    assert manager._load_adapter(old).lora_model_id == 3
    with pytest.raises(TransportError, match="not held any more"):
        manager._load_adapter(SimpleNamespace(lora_name="lockstep-1-x", lora_int_id=1, lora_path=paths[0]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"arrow_config": {"a": 1}}, "arrow_config"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"init_lora_weights": "olora"}, "base weights"),
        ({"bias": "lora_only"}, "base weights"),
        ({"peft_type": None}, "peft_type LORA"),
        ({"r": 3}, "rank 3"),
        ({"r": 8}, "max_lora_rank"),
    ],
)
def test_configuration_that_vllm_would_ignore_is_refused(receiver, changes, words):
    tensors, config = adapter()
    with pytest.raises(TransportError, match=words):
        receiver.begin(manifest_of(1, "adapter", tensors, config | changes))


def test_harmless_fields_are_not_refused(receiver):
    tensors, config = adapter()
    plain = {
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "use_dora": False,
        "fan_in_fan_out": True,
    }
    receiver.begin(manifest_of(1, "adapter", tensors, config | plain))


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        (("lora_A.weight", "lora_magnitude_vector"), "no LoRA matrix"),
        (("down_proj", "lm_head"), "embeddings or the head"),
        (("mlp.down_proj", "mlp.dawn_proj"), "nearest is .*down_proj"),
    ],
)
def test_tensors_without_a_place_are_refused(receiver, rename, words):
    tensors, config = adapter()
    renamed = {name.replace(*rename): tensor for name, tensor in tensors.items()}
    with pytest.raises(TransportError, match=words):
        receiver.begin(manifest_of(1, "adapter", renamed, config))


def test_names_of_another_class_bind_as_vllm_maps_them_or_not_at_all(worker, receiver):
    """A checkpoint of a multimodal class has `model.language_model.layers` where this vLLM model has `model.layers`."""
    tensors, config = adapter()
    foreign = {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in tensors.items()}
    with pytest.raises(
        TransportError, match=r"no module 'model\.language_model\.layers\.0\.self_attn\.q_proj'.*nearest is"
    ):
        receiver.begin(manifest_of(1, "adapter", foreign, config))

    def mapped(name):
        return name.replace("model.language_model.", "model.")

    mapper = SimpleNamespace(_map_name=mapped, get_rename_mapper=lambda: SimpleNamespace(_map_name=mapped))
    worker.model_runner.model.hf_to_vllm_mapper = mapper
    receiver.begin(manifest_of(2, "adapter", foreign, config))
    assert set(receiver._update.pairs) == {
        f"model.layers.0.{end}" for end in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    receiver.abort("the next")
    weights = {name.replace("model.layers", "model.language_model.layers"): t for name, t in checkpoint(3).items()}
    places = find_places(worker.model_runner.model, manifest_of(3, "merged", weights).specs)
    assert set(places.views) == set(weights) and not places.untouched


def test_half_a_pair_and_another_dtype_are_refused(receiver):
    tensors, config = adapter()
    half = {name: tensor for name, tensor in tensors.items() if "v_proj.lora_B" not in name}
    with pytest.raises(TransportError, match="only one of A and B"):
        receiver.begin(manifest_of(1, "adapter", half, config))
    with pytest.raises(TransportError, match="nothing is cast"):
        receiver.begin(manifest_of(1, "adapter", {name: tensor.half() for name, tensor in tensors.items()}, config))


def test_adapter_needs_a_base_of_its_own(worker, receiver):
    tensors, config = adapter()
    send(receiver, 1, "merged", checkpoint(1))
    with pytest.raises(TransportError, match="applied twice"):
        send(receiver, 2, "adapter", tensors, config)
    send(receiver, 3, "full", checkpoint(1))
    send(receiver, 4, "adapter", tensors, config)
    serve(worker, receiver)
    receiver.begin(manifest_of(5, "merged", checkpoint(2)))
    assert receiver.describe()["label"] == "lockstep:torn" and receiver.describe()["serving"] is None
    receiver.abort("a test")
    with pytest.raises(TransportError, match="needs whole base weights"):
        send(receiver, 6, "adapter", tensors, config)


def test_server_without_lora_says_so():
    tensors, config = adapter()
    receiver = fake_receiver(fake_worker(with_lora=False))
    with pytest.raises(TransportError, match="--enable-lora"):
        receiver.begin(manifest_of(1, "adapter", tensors, config))
    assert receiver.describe()["lora"] is None
