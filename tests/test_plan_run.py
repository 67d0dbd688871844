"""What `lockstep plan` says of a recipe's run is what a run holds: two ranks train a step, and every tensor is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from helpers_data import tiny_tokenizer
from helpers_loop import recipe
from helpers_train import make_actor, make_items
from lockstep.assemble import assemble
from lockstep.config import Config, LoraSection, TrainConfig, build_config
from lockstep.dist import World
from lockstep.loop import share
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import inject_lora
from lockstep.plan_memory import Layout, model_use
from lockstep.plan_phases import fullest_rank, run_use
from lockstep.plan_run import build_run, plan_model
from lockstep.sharding.fill import fill
from lockstep.sharding.plan import plan_sharding
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.learn import learn
from lockstep.types import Draw

SMALL = {
    "micro_batch_tokens": 30,
    "packing": "packed",
}  # several micro-batches, of which the last one reduces gradients
CRITIC = {"train": {**SMALL, "algorithm": "gae"}}
DISTILL = {"train": {**SMALL, "algorithm": "distill"}}


def cases(folder: str, other: str, adapter: str) -> dict[str, dict[str, Any]]:
    return {
        "fsdp2, a critic": {**CRITIC, "critic": {"lora": {"rank": 3}, "path": other}},
        "fsdp1, a critic": {**CRITIC, "critic": {"lora": {"rank": 3}}, "sharding": {"backend": "fsdp1"}},
        "fsdp1, bf16, a teacher": {
            **DISTILL,
            "teacher": {"path": other},
            "model": {"path": folder, "dtype": "bfloat16"},
            "sharding": {"backend": "fsdp1"},
        },
        "fsdp2, bf16, a teacher with an adapter, a reference": {
            **DISTILL,
            "teacher": {"path": folder, "adapter": adapter, "top_k": 4},
            "model": {"path": folder, "dtype": "bfloat16"},
            "lora": {"init_from": adapter},
            "engine": {"dtype": "float32"},
        },
        "fsdp2, kept whole, a critic's head, merged": {
            **CRITIC,
            "critic": {"kind": "head"},
            "sharding": {"reshard_after_forward": False},
            "sync": {"mode": "merged"},
        },
    }


def storage_bytes(tensors: Any) -> int:
    """Each storage once: FSDP1's gradients are views of one."""
    found = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}.values())


def tensor_bytes(tensors: Any) -> int:
    """Their own elements: FSDP2 cuts the last rank's, which may be fewer, from memory as large as the first rank's."""
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def handles(sharded: Any) -> list[Any]:
    wrappers = [each for each in sharded.module.modules() if isinstance(each, FullyShardedDataParallel)]
    return [each._handle.flat_param for each in wrappers if each._handle is not None]


def params_of_fsdp2(sharded: Any) -> list[Any]:
    units = [
        each._get_fsdp_state()._fsdp_param_group for each in sharded.module.modules() if isinstance(each, FSDPModule)
    ]
    return [param for unit in units if unit is not None for param in unit.fsdp_params]


def whole_now(sharded: Any) -> int:
    """Bytes of what is gathered at the moment."""
    flats = [getattr(flat, "_full_param_padded", None) for flat in handles(sharded)]
    shown = [getattr(param, "_unsharded_param", None) for param in params_of_fsdp2(sharded)]
    return storage_bytes(each for each in [*flats, *shown] if each is not None and each.untyped_storage().size())


