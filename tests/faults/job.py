"""The job that is disturbed: steps of random calls, the same on all ranks, whose results are compared with a model."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from checked_calls import run_async, run_movement, run_reduction
from collective_cases import ring_in_a_batch
from collective_model import FLOATS, INTEGERS, MOVABLE, ops_of
from probes import backend_of, total
from torch import nn

from faults.page import Page
from ourddp import DistributedDataParallel

RESTART = "restart"  # the part of a job that makes the default group, uses and destroys it again and again


@dataclass(frozen=True)
class Job:
    """What one rank is to do."""

    name: str  # begins the job's keys in the store
    seed: int
    part: str  # RESTART or a name in PARTS
    rank: int
    world: int
    store: tuple[str, int]  # address and port
    timeout: float  # of the groups, in seconds
    patience: float = 30  # the same for the making of the default group
    own: str = ""  # what the rank does to itself, a name in OWN
    own_step: int = 0  # and in which step
    steps: int = 1 << 30  # after which the job ends by itself


Step = Callable[[Job, random.Random], None]


def collectives(job: Job, rng: random.Random) -> None:
    """Run a burst of calls, a large one, or one of any type, shape and layout."""
    rank, world = job.rank, job.world
    kind = rng.choice(["burst", "burst", "reduction", "movement", "large"])
    if kind == "burst":
        names = ["all_reduce", "all_reduce sync", "broadcast", "all_gather"]
        calls = [(rng.choice(names), rng.choice([1, 1000, 30_000, 200_000])) for _ in range(rng.randint(1, 8))]
        return run_async(rank, world, calls, [rng.randint(0, 99) for _ in calls])
    if kind == "large":
        tensor = torch.full((rng.choice([1 << 20, 1 << 22]),), float(rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(world * (world + 1) / 2).all()
        return None
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 3)))
    if rng.random() < 0.5:
        shape = (rng.randint(1, 9999),)
    layout = rng.choice(["contiguous", "transposed", "strided", "offset"])
    if kind == "movement":
        call = rng.choice(["broadcast", "all_gather", "gather", "scatter", "all_to_all"])
        return run_movement(rank, world, call, rng.choice(MOVABLE), shape, layout, rng.randint(0, 99))
    dtype = rng.choice([torch.bool, *INTEGERS, *FLOATS])
    call = rng.choice(["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"])
    return run_reduction(rank, world, call, dtype, rng.choice(ops_of(dtype)), shape, layout, rng.randint(0, 99))


def messages(job: Job, rng: random.Random) -> None:
    """Send to the next rank around the ring."""
    if rng.random() < 0.5:
        return ring_in_a_batch(job.rank, job.world)
    return run_movement(job.rank, job.world, "send", rng.choice(MOVABLE), (rng.randint(0, 70_000),), "contiguous", 1)


def training(job: Job, rng: random.Random) -> None:
    """Wrap a model and take some steps; each gradient must be the average of those that the ranks have alone."""
    torch.manual_seed(rng.randint(0, 99))
    width = rng.choice([8, 300])
    module = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    model = DistributedDataParallel(module, bucket_cap_mb=rng.choice([0.01, 25]))
    for step in range(3):
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(job.world)]
        losses = torch.stack([module(each).square().sum() for each in inputs])
        expected = torch.autograd.grad(losses.mean(), list(module.parameters()))
        model.zero_grad()
        model(inputs[job.rank]).square().sum().backward()
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.01 * parameter.grad


def groups(job: Job, rng: random.Random) -> None:
    """Make a group, use it and destroy it."""
    group = dist.new_group(timeout=timedelta(seconds=job.timeout))
    assert total(group) == job.world
    dist.destroy_process_group(group)


PARTS: dict[str, Step] = {
    "collectives": collectives,
    "messages": messages,
    "training": training,
    "groups": groups,
}


# --- what a rank does to itself --------------------------------------------------------------------------------------


class LeftError(Exception):
    """Ends the program of a rank."""


def _exit(page: Page) -> None:
    page.hit_at = time.monotonic()
    os._exit(0)


def _raise(page: Page) -> None:
    page.hit_at = time.monotonic()
    raise LeftError


def _sleep(_: Page) -> None:
    time.sleep(random.uniform(0.05, 0.4))


_held: list[object] = []


def _hog(_: Page) -> None:
    """Take memory of the group and 256 MiB besides, and touch all of it."""
    if not _held:
        memory = mmap.mmap(-1, 256 << 20)
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))
        shared = backend_of().allocate_tensor(1 << 22, dtype=torch.float32, device=torch.device("cpu"))
        _held.extend([memory, shared.zero_()])


# What it does, and whether only once.
OWN: dict[str, tuple[Callable[[Page], None], bool]] = {
    "exit": (_exit, True),
    "raise": (_raise, True),
    "sleep": (_sleep, False),
    "hog": (_hog, True),
}


# --- the job ---------------------------------------------------------------------------------------------------------


def _one_step(job: Job, page: Page, step: int) -> bool:
    """Take a step, unless the job is to end. Return whether it was taken."""
    page.doing = job.part
    go_on = torch.tensor([step < job.steps and not (job.rank == 0 and page.ends)])
    dist.broadcast(go_on, 0)
    if not go_on.item():
        return False
    if job.own:
        act, once = OWN[job.own]
        if step == job.own_step or (step > job.own_step and not once):
            act(page)
    if job.part != RESTART:
        PARTS[job.part](job, random.Random(f"{job.seed} {step}"))
    return True


def run(job: Job, page: Page) -> None:
    """Run a job to its end, or until something raises. ``page`` says meanwhile what this rank does."""
    store = dist.TCPStore(*job.store, is_master=False, timeout=timedelta(seconds=job.patience))
    step, goes_on = 0, True
    while goes_on:
        page.doing = "init"
        options = {"rank": job.rank, "world_size": job.world, "timeout": timedelta(seconds=job.patience)}
        dist.init_process_group("ours", store=dist.PrefixStore(f"{job.name}/{step}", store), **options)
        backend_of().set_timeout(timedelta(seconds=job.timeout))
        while goes_on := _one_step(job, page, step):
            step += 1
            if job.part == RESTART:
                break
        page.doing = "destroy"
        dist.destroy_process_group()
    page.doing = "end"
