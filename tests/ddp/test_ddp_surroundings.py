"""DistributedDataParallel among others: a compiled model, threads of Python, a peer that dies."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    CLASSES,
    assert_same,
    backward,
    batches,
    gradients,
    loss_of,
    make_model,
    reference_gradients,
    share,
)
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel


class Layers(nn.Module):
    """Layers of 256 KiB: seven of them are more than one bucket of 1 MiB."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(7))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _count_nodes(counts, graph, inputs):
    counts.append(len(graph.graph.nodes))
    return graph


@in_ranks(2, timeout=120)
def test_a_compiled_model_is_split_where_torchs_is(rank, world):
    x = torch.ones(2, 256) * (rank + 1)
    counts, found = [], []
    for cls in CLASSES:
        torch.compiler.reset()
        graphs: list[int] = []
        model = cls(Layers(), bucket_cap_mb=1)
        compiled = torch.compile(model, backend=functools.partial(_count_nodes, graphs))
        for _ in range(2):
            model.zero_grad()
            compiled(x).sum().backward()
        counts.append(graphs)
        found.append(gradients(model))
        model.zero_grad()
        model(x).sum().backward()
        assert_same(found[-1], gradients(model), f"rank {rank}")
    assert_same(found[1], found[0], f"rank {rank}")
    theirs, mine = counts
    assert mine == theirs
    assert len(mine) > 1


@in_ranks(2, timeout=120)
def test_torchs_python_reducer_can_take_over(rank, world):
    """Let torch reduce each gradient by itself, in a way that compiled autograd can trace."""
    from torch._dynamo import config

    expected = reference_gradients("mlp", world, 2, lr=0.0)
    model = DistributedDataParallel(make_model("mlp"))
    with config.patch(optimize_ddp="python_reducer"):
        traced = DistributedDataParallel(make_model("mlp"))
    for step, batch in enumerate(batches(world, 2)):
        for each in (model, traced):
            each.zero_grad()
            backward(each, batch, rank)
            assert_same(gradients(each), expected[step], f"rank {rank} step {step}")
    assert model.reducer._get_backward_times().iteration == 2
    assert traced.reducer._get_backward_times().iteration == 0


@in_ranks(2, timeout=120)
def test_compiled_autograd_without_it_says_what_to_do(rank, world):
    model = DistributedDataParallel(make_model("mlp"))
    with (
        pytest.raises(NotImplementedError, match="python_reducer"),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        backward(model, next(batches(world, 1)), rank)


@in_ranks(2, "backend")
def test_backward_waits_without_the_gil(rank, world):
    """Counts what a Python thread does while backward waits for a rank that comes late."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    store = dist.PrefixStore("beside_backward", dist.distributed_c10d._get_default_store())
    count, stop = 0, threading.Event()

    def work():
        nonlocal count
        while not stop.is_set():
            count += 1
            if count == 1000:
                store.set("free", "")

    output = model(torch.ones(1, 4)).sum()
    if rank == 0:
        thread = threading.Thread(target=work)
        thread.start()
    else:
        # Only a thread of rank 0 lets this rank go on; it cannot if rank 0 waits with the GIL held.
        store.wait(["free"])
    output.backward()
    if rank == 0:
        stop.set()
        thread.join()
        assert count >= 1000


@in_ranks(2, fresh=True)
def test_its_group_may_go_with_it_while_threads_of_the_group_need_the_gil(rank, world):
    """A thread of Gloo drops the tensor of the last call, which is Python's, and its group waits for the thread."""
    group = dist.new_group(backend="gloo")
    model = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True)
    dist.destroy_process_group(group)
    del group
    del model


def _peer_dies(rank, world):
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002)
    for step, batch in enumerate(batches(world, 3)):
        loss = loss_of(model(share(batch, rank)))
        if step < 2:
            loss.backward()
        elif rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        loss.backward()
    return time.monotonic() - began


def test_a_peer_that_dies_ends_backward_with_its_name(rank_pool):
    first, _, last = rank_pool(3, "ours").run(_peer_dies, killed=[1])
    assert max(first, last) < 5


@in_ranks(2, "backend")
def test_a_backward_that_failed_before_any_gradient_is_forgotten(rank, world):
    expected = reference_gradients("mlp", world, 2, lr=0.0)
    model = DistributedDataParallel(make_model("mlp"))
    first, second = batches(world, 2)
    broken = model(share(first, rank))
    broken.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(broken).backward()
    backward(model, second, rank)
    assert_same(gradients(model), expected[1], f"rank {rank}")
