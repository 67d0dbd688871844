"""Models of several stages: a Qwen3-Omni stripped to its thinker and a Qwen2-VL, with LoRA in the language tower only, sharded on
2 ranks by FSDP1 and FSDP2, trained a step on text, and exported under names that the original checkpoint has."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

import lockstep
from helpers_matrix import collect, difference
from helpers_models import OMNI_TARGETS, tiny_qwen2_vl, tiny_qwen3_omni
from lockstep.checkpoint import save_adapter_folder
from lockstep.data.packing import pack
from lockstep.dist import World
from lockstep.export.stream import export_weights
from lockstep.model.strip import strip
from lockstep.sharding.base import ShardedModel
from lockstep.testing import run_ranks
from lockstep.train.logprobs import token_logprobs
from lockstep.types import Sampling, TrainItem

STAGES = ["talker", "code2wav"]
VL_TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn\.(q|v)_proj|mlp\.up_proj)"
IDS = torch.tensor([[5, 9, 2, 7, 30, 11, 8, 3], [4, 44, 17, 6, 21, 10, 13, 12]])
"""One text per rank."""


def filled(model: Any) -> Any:
    """Random values in everything, since some constructors leave memory as it was."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def whole_omni() -> Any:
    return filled(tiny_qwen3_omni())


def omni() -> PeftModel:
    """As its user makes it: without what text training does not need, and with the thinker's forward, since the whole has none."""
    model = whole_omni()
    strip(model, STAGES)
    model.forward = model.thinker.forward
    return adapted(model, OMNI_TARGETS)


def vision_language() -> PeftModel:
    return adapted(filled(tiny_qwen2_vl()), VL_TARGETS)


def adapted(model: Any, targets: str) -> PeftModel:
    """LoRA on an explicit list of modules: of a regular expression peft 0.21 keeps only the last names on fused experts."""
    names = [name for name, _ in model.named_modules() if re.fullmatch(targets, name)]
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=names, init_lora_weights=False)
    return get_peft_model(model, config)  # type: ignore[return-value]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], PeftModel]]] = {
    "omni": (whole_omni, omni),
    "vision-language": (lambda: filled(tiny_qwen2_vl()), vision_language),
}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def write_reference(name: str, folder: Path) -> None:
    """Of a single process: the loss and the adapter after one SGD step, and the files before and after it."""
    make_whole, make = MODELS[name]
    make_whole().save_pretrained(folder / "whole")
    model = make()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    loss = loss_of(model, IDS)
    loss.backward()
    assert loss.isfinite()
    moved = {name for name, param in model.named_parameters() if param.grad is not None and param.grad.any()}
    assert moved == {name for name, _ in model.named_parameters() if "lora_" in name}
    save(get_peft_model_state_dict(model), folder / "before.safetensors")
    before = copy.deepcopy(model).merge_and_unload()
    before.save_pretrained(folder / "merged")
    optimizer.step()
    save(get_peft_model_state_dict(model) | {"loss": loss.detach()}, folder / "after.safetensors")


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check_model(world: World, name: str, folder: Path, backend: Any) -> None:
    whole, merged = read(folder / "whole"), read(folder / "merged")
    sharded = lockstep.shard(MODELS[name][1](), backend=backend)
    assert not difference(collect(sharded, lockstep.AdapterExport()), load_file(folder / "before.safetensors"))
    left = {key: value for key, value in whole.items() if key.split(".")[0] not in STAGES}
    assert not difference(collect(sharded, lockstep.FullExport()), left)
    check_merged(sharded, whole, merged, is_partial=name == "omni")
    check_step(sharded, folder)


def check_merged(
    sharded: ShardedModel, whole: dict[str, torch.Tensor], merged: dict[str, torch.Tensor], *, is_partial: bool
) -> None:
    """What `save_pretrained` of the stripped, merged model writes; all of it names of the original; and it says what is missing."""
    came = collect(sharded, lockstep.MergedExport())
    assert not difference(came, merged)
    changed = {name for name, value in came.items() if not torch.equal(value, whole[name])}
    assert changed and all(re.search(r"layers\.\d+\.(self_attn|mlp\.up_proj)", name) for name in changed)
    for what in (lockstep.MergedExport(), lockstep.FullExport()):
        with export_weights(sharded, what) as stream:
            list(stream)
        notes = [note for note in stream.notes if "not in this export" in note]
        assert len(notes) == is_partial
        assert all(
            re.match(r"talker, code2wav stripped before training: \d+ tensors of the whole", note) for note in notes
        )
    if is_partial:
        assert {name.split(".")[0] for name in set(whole) - set(came)} == set(STAGES)


