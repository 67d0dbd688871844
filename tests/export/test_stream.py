"""Exports from 1, 2 and 4 ranks equal what PEFT gives on one unsharded copy, bit for bit, and never write to the model."""

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from helpers_sharded import randomise_b, save_model, shard_folder
from lockstep.config import LoraSection
from lockstep.dist import World, stop
from lockstep.errors import IncompleteExport, RankMissing, RanksDisagree
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, MergedExport
from lockstep.model.load import find_model, load_whole
from lockstep.model.lora import adapter_config_json
from lockstep.testing import run_ranks, tiny_llama

LORA = LoraSection(rank=4, alpha=6.0)


def collect(sharded, what, **kwargs) -> dict[str, torch.Tensor]:
    with export_weights(sharded, what, **kwargs) as stream:
        return dict(item for bucket in stream for item in bucket.items())


def reference(sharded, folder: str, adapter: dict[str, torch.Tensor], dtype: torch.dtype):
    """An unsharded PEFT model with the exported adapter in it: PEFT's own loading refuses what does not fit."""
    config = {
        key: value
        for key, value in adapter_config_json(sharded.module).items()
        if key not in ("auto_mapping", "peft_type")
    }
    base = load_whole(find_model(folder), dtype=dtype, attention="sdpa", device=torch.device("cpu"))
    model = get_peft_model(base, LoraConfig(**{**config, "inference_mode": False}))
    outcome = set_peft_model_state_dict(model, adapter)
    assert not outcome.unexpected_keys
    return model