class Watch:
    """Gradients before clipping and between micro-batches, and the most that is gathered in an update."""

    def __init__(self, sharded: Any):
        self.sharded, self.gathered, self.gradients, self.whole = sharded, 0, 0, 0
        self._clip, self._sync = sharded.clip_grad_norm, sharded.set_gradient_sync
        sharded.clip_grad_norm, sharded.set_gradient_sync = self.clip_grad_norm, self.set_gradient_sync
        for module in sharded.module.modules():
            if type(module).__name__ == "LlamaMLP":
                module.register_forward_hook(self._look)
                module.register_full_backward_pre_hook(self._look)
            elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.register_forward_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.gathered = max(self.gathered, whole_now(self.sharded))

    def clip_grad_norm(self, max_norm: float) -> float:
        grads = [param.grad for _, param in self.sharded.trainable() if param.grad is not None]
        flats = handles(self.sharded)
        self.gradients = storage_bytes(flat.grad for flat in flats) if flats else tensor_bytes(grads)
        return self._clip(max_norm)

    def set_gradient_sync(self, on: bool) -> None:
        flats = handles(self.sharded)
        kept = [param.unsharded_accumulated_grad for param in params_of_fsdp2(self.sharded)]
        shown = [getattr(param, "_unsharded_param", None) for param in params_of_fsdp2(self.sharded)]
        grads = [*(flat.grad for flat in flats), *kept, *(None if each is None else each.grad for each in shown)]
        self.whole = max(self.whole, storage_bytes(grads))
        self._sync(on)


def held(sharded: Any, optimizer: Any = None) -> dict[str, int]:
    """What a model has on this rank between steps."""
    sharded.settle()
    flats = [getattr(flat, "_local_shard", flat) for flat in handles(sharded)]
    # FSDP1's originals are views of its flat parameters.
    params = storage_bytes(flats) if flats else tensor_bytes(sharded.module.parameters())
    slots = [pair for state in (optimizer.state.values() if optimizer else ()) for pair in state.items()]
    return {
        "parameters": params,
        "buffers": tensor_bytes(sharded.module.buffers()),
        "state": tensor_bytes(slot for name, slot in slots if name != "step"),
        "counters": tensor_bytes(slot for name, slot in slots if name == "step"),
    }


def run_a_step(world: World, tree: dict[str, Any]) -> dict[str, Any]:
    """Collective. As the loop does it."""
    config = build_config(tree)
    parts = assemble(config, world)
    policy, critic = Watch(parts.sharded), Watch(parts.critic.valuer.sharded) if parts.critic else None
    parts.serving.sync(0)
    mine = share(config.rollout.prompts_per_step, world)
    prompts = [parts.data.train[index] for index in mine]
    draw, count = Draw(0, 0, first_slot=mine.start), config.rollout.group_size
    samples = parts.generate(prompts, parts.sampling, num_samples=count, draw=draw)
    scored = parts.data.rewards.score(samples)
    learn(scored, parts.actor, parts.critic, train=config.train, world=world, seed=0, step=0)
    parts.serving.sync(1)
    engine: Any = parts.serving.engine
    found = {
        "policy": held(parts.sharded, parts.actor.optimizer.torch) | seen(policy),
        "engine": {
            "parameters": storage_bytes(engine._model.parameters()),
            "buffers": tensor_bytes(engine._model.buffers()),
        },
    }
    if critic is not None and parts.critic is not None:
        found["critic"] = held(critic.sharded, parts.critic.optimizer.torch) | seen(critic)
    if config.teacher is not None:
        found["teacher"] = held(parts.actor._teacher.sharded)
    parts.close()
    return found


def seen(watch: Watch) -> dict[str, int]:
    return {"gathered": watch.gathered, "gradients": watch.gradients, "whole": watch.whole}


def train_full(world: World, folder: str, backend: Any, dtype: torch.dtype, offloads: bool) -> dict[str, Any]:
    """Collective. All weights trained, which no recipe does."""
    files = find_model(folder)
    sharded: Any = shard(build_empty(files, dtype=dtype, attention="sdpa"), backend=backend)
    fill(sharded, files, attention="sdpa")
    actor = make_actor(sharded, world, packing="packed", micro_batch_tokens=50, offload_optimizer=offloads)
    watch = Watch(sharded)
    actor.update([each for each in make_items(4, 3) if each.group % world.size == world.rank], step=0)
    return held(sharded, actor.optimizer.torch) | seen(watch)


FULL = [
    ("fsdp2", torch.bfloat16, False),
    ("fsdp1", torch.bfloat16, True),
    ("fsdp2", torch.float32, True),
    ("fsdp1", torch.float32, False),
]