def check_step(sharded: ShardedModel, folder: Path) -> None:
    """One step on text, a row on each rank, equals the single process's on both rows; only LoRA in the language tower moves."""
    trainable = sharded.trainable()
    optimizer = torch.optim.SGD([param for _, param in trainable], lr=0.5)
    loss = loss_of(sharded.module, IDS[sharded.world.rank : sharded.world.rank + 1])
    loss.backward()
    assert all("lora_" in name and "layers" in name for name, _ in trainable)
    assert not [
        name for name, param in sharded.module.named_parameters() if not param.requires_grad and param.grad is not None
    ]
    optimizer.step()
    wanted = load_file(folder / "after.safetensors")
    losses = [torch.zeros_like(loss.detach()) for _ in range(sharded.world.size)]
    torch.distributed.all_gather(losses, loss.detach())
    # The same fp32 sums in another order.
    torch.testing.assert_close(sum(losses) / len(losses), wanted.pop("loss"), rtol=1e-5, atol=1e-6)
    before = load_file(folder / "before.safetensors")
    came = collect(sharded, lockstep.AdapterExport())
    assert came.keys() == wanted.keys()
    for name, value in came.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, before[name]), name


def check_text_rows(world: World, folder: Path) -> None:
    """CASES B104: three texts of unequal lengths (three is also the number of its position axes) score alike one by one and
    in one padded batch, sharded and not."""
    plain = vision_language()
    sharded = lockstep.shard(vision_language())
    sampling = Sampling(1.0, 1.0, 0, 4, (2,))
    items = [TrainItem(tuple(range(3, 6 + 2 * i)), tuple(range(20, 24 + i)), (), 0.0, i) for i in range(3)]
    (together,) = pack(items, mode="padded", max_tokens=1024, pad_id=0)
    alone = [pack([item], mode="padded", max_tokens=1024, pad_id=0)[0] for item in items]
    with torch.no_grad():
        one_by_one = torch.cat([token_logprobs(plain, batch, sampling=sampling).logprobs for batch in alone])
        for model in (plain, sharded.module):
            # fp32: padding changes the shapes that are multiplied, and so the order of sums.
            torch.testing.assert_close(
                token_logprobs(model, together, sampling=sampling).logprobs, one_by_one, rtol=0, atol=1e-5
            )


def check_served(world: World, folder: Path) -> None:
    """CASES B102: the adapter of the stripped model loads by plain PEFT on the whole one, and every layer of it does something."""
    sharded = lockstep.shard(omni())
    with export_weights(sharded, lockstep.AdapterExport(), to=0) as stream:
        tensors = {name: tensor for bucket in stream for name, tensor in bucket.items()}
    if world.is_main:
        save_adapter_folder(folder / "adapter", tensors, dict(stream.plan.adapter_config or {}))
        loaded = PeftModel.from_pretrained(whole_omni(), str(folder / "adapter"))
        assert not difference(get_peft_model_state_dict(loaded), load_file(folder / "before.safetensors"))
        assert min(float(p.abs().max()) for name, p in loaded.named_parameters() if "lora_B" in name) > 0


def check_all(world: World, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        for name in MODELS:
            for backend in ("fsdp2", "fsdp1"):
                try:
                    check_model(world, name, Path(folder) / name, backend)
                except Exception as error:
                    raise AssertionError(f"{name} {backend}: {error}") from error
        check_text_rows(world, Path(folder) / "vision-language")
        check_served(world, Path(folder) / "omni")


def test_stages_are_sharded_trained_and_exported_under_the_original_names(tmp_path):
    for name in MODELS:
        write_reference(name, tmp_path / name)
    run_ranks(2, check_all, str(tmp_path), timeout_s=200)
