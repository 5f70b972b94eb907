"""torch's DTensor and what is built on it, over ours: a model in slices trains as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

BATCH, STEPS = 8, 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 5), nn.LogSoftmax(1))


def train(model: nn.Module, batch: int, share: slice) -> list[float]:
    # Not all at once, as on GPUs otherwise: torch refuses that for DTensors among ordinary ones.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    generator, losses = torch.Generator().manual_seed(1), []
    device = next(model.parameters()).device
    for _ in range(STEPS):
        inputs = torch.randn(batch, 6, generator=generator)[share].to(device)
        targets = torch.randint(5, (batch,), generator=generator)[share].to(device)
        optimizer.zero_grad()
        loss = functional.nll_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("world", "data"), [(2, 1), (4, 1), (4, 2)])
@in_ranks()
def test_a_model_in_slices_trains_like_one_process(rank: int, world: int, data: int, device: str) -> None:
    alone, model = make_model(), make_model().to(device)
    expected = train(alone, BATCH * data, slice(None))
    mesh = init_device_mesh(device, (data, world // data), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if data > 1:
        fully_shard(model, mesh=mesh["data"])
    first = mesh.get_local_rank("data") * BATCH
    losses = torch.tensor(train(model, BATCH * data, slice(first, first + BATCH)))
    dist.all_reduce(losses, group=mesh["data"].get_group())
    torch.testing.assert_close(losses / data, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert model[0].weight.to_local().numel() == model[0].weight.numel() / world
    for (name, sliced), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        sliced = sliced.full_tensor() if isinstance(sliced, DTensor) else sliced
        torch.testing.assert_close(sliced.cpu(), whole, rtol=1e-4, atol=1e-6, msg=name)