def run_all(world: World, trees: dict[str, Any], folder: str) -> dict[str, Any]:
    out = {name: run_a_step(world, tree) for name, tree in trees.items()}
    return out | {str(case): train_full(world, folder, *case) for case in FULL}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Untied, in sizes that two ranks cannot halve; tied; and an adapter of the first."""
    root, tokenizer, out = tmp_path_factory.mktemp("models"), tiny_tokenizer(), {}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = dict(
        hidden_size=36,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=49,
        vocab_size=len(tokenizer) + 1,
    )
    for name, tied in (("untied", False), ("tied", True)):
        model = tiny_llama(tie_word_embeddings=tied, **size, **ids)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        out[name] = str(root / name)
    model = inject_lora(tiny_llama(**size, **ids), LoraSection(rank=5, alpha=8, targets=("q_proj", "up_proj")), seed=1)
    model.save_pretrained(root / "adapter")
    return out | {"adapter": str(root / "adapter")}


@pytest.fixture(scope="module")
def counted(folders, tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the recipes, what each rank held)."""
    root = tmp_path_factory.mktemp("runs")
    sections = cases(folders["untied"], folders["tied"], folders["adapter"])
    common = {"lora": {"rank": 3, "alpha": 6}, "canary": {"enabled": False}}
    trees = {
        name: recipe(folders["untied"], root / str(place), **{**common, **own})
        for place, (name, own) in enumerate(sections.items())
    }
    return trees, run_ranks(2, run_all, trees, folders["untied"], timeout_s=240)


def planned(config: Config, num_ranks: int = 2) -> Any:
    run = build_run(config, num_ranks)
    return run_use(run, [plan_model(each.model, each.sharding).plan for each in run.sharded], num_ranks, exports=())


CASES = list(cases("", "", ""))


@pytest.mark.parametrize("name", CASES)
def test_a_runs_models_are_as_planned_tensor_by_tensor(counted, name):
    trees, ranks = counted
    use = planned(build_config(trees[name]))
    told = {each.role: each for each in use.models}
    found = ranks[use.rank][name]
    assert told.keys() == found.keys()
    for role, mine in found.items():
        check(told[role], mine)
    # No rank holds more than the one that is told of.
    totals = [
        sum(sum(mine.get(key, 0) for key in ("parameters", "buffers", "state")) for mine in rank[name].values())
        for rank in ranks
    ]
    assert max(totals) == totals[use.rank] == use.resident
    assert use.has_many_micro_batches
    assert use.peak > use.resident + told["policy"].gathered.nbytes + use.logits.nbytes


def check(told: Any, mine: dict[str, int], *, offloads: bool = False) -> None:
    assert (told.parameters, told.buffers) == (mine["parameters"], mine["buffers"])
    if "state" in mine:
        assert told.optimizer == (0 if offloads else mine["state"])
        assert told.optimizer_host == mine["counters"] + (mine["state"] if offloads else 0)
    if "gradients" in mine:
        assert (told.gradients, told.whole_gradients) == (mine["gradients"], mine["whole"])
    if mine.get("gathered"):
        # FSDP2 shows the next unit only when its turn comes; FSDP1 as soon as it is fetched, unless that is between two LoRA factors
        # that are units in a unit: there no hook of the test looks.
        sees_next = told.backend == "fsdp1" and "lora" not in told.gathered.unit
        assert told.gathered.root + told.gathered.unit_bytes == mine["gathered"] - sees_next * told.gathered.next_bytes


@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_weights_and_offloaded_state_are_as_planned(counted, folders, case):
    backend, dtype, offloads = case
    plan = plan_sharding(build_empty(find_model(folders["untied"]), dtype=dtype, attention="sdpa"))
    layout = Layout(plan, 2, backend)
    rank = fullest_rank([layout])
    told = model_use("policy", "", layout, rank, train=TrainConfig(), offloads=offloads)
    check(told, counted[1][rank][str(case)], offloads=offloads)
    assert (told.step > told.optimizer_host) if offloads else told.step > 0
