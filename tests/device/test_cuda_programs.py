"""What programs do with CUDA beside single collectives: graphs of it, and compiled models."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_cases import assert_same, backward, batches, gradients, make_model, reference_gradients
from device_cases import here
from ranks import in_ranks

from ourddp import DistributedDataParallel

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kind", ["cuda"], indirect=True)]


@in_ranks(1, "backend")
def test_a_graph_replays_collectives(rank: int, world: int, kind: str) -> None:
    """Those that are captured see what the graph's inputs are at each replay."""
    device = here(kind)
    x = torch.ones(1000, device=device)
    output = torch.zeros(1000, device=device)
    dist.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped = x * 2
        work = dist.all_reduce(dropped, async_op=True)
        work.wait()
        dist.all_gather_into_tensor(output, dropped)
        output.add_(1)
        del dropped, work
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert output.cpu().eq(2 * value + 1).all()
    dist.all_reduce(x)
    assert x.cpu().eq(5).all()


@in_ranks(2, "backend")
def test_a_capture_goes_on_after_a_refusal(rank: int, world: int, kind: str) -> None:
    """Ranks that share a device need the host, which no graph has; the capture itself is not broken."""
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(RuntimeError, match=r"all_reduce of tensors on .* cannot be captured"):
            dist.all_reduce(y)
    graph.replay()
    assert y.cpu().eq(world + 1).all()
    dist.all_reduce(x)
    assert x.cpu().eq(world * world).all()


@pytest.mark.timeout(240)
@in_ranks(2, "backend", timeout=180)
def test_a_compiled_model_has_the_gradients_of_one_process(rank: int, world: int, kind: str) -> None:
    expected = reference_gradients("mlp", world, 2, lr=0.0)
    model = DistributedDataParallel(make_model("mlp").to(here(kind)), bucket_cap_mb=1)
    compiled = torch.compile(model)
    for step, batch in enumerate(batches(world, 2)):
        model.zero_grad()
        backward(compiled, batch, rank)
        assert_same(gradients(model), expected[step], f"rank {rank} step {step}")
