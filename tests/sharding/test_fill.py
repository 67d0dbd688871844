"""Ranks that read their own elements hold, together, the checkpoint; and what does not fit is refused on every rank."""

import json
import logging
import shutil
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from helpers_models import tiny_gemma3, tiny_gemma4, tiny_gpt2, tiny_mixtral, tiny_qwen3_moe
from helpers_sharded import save_model, shard_folder
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.errors import LockstepError, ModelError, RanksDisagree
from lockstep.known_warnings import while_injecting
from lockstep.model.elements import Reader
from lockstep.model.load import build_empty, find_model, find_weights, load_whole
from lockstep.model.lora import inject_lora
from lockstep.sharding.fill import fill
from lockstep.sharding.fsdp2 import FSDP2Model, shard_fsdp2
from lockstep.sharding.plan import plan_sharding
from lockstep.sharding.shard import shard as wrap
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.arange(1, 12)[None]
CPU = torch.device("cpu")


def empty_model(folder: str, dtype: torch.dtype = torch.float32):
    return build_empty(find_model(folder), dtype=dtype, attention="sdpa")


def whole_model(folder: str, dtype: torch.dtype = torch.float32):
    return load_whole(find_model(folder), dtype=dtype, attention="sdpa", device=CPU)


def shard(world: World, model: nn.Module) -> FSDP2Model:
    return shard_fsdp2(model, plan_sharding(model), world, reshard_after_forward=True)


