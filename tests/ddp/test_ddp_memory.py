"""The memory that DistributedDataParallel adds to a training step.

A process's own memory is its anonymous pages and its share of the memory files that the ranks of a node have in common.
The kernel divides a shared page among those that have mapped it, whoever owns it, so only the sum over all ranks is
what they take. It is looked at with all ranks at the same place: between the layers in backward, after backward and
after the optimizer, in the very first steps too. For what is gone again by the next look there is the kernel's record
of the most pages that were mapped in a step, from which the shared ones that were mapped at its beginning or its end
are taken out.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.distributed as dist
from own_pages import pages, shared_bytes
from ranks import gloo_group, run_ranks
from torch import nn

from ourddp import DistributedDataParallel

MIB = 1 << 20
RANKS = 2
WIDTH, LAYERS = 2048, 4  # 16 MiB a layer
GRADIENTS = LAYERS * (WIDTH + 1) * WIDTH * 4
BUCKET = 25 * MIB
# Pages at the ends of tensors, small blocks of the C library's, stacks. About 0.1 MiB is used.
ALLOWANCE = 4 * MIB

M_MMAP_THRESHOLD = -3


class _Layers(nn.Module):
    """Large layers, between which backward looks at the memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.looks = []
        self.shared_pages = 0

    def look(self, step_ends=False):
        dist.barrier(gloo_group())
        now = pages()
        anonymous = now["RssAnon"]
        if step_ends:
            anonymous = now["VmHWM"] - now["RssFile"] - max(self.shared_pages, now["RssShmem"])
        self.looks.append(anonymous + shared_bytes())
        dist.barrier(gloo_group())

    def begin_step(self):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self.shared_pages = pages()["RssShmem"]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            # A hook that autograd knew of would have all gradients copied.
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, self.unpack):
                x = x.tanh()
        return x

    def unpack(self, saved):
        self.look()
        return saved


def _looks(model, layers):
    """Return the memory that this rank had at each look of a few steps."""
    layers.looks = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        layers.begin_step()
        model(torch.randn(2, WIDTH)).square().mean().backward()
        layers.look()
        optimizer.step()
        layers.look(step_ends=True)
    optimizer.zero_grad(set_to_none=True)
    return layers.looks


def _measure(rank, world, options):
    """Return the looks of a few steps without and with DistributedDataParallel."""
    # Tensors come from the system and go back to it, instead of to lists of the C library's.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10) == 1
    # The group's own: staging for large messages, and a communication thread.
    dist.all_reduce(torch.ones(8 * MIB), async_op=True).wait()
    layers = _Layers()
    return _looks(layers, layers), _looks(DistributedDataParallel(layers, **options), layers)


def _extra(options, **env):
    """Return how much more memory the steps of all ranks take with DistributedDataParallel, in bytes."""
    alone, replicated = zip(*run_ranks(RANKS, _measure, options, env=env), strict=True)
    return _peak(replicated) - _peak(alone)


def _peak(looks):
    """Return the most that all ranks took at one look."""
    return max(map(sum, zip(*looks, strict=True)))


def test_one_bucket_is_the_most_that_is_added():
    assert _extra({}) <= RANKS * BUCKET + ALLOWANCE


def test_gradients_that_are_buckets_add_one_on_its_way_into_its_bucket():
    assert _extra({"gradient_as_bucket_view": True}) <= RANKS * GRADIENTS // LAYERS + ALLOWANCE


def test_buffers_of_all_buckets_would_be_seen():
    assert _extra({}, OURS_REDUCE_IN_PLACE="0") > RANKS * 2 * BUCKET
