"""DTensors in every layout that lockstep reads, as whole tensors in parts; loading into them; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from helpers_sharded import check_holds
from lockstep.dist import World
from lockstep.errors import ModelError
from lockstep.sharding.fsdp2 import FSDP2Model, row_ranges
from lockstep.testing import run_ranks


class Odd(nn.Module):
    """No size is a multiple of the ranks; `tied` is one parameter under two names; a scalar stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(3, 1)
        self.cube = nn.Parameter(torch.empty(3, 5, 2))
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.a.weight
        self.scalar = nn.Parameter(torch.empty(()))
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(torch.arange(1.0, param.numel() + 1).reshape(param.shape) + 100 * index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) + self.tied(x)).sum() * self.scalar + self.cube.sum()


def values() -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in Odd().named_parameters(remove_duplicate=False)}


def placed(mesh: DeviceMesh, placements: dict[str, list[Any]]) -> Odd:
    """Each parameter dealt out by hand; those that are not named stay plain."""
    model = Odd()
    for name, where in placements.items():
        path, _, attr = name.rpartition(".")
        owner = model.get_submodule(path)
        param = nn.Parameter(distribute_tensor(getattr(owner, attr).detach(), mesh, where))
        setattr(owner, attr, param)
    model.tied.weight = model.a.weight
    return model


def check_layouts(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    cases: list[dict[str, list[Any]]] = [
        {"a.weight": [Shard(1)], "cube": [Shard(2)], "b.bias": [Shard(0)]},
        {"a.weight": [Shard(0)], "cube": [Shard(1)], "b.weight": [Replicate()]},
        {},
    ]
    for where in cases:
        sharded = FSDP2Model(placed(mesh, where), world)
        check_holds(sharded, values(), {})
        for name, placement in where.items():
            assert sharded.shard_dim(name) == getattr(placement[0], "dim", 0)
    if world.size == 4:
        grid = init_device_mesh("cpu", (2, 2))
        for where in ([Replicate(), Shard(1)], [Shard(0), Replicate()], [Replicate(), Replicate()]):
            check_holds(FSDP2Model(placed(grid, {"a.weight": where, "cube": where}), world), values(), {})


def check_wrapped(world: World) -> None:
    model = Odd()
    fully_shard(model, ignored_params={model.scalar})
    sharded = FSDP2Model(model, world)
    check_holds(sharded, values(), {})
    with torch.no_grad():
        model(torch.ones(2, 7))
    assert not isinstance(model.a.weight, DTensor)  # gathered, and read from where it is sharded all the same
    check_holds(sharded, values(), {})
    check_holds(FSDP2Model(model, world), values(), {})
    model(torch.ones(2, 7)).backward()
    assert sharded.clip_grad_norm(1e9) > 0  # a DTensor's and a plain tensor's gradient together


def check_loading(world: World) -> None:
    """A model on meta gets memory where it is written, ties are kept, and replicas get the first one's values."""
    expected = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(3)) for name, value in values().items()
    }
    grids = [init_device_mesh("cpu", (world.size,))]
    grids += [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))] if world.size == 4 else []
    for mesh in grids:
        for dim in (0, 2):
            with torch.device("meta"):
                model = Odd()
            # fully_shard wants other dimensions dealt evenly: only the cube's last one can be, over two ranks.
            num_parts = mesh.shape[-1]
            fully_shard(
                model,
                mesh=mesh,
                shard_placement_fn=lambda param, dim=dim, n=num_parts: Shard(dim if param.ndim == 3 and n == 2 else 0),
                ignored_params={model.scalar},
            )
            sharded = FSDP2Model(model, world)
            for tensor in sharded.plan.parameters:
                start, stop = sharded.ranges(tensor.name)[world.rank]
                whole = expected[tensor.name].movedim(sharded.shard_dim(tensor.name), 0).reshape(-1)
                sharded.write_local(tensor.name, whole[start:stop])
            sharded.copy_to_replicas()
            assert model.tied.weight is model.a.weight
            check_holds(sharded, expected, {})
            assert sharded.is_current()
            plain = Odd()
            with torch.no_grad():
                for name, param in plain.named_parameters():
                    param.copy_(expected[name])
                assert torch.allclose(model(torch.ones(2, 7)), plain(torch.ones(2, 7)), rtol=1e-5)
            check_holds(sharded, expected, {})
            with pytest.raises(ValueError, match=r"a\.weight: this rank holds elements .* due; \[999\] came"):
                sharded.write_local("a.weight", torch.zeros(999))


def check_refused(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    model = Odd()
    model.cube = nn.Parameter(DTensor.from_local(model.cube.detach(), mesh, [Partial()]))
    with pytest.raises(ModelError, match=r"cube: placements \(Partial"):
        FSDP2Model(model, world)
    backwards = DeviceMesh("cpu", list(reversed(range(world.size))))
    with pytest.raises(
        ModelError, match=r"cube: the mesh .* deals rows to ranks \[.*, 0\]; lockstep needs them ascending"
    ):
        FSDP2Model(placed(backwards, {"cube": [Shard(0)]}), world)


def check_all(world: World) -> None:
    for check in (check_layouts, check_wrapped, check_loading, check_refused):
        check(world)


@pytest.mark.parametrize("size", [2, 4])
def test_layouts_loading_and_refusals(size: int):
    run_ranks(size, check_all, timeout_s=200)


@pytest.mark.parametrize(("rows", "size"), [(0, 2), (1, 4), (3, 4), (4, 4), (5, 4), (10, 3)])
def test_rows_are_dealt_as_torch_chunk_deals_them(rows: int, size: int):
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(size)] if rows else []
    dealt = [(stop - start) // 6 for start, stop in row_ranges(rows, 6, size)]
    assert dealt == chunks + [0] * (size - len(chunks))