def shards(sharded) -> dict[str, torch.Tensor]:
    sharded.settle()
    return {name: param.to_local().detach().clone() for name, param in sharded.module.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(sorted(left)) == sorted(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


def check_equal_to_peft(world: World, folder: str, dtype: torch.dtype) -> None:
    sharded = shard_folder(world, folder, LORA, dtype=dtype)
    randomise_b(sharded)
    before = shards(sharded)
    adapter = collect(sharded, AdapterExport())
    model = reference(sharded, folder, adapter, dtype)
    same(adapter, get_peft_model_state_dict(model))
    wanted = {**model.merge_and_unload().state_dict()}
    if sharded.module.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    for bucket_bytes in (1000, 50_000, 1 << 20):
        same(collect(sharded, MergedExport(), bucket_bytes=bucket_bytes), wanted)
    only_zero = collect(sharded, MergedExport(), to=0)
    assert bool(only_zero) == world.is_main
    if world.is_main:
        same(only_zero, wanted)
    sharded.module(input_ids=torch.arange(1, 9)[None])  # without backward: the root stays gathered (CASES B59)
    same(collect(sharded, MergedExport()), wanted)
    same(before, shards(sharded))


def check_all(world: World, folders: list[str]) -> None:
    for folder in folders:
        for dtype in (torch.float32, torch.bfloat16):
            check_equal_to_peft(world, folder, dtype)


def check_faults(world: World, folder: str) -> None:
    sharded = shard_folder(world, folder, LORA)
    randomise_b(sharded)
    whole = collect(sharded, AdapterExport())
    expected = ZeroDivisionError if world.rank == 1 else IncompleteExport
    with (
        pytest.raises(expected, match="division"),
        export_weights(sharded, AdapterExport(), bucket_bytes=1000) as stream,
    ):
        for index, _ in enumerate(stream):
            if world.rank == 1 and index == 2:
                raise ZeroDivisionError("division")
    with export_weights(sharded, AdapterExport(), bucket_bytes=1000) as stream:
        next(iter(stream))
    same(whole, collect(sharded, AdapterExport()))
    with (
        pytest.raises(RanksDisagree, match="buckets of 100"),
        export_weights(sharded, AdapterExport(), bucket_bytes=1000 + world.rank),
    ):
        pass
    with pytest.raises(IncompleteExport, match="'other' does not exist"):
        export_weights(sharded, AdapterExport(adapter="other"))
    kept = collect(sharded, AdapterExport())
    loss = sharded.module(input_ids=torch.arange(1, 9)[None]).logits.square().mean()
    loss.backward()
    torch.optim.SGD([param for _, param in sharded.trainable()], lr=1.0).step()
    same(whole, kept)
    changed = collect(sharded, AdapterExport())
    assert any(not torch.equal(changed[name], whole[name]) for name in whole)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    made = [
        tiny_llama(tie_word_embeddings=True),
        tiny_llama(vocab_size=65, intermediate_size=7, num_key_value_heads=1, head_dim=2, attention_bias=True),
    ]
    return [save_model(model, tmp_path_factory.mktemp("model")) for model in made]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_adapter_and_merged_equal_peft_and_leave_the_model_alone(folders, num_ranks):
    run_ranks(num_ranks, check_all, folders)


def test_consumer_faults_end_the_stream_on_all_ranks(folders):
    run_ranks(2, check_faults, folders[0])


def check_tied_target(world: World, folder: str) -> None:
    sharded = shard_folder(world, folder, LoraSection(rank=2, targets=("q_proj", "lm_head")))
    assert len(collect(sharded, AdapterExport())) == 6
    with pytest.raises(IncompleteExport, match=r"lm_head.*tied"):
        export_weights(sharded, MergedExport())


def test_lora_on_a_tied_head_is_exported_or_refused(folders):
    run_ranks(2, check_tied_target, folders[0])


def check_own_fault(world: World, folder: str) -> None:
    """Rank 1 fails between two collectives of the export: it keeps its own error, and rank 0 does not wait for a timeout."""
    sharded = shard_folder(world, folder, LORA)
    if world.rank == 1:
        sharded.local_flat = lambda name: torch.ones(1 << 60)  # more memory than there is
    expected, said = (RankMissing, "rank 1") if world.is_main else (RuntimeError, "allocate")
    began = time.monotonic()
    with pytest.raises(expected, match=said):
        collect(sharded, AdapterExport())
    stop(world)
    assert time.monotonic() - began < 20  # a data collective's limit is 60 s here


def test_a_rank_that_fails_inside_a_gather_leaves(folders):
    run_ranks(2, check_own_fault, folders[0])


def check_misuse(world: World, folder: str) -> None:
    sharded = shard_folder(world, folder, LORA)
    stream = export_weights(sharded, AdapterExport())
    with stream:
        assert sum(bucket.nbytes for bucket in stream)
    with pytest.raises(RuntimeError, match="used once"), stream:
        pass
    for what, options, error in (
        ("adapter", {}, TypeError),
        (AdapterExport(), {"to": 1}, ValueError),
        (AdapterExport(), {"to": False}, ValueError),
        (AdapterExport(), {"dtype": "bf16"}, ValueError),
        (AdapterExport(), {"dtype": torch.int8}, ValueError),
        (AdapterExport(), {"bucket_bytes": 0}, ValueError),
    ):
        with pytest.raises(error, match="came"):
            export_weights(sharded, what, **options)
    with pytest.raises(TypeError, match="attach"):
        export_weights(sharded.module, AdapterExport())


def test_misuse_is_told(folders):
    run_ranks(1, check_misuse, folders[0])


def check_nested(world: World, folder: str) -> None:
    """A consumer that opens a stream in its loop: ranks that receive nothing would never open theirs."""
    sharded = shard_folder(world, folder, LORA)
    for to in (0, "all"):
        began = time.monotonic()
        receives = world.is_main or to == "all"
        error, said = (RuntimeError, "^another weight stream .* finish the other stream first") if receives else (
            IncompleteExport, "rank 0's consumer raised RuntimeError: another weight stream")  # fmt: skip
        with (
            pytest.raises(error, match=said),
            export_weights(sharded, MergedExport(), to=to, bucket_bytes=4096) as outer,
        ):
            for _ in outer:
                collect(sharded, AdapterExport(), to=to)
        assert time.monotonic() - began < 10
        assert bool(collect(sharded, AdapterExport(), to=to)) == receives
    # What was refused may be opened once the other one is done.
    later = export_weights(sharded, AdapterExport())
    with export_weights(sharded, AdapterExport()), pytest.raises(RuntimeError, match="finish the other"):
        later.__enter__()
    with later:
        assert sum(bucket.nbytes for bucket in later)


def test_a_stream_inside_a_stream_is_refused(folders):
    run_ranks(2, check_nested, folders[0])