def check_holds(sharded: FSDP2Model, folder: str, dtype: torch.dtype = torch.float32) -> None:
    """Nothing on meta, tied names one Parameter, and parameters (through the logits) and buffers those of one process, to the bit."""
    plain = whole_model(folder, dtype)
    sharded.module.eval()
    with torch.no_grad():
        assert torch.equal(sharded.module(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    sharded.settle()
    for tensor in sharded.plan.parameters:
        param = sharded.module.get_parameter(tensor.name)
        assert not param.is_meta and param.dtype == tensor.dtype
        assert all(sharded.module.get_parameter(alias) is param for alias in tensor.aliases)
        start, stop = sharded.ranges(tensor.name)[sharded.world.rank]
        assert sharded.local_flat(tensor.name).numel() == stop - start
    wanted = dict(plain.named_buffers())
    mine = {name.removeprefix("base_model.model."): value for name, value in sharded.module.named_buffers()}
    assert mine.keys() == wanted.keys()
    for name, value in mine.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


def check_fsdp1(world: World, folders: dict[str, str]) -> None:
    """Ranges that begin and end within a row, original parameters kept or not, an adapter there or not."""
    for keeps_originals in (True, False):
        for name, lora in (
            ("untied", None),
            ("tied", "all-linear"),
            ("qwen3_moe", ("q_proj",)),
            ("gemma4", ("q_proj",)),
        ):
            model = empty_model(folders[name])
            if lora is not None:
                model = inject_lora(model, LoraSection(rank=2, targets=lora), seed=0)
            sharded = wrap(model, backend="fsdp1", use_orig_params=keeps_originals)
            fill(sharded, folders[name], strict=True)
            plain = whole_model(folders[name])
            with torch.no_grad():
                assert torch.equal(sharded.module.eval()(input_ids=IDS).logits, plain(input_ids=IDS).logits)
            buffers = dict(plain.named_buffers())
            for tensor in sharded.plan.buffers:
                assert torch.equal(sharded.buffer(tensor.name), buffers[tensor.name.removeprefix("base_model.model.")])


def check_replicas(world: World, folders: dict[str, str]) -> None:
    """On a 2 x 2 mesh two ranks hold each element, and both get it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    sharded = wrap(empty_model(folders["tied"]), backend="fsdp2", mesh=mesh)
    fill(sharded, folders["tied"])
    with torch.no_grad():
        assert torch.equal(sharded.module(input_ids=IDS).logits, whole_model(folders["tied"])(input_ids=IDS).logits)


def check_models(world: World, folders: dict[str, str]) -> None:
    for folder in folders.values():
        sharded = shard(world, empty_model(folder))
        fill(sharded, folder, strict=True)
        check_holds(sharded, folder)


def check_with_adapter(world: World, folders: dict[str, str]) -> None:
    """The base's names have PEFT segments by then, the file's have none (CASES B57)."""
    for name, target in (("tied", "all-linear"), ("gpt2", ("c_attn",)), ("gemma4", ("q_proj",))):
        sharded = shard_folder(world, folders[name], LoraSection(rank=2, targets=target))
        check_holds(sharded, folders[name])
        for key, param in sharded.trainable():
            assert bool(param.full_tensor().any()) == ("lora_A" in key)  # type: ignore[attr-defined]


def check_buffers_from_meta(world: World, folders: dict[str, str]) -> None:
    """Buffers on meta on every rank but 0, then on all: rank 0's, or the constructor's, are sent (CASES B51)."""
    for name in ("gemma3", "gemma4", "untied"):
        for keeps in (0, None):
            model = empty_model(folders[name])
            if world.rank != keeps:
                model.to("meta")
            sharded = shard(world, model)
            fill(sharded, folders[name])
            check_holds(sharded, folders[name])


def check_bfloat16_keeps_its_tables(world: World, folders: dict[str, str]) -> None:
    sharded = shard(world, empty_model(folders["gemma4"], torch.bfloat16))
    fill(sharded, folders["gemma4"])
    check_holds(sharded, folders["gemma4"], torch.bfloat16)
    assert {b.dtype for n, b in sharded.module.named_buffers() if "inv_freq" in n} == {torch.float32}


def wrapped_head(folder: str) -> nn.Module:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with while_injecting():
        return get_peft_model(empty_model(folder), config)


def check_saved_modules(world: World, folders: dict[str, str]) -> None:
    """A trained copy starts from the base's values, and so does the original that PEFT keeps beside it."""
    model = wrapped_head(folders["untied"])
    for module in model.modules():
        if hasattr(module, "lora_B"):
            for part in (*module.lora_A.values(), *module.lora_B.values()):
                part.to_empty(device="cpu").weight.data.zero_()
    sharded = shard(world, model)
    fill(sharded, folders["untied"], strict=True)
    check_holds(sharded, folders["untied"])
    head = sharded.module.base_model.model.lm_head  # type: ignore[union-attr]
    stored = load_file(f"{folders['untied']}/model.safetensors")["lm_head.weight"]
    for part in (head.original_module, head.modules_to_save["default"]):  # type: ignore[union-attr]
        assert torch.equal(part.weight.full_tensor(), stored)


def check_tied_steps(world: World, folders: dict[str, str]) -> None:
    """Two steps on everything: head and embedding stay one tensor, and move as in one process (CASES B56)."""
    plain = whole_model(folders["tied"]).train()
    sharded = shard(world, empty_model(folders["tied"]).train())
    fill(sharded, folders["tied"])
    for model, params in ((plain, list(plain.parameters())), (sharded.module, [p for _, p in sharded.trainable()])):
        optimizer = torch.optim.SGD(params, lr=0.1)
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    sharded.settle()
    head = sharded.module.get_parameter("lm_head.weight")
    assert head is sharded.module.get_parameter("model.embed_tokens.weight")
    # Gradients are averaged over ranks: other order of rounding.
    torch.testing.assert_close(head.full_tensor(), plain.lm_head.weight.detach(), atol=1e-6, rtol=1e-5)  # type: ignore[attr-defined]


def check_fill_after_forward(world: World, folders: dict[str, str]) -> None:
    """A forward without backward leaves the root gathered; values filled in then must not be lost (CASES B59)."""
    model = empty_model(folders["untied"])
    sharded = shard_fsdp2(model, plan_sharding(model), world, reshard_after_forward=False)
    fill(sharded, folders["untied"])
    with torch.no_grad():
        sharded.module(input_ids=IDS)
    assert not hasattr(sharded.module.lm_head.weight, "full_tensor"), "the root is gathered, or this tests nothing"  # type: ignore[union-attr]
    fill(sharded, folders["other"])
    check_holds(sharded, folders["other"])


def check_offloaded(world: World, folders: dict[str, str]) -> None:
    model = empty_model(folders["tied"])
    plan = plan_sharding(model)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    sharded = FSDP2Model(model, world, plan=plan, fill_device=CPU)
    fill(sharded, folders["tied"])
    assert all(sharded.local_flat(tensor.name).device == CPU for tensor in plan.parameters)
    check_holds(sharded, folders["tied"])


class WithBuffers(nn.Module):
    """Persistent buffers of several dtypes, an fp32 one beside bf16 weights, and a table that is in no file (CASES B54)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("bias_correction", torch.linspace(0, 1, 5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(6.0), persistent=False)


def check_toy(world: World, folder: str) -> None:
    with torch.device("meta"):
        model = WithBuffers().to(torch.bfloat16)
        model.bias_correction = model.bias_correction.float()
        model.table = model.table.float()
    if world.is_main:
        model.table = torch.arange(6.0)
    sharded = shard(world, model)
    fill(sharded, folder, strict=True)
    stored = load_file(f"{folder}/model.safetensors")
    for name in ("steps", "bias_correction", "mask"):
        assert torch.equal(sharded.buffer(name), stored[name]) and sharded.buffer(name).dtype == stored[name].dtype
    assert torch.equal(sharded.buffer("table"), torch.arange(6.0))
    assert torch.equal(sharded.module.layer.weight.full_tensor(), stored["layer.weight"].to(torch.bfloat16))  # type: ignore[union-attr]


@contextmanager
def counting_reads(seen: dict[str, int]):
    """Bytes that files gave, and the most of them that were alive at once."""
    take = Reader._take

    def counted(self, *args):
        out = take(self, *args)
        seen["read"] += out.nbytes
        seen["live"] += out.nbytes
        seen["peak"] = max(seen["peak"], seen["live"])
        weakref.finalize(out.untyped_storage(), lambda nbytes=out.nbytes: seen.update(live=seen["live"] - nbytes))
        return out

    Reader._take = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Reader._take = take  # type: ignore[method-assign]


def check_memory(world: World, folders: dict[str, str]) -> None:
    for name in ("untied", "qwen3_moe"):
        sharded = shard(world, empty_model(folders[name]))
        mine = {t.name: sharded.ranges(t.name)[world.rank] for t in sharded.plan.parameters}
        seen = dict(read=0, live=0, peak=0)
        with counting_reads(seen):
            fill(sharded, folders[name])
        sizes = {key: (stop - start) * 4 for key, (start, stop) in mine.items()}
        # Rows are dealt whole, so each rank reads its own bytes and none beside them.
        assert seen["read"] == sum(sizes.values())
        one_expert = 2 * 16 * 32 * 4
        assert seen["peak"] <= max(one_expert if "experts" in key else size for key, size in sizes.items())


def check_refused(world: World, folders: dict[str, str], spoilt: list[tuple[str, str]]) -> None:
    for folder, said in spoilt:
        with pytest.raises(ModelError, match=said):
            shard_folder(world, folder, LoraSection(rank=2))
    with pytest.raises(ModelError, match=r"adapter tensors have no values.*first .*lora_A"):
        fill(shard(world, wrapped_head(folders["untied"])), folders["untied"])


def check_unused(world: World, folders: dict[str, str]) -> None:
    files = find_model(folders["untied"])
    files.config.num_hidden_layers = 2
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep.sharding.fill").addHandler(handler)
    model = build_empty(files, dtype=torch.float32, attention="sdpa")
    sharded = shard(world, model)
    fill(sharded, files)
    assert [("layers.2." in text and "9 stored tensors" in text) for text in records] == [True] * int(world.is_main)
    with pytest.raises(ModelError, match=r"9 tensors of .* are part of nothing in the model"):
        fill(sharded, find_weights(folders["untied"]), strict=True)


def check_different_ranks(world: World, folders: dict[str, str], bad: str) -> None:
    """What only one rank has otherwise is every rank's error, at once."""
    odd = world.rank == 1
    # One rank's file system is broken.
    with pytest.raises(ModelError if odd else LockstepError, match=r"stored as \[65, 16\]"):
        shard_folder(world, bad if odd else folders["untied"], LoraSection(rank=2))
    # Rotary tables of other lengths (CASES B39), and one that is not there.
    model = empty_model(folders["untied"])
    if odd:
        model.model.rotary_emb.inv_freq = torch.ones(3)
    with pytest.raises(RanksDisagree, match=r"inv_freq torch.float32 \[4\].*inv_freq torch.float32 \[3\]"):
        fill(shard(world, model), folders["untied"])
    model = empty_model(folders["untied"])
    if odd:
        del model.model.rotary_emb._buffers["inv_freq"]
    with pytest.raises(RanksDisagree, match="inv_freq"):
        fill(shard(world, model), folders["untied"])
    # Registered in another order on one rank: plans list buffers by name, so all is well.
    model = empty_model(folders["gemma4"])
    if odd:
        table = model.model.rotary_emb
        table._buffers = dict(reversed(table._buffers.items()))
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sharded = shard(world, model)
    fill(sharded, folders["gemma4"])
    assert len(tables) > 2 and all(torch.equal(sharded.buffer(name), table) for name, table in tables.items())
    # The same plan, but a buffer that only one rank's file has.
    sharded = shard(world, WithBuffers())
    with pytest.raises(RanksDisagree, match="steps"):
        fill(sharded, folders["toy_without_steps" if odd else "toy"])


def check_stale_copies(world: World, folders: dict[str, str], copies: dict[str, str]) -> None:
    """A rank's own copy of the checkpoint has the same names and shapes, and is another one (CASES B39)."""

    def both(mine: str, other: str) -> None:
        fill(shard(world, empty_model(folders["untied"])), other if world.rank == 1 else mine)

    both(folders["untied"], copies["same"])
    said = r"rank 0 has 'stored {} F32 .*, xxh3 of its bytes \w+', rank 1 has 'stored .* {} \["
    for copy, kind in (("values", "F32"), ("bf16", "BF16"), ("last", "F32")):
        with pytest.raises(RanksDisagree, match=said.format("lm_head.weight", kind)):
            both(folders["untied"], copies[copy])
    with pytest.raises(RanksDisagree, match=r"stored file model\.safetensors: "):
        both(folders["untied"], copies["metadata"])


def check_tied_values(world: World, folders: dict[str, str], copies: dict[str, str]) -> None:
    """Head and embedding stored with other values are not one tensor; with the same they are."""
    name, head = "model.embed_tokens.weight", "lm_head.weight"
    for backend in ("fsdp2", "fsdp1"):
        sharded = wrap(empty_model(folders["tied"]), backend=backend)
        fill(sharded, copies["tied_same"], strict=True)
        with torch.no_grad():
            assert torch.equal(sharded.module(input_ids=IDS).logits, whole_model(folders["tied"])(input_ids=IDS).logits)
        # The last row is rank 1's.
        with pytest.raises(LockstepError, match=f"other values under '{head}' than under '{name}'.*=False"):
            fill(wrap(empty_model(folders["tied"]), backend=backend), copies["tied_other"])


def check_wrong_index(world: World, folders: dict[str, str], copies: dict[str, str]) -> None:
    said = r"model-2.safetensors does not hold 'lm_head.weight', .* \(it is in model-1.safetensors\)"
    with pytest.raises(ModelError, match=said):
        fill(shard(world, empty_model(folders["untied"])), copies["index"])


def spoil(folder: str, target: Path, name: str, value: torch.Tensor | None) -> str:
    shutil.copytree(folder, target)
    tensors = {**load_file(target / "model.safetensors"), name: value}
    kept = {key: each for key, each in tensors.items() if each is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def split_wrongly(folder: str, target: Path) -> str:
    """Two files, and an index that puts the first one's head into the second."""
    target.mkdir()
    tensors = load_file(f"{folder}/model.safetensors")
    where = {name: f"model-{1 if name < 'model.l' else 2}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: each for name, each in tensors.items() if where[name] == file}, target / file)
    wrong = {**where, "lm_head.weight": "model-2.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
    return str(target)


def save_copies(folders: dict[str, str], root: Path) -> dict[str, str]:
    """Checkpoints that are nearly those of `untied` and `tied`."""
    head = load_file(f"{folders['untied']}/model.safetensors")["lm_head.weight"]
    last = head.clone()
    last[-1, -1] += 1
    tied = load_file(f"{folders['tied']}/model.safetensors")["model.embed_tokens.weight"]
    other = tied.clone()
    other[-1, -1] += 1
    out = {
        name: spoil(folders[source], root / name, "lm_head.weight", value)
        for name, source, value in (
            ("same", "untied", head),
            ("values", "untied", head.flip(0).contiguous()),
            ("bf16", "untied", head.bfloat16()),
            ("last", "untied", last),
            ("tied_same", "tied", tied.clone()),
            ("tied_other", "tied", other),
        )
    }
    shutil.copytree(folders["untied"], root / "metadata")
    stored = load_file(root / "metadata" / "model.safetensors")
    save_file(stored, root / "metadata" / "model.safetensors", metadata={"note": "longer " * 9})
    return {**out, "metadata": str(root / "metadata"), "index": split_wrongly(folders["untied"], root / "index")}


def check_copies(world: World, folders: dict[str, str], copies: dict[str, str]) -> None:
    check_stale_copies(world, folders, copies)
    check_tied_values(world, folders, copies)
    check_wrong_index(world, folders, copies)


def test_copies_that_are_not_the_same_are_every_ranks_error(folders, tmp_path):
    run_ranks(2, check_copies, folders, save_copies(folders, tmp_path), timeout_s=120)


def save_toy(target: Path) -> str:
    target.mkdir()
    model = WithBuffers()
    model.steps += 1
    model.bias_correction *= 3
    save_file(model.state_dict(), target / "model.safetensors")
    return str(target)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    models = dict(
        untied=tiny_llama(vocab_size=65, num_hidden_layers=3),
        other=tiny_llama(vocab_size=65, num_hidden_layers=3, seed=1),
        tied=tiny_llama(tie_word_embeddings=True, attention_bias=True),
        gemma3=tiny_gemma3(),
        gemma4=tiny_gemma4(),
        qwen3_moe=tiny_qwen3_moe(),
        mixtral=tiny_mixtral(),
    )
    out = {name: save_model(model, root / name) for name, model in models.items()}
    gpt2 = tiny_gpt2()
    # Names without the "transformer." prefix, as the hub's GPT-2 has them.
    out["gpt2"] = save_model(gpt2.transformer, root / "gpt2")
    (root / "gpt2" / "config.json").write_text(gpt2.config.to_json_string())
    return out


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "toy")


def check_good(world: World, folders: dict[str, str], toy: str) -> None:
    check_models(world, folders)
    check_fsdp1(world, folders)
    if world.size == 4:
        check_replicas(world, folders)
    check_with_adapter(world, folders)
    check_buffers_from_meta(world, folders)
    check_bfloat16_keeps_its_tables(world, folders)
    check_saved_modules(world, folders)
    check_tied_steps(world, folders)
    check_fill_after_forward(world, folders)
    check_offloaded(world, folders)
    check_toy(world, toy)
    check_memory(world, folders)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_hold_the_checkpoint_together(folders, toy, num_ranks):
    run_ranks(num_ranks, check_good, folders, toy, timeout_s=240)


def check_bad(world: World, folders: dict[str, str], spoilt: list[tuple[str, str]]) -> None:
    check_refused(world, folders, spoilt)
    check_unused(world, folders)
    check_different_ranks(world, folders, spoilt[0][0])


def test_what_does_not_fit_is_every_ranks_error(folders, toy, tmp_path):
    name = "model.embed_tokens.weight"
    wrong = spoil(folders["untied"], tmp_path / "wrong", name, torch.zeros(65, 16))
    missing = spoil(folders["untied"], tmp_path / "missing", name, None)
    toys = {"toy": toy, "toy_without_steps": spoil(toy, tmp_path / "toy", "steps", None)}
    said = [(wrong, rf"'{name}' is stored as \[65, 16\]; the model has \[65, 32\]"), (missing, f"'{name}' is not in")]
    run_ranks(2, check_bad, {**folders, **toys}, said, timeout_s=120)
