"""Calls and models that differ on one rank: what each rank does, and what its error must say."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import backend_of, failed_with, total
from torch import nn

from ourddp import DistributedDataParallel

PATIENCE = 0.5  # the timeout in seconds of groups in which a rank does not come


@dataclass(frozen=True)
class Setting:
    """Where a rank calls."""

    group: Any
    other: Any  # a group of the same ranks
    rank: int
    world: int
    odd: bool  # whether this rank's call is the one that differs
    tensor: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One kind of mismatch."""

    call: Callable[[Setting], object]
    words: tuple[str, ...]  # in the error of every rank
    comes: bool = True  # whether all ranks come, so that the mismatch is found at once
    dtype: torch.dtype = torch.float32  # of the tensor of the rank that differs


def _other_order(s: Setting) -> None:
    calls = [lambda: dist.all_reduce(s.tensor, group=s.group), lambda: dist.barrier(group=s.group)]
    for call in reversed(calls) if s.odd else calls:
        call()


def _gather(s: Setting) -> None:
    count = 7 if s.odd else 6
    dist.all_gather([torch.empty(count) for _ in range(s.world)], torch.ones(count), s.group)


def _scatter_unevenly(s: Setting) -> None:
    parts = [torch.ones(6 if r == s.rank or not s.odd else 5) for r in range(s.world)]
    dist.reduce_scatter(torch.empty(6), parts, group=s.group)


def _exchange(s: Setting) -> None:
    sent = [2 if s.odd and r != s.rank else 3 for r in range(s.world)]
    dist.all_to_all_single(torch.empty(3 * s.world), torch.ones(sum(sent)), [3] * s.world, sent, group=s.group)


def _stay_away(s: Setting) -> None:
    if not s.odd:
        dist.all_reduce(s.tensor, group=s.group)


CASES = {
    "op": Case(
        lambda s: dist.broadcast(s.tensor, 0, s.group) if s.odd else dist.all_reduce(s.tensor, group=s.group),
        ("broadcast", "all_reduce"),
    ),
    "order": Case(_other_order, ("barrier", "all_reduce")),
    "root": Case(lambda s: dist.broadcast(s.tensor, 1 if s.odd else 0, s.group), ("root 0", "root 1")),
    "count": Case(
        lambda s: dist.all_reduce(s.tensor[: 5 if s.odd else 6], group=s.group), ("5 x float32", "6 x float32")
    ),
    "dtype": Case(lambda s: dist.all_reduce(s.tensor, group=s.group), ("6 x int32", "6 x float32"), dtype=torch.int32),
    "reduce op": Case(
        lambda s: dist.all_reduce(s.tensor, dist.ReduceOp.MAX if s.odd else dist.ReduceOp.SUM, s.group), ("MAX", "SUM")
    ),
    "size of a gathered tensor": Case(_gather, ("24", "28")),
    "sizes of the parts of a reduce_scatter": Case(_scatter_unevenly, ("reduce_scatter",)),
    "splits of an all_to_all": Case(_exchange, ("all_to_all", "8 bytes", "12")),
    "group": Case(
        lambda s: dist.all_reduce(s.tensor, group=s.other if s.odd else s.group), ("Timed out waiting",), comes=False
    ),
    "missing rank": Case(_stay_away, ("Timed out waiting",), comes=False),
}


@dataclass(frozen=True)
class Found:
    """What a rank has found."""

    text: str  # its error; empty if it made no call
    again: str  # that of the next call
    seconds: float  # until the first error


def mismatch(rank: int, world: int, kind: str, odd: int) -> Found:
    """Make the calls of a kind; that of rank ``odd`` differs. Then check that other groups work."""
    case = CASES[kind]
    group, other = dist.new_group(), dist.new_group()  # their failure must not fail another group
    for each in (group, other):
        dist.barrier(group=each)
        if not case.comes:
            backend_of(each).set_timeout(timedelta(seconds=PATIENCE))
    dist.barrier()
    tensor = torch.ones(6, dtype=case.dtype if rank == odd else torch.float32)
    start, text = time.monotonic(), ""
    try:
        case.call(Setting(group, other, rank, world, rank == odd, tensor))
        assert kind == "missing rank", "the call succeeded"
        assert rank == odd, "the call succeeded"
    except dist.DistBackendError as error:
        text = str(error)
    seconds = time.monotonic() - start
    assert torch.equal(tensor, torch.ones_like(tensor)), "the input was written in spite of the error"
    dist.barrier()
    with pytest.raises(dist.DistBackendError) as again:
        dist.barrier(group=group)
    assert failed_with("COMM_ERROR" if case.comes else "TIMEOUT", group)
    for each in (group, other):
        dist.destroy_process_group(each)
    another = dist.new_group()
    assert total() == total(another) == world, "the failure concerns other groups as well"
    dist.destroy_process_group(another)
    return Found(text, str(again.value), seconds)


def check(kind: str, odd: int, one_node: bool, results: list[Found]) -> float:
    """Check what all ranks have found. Return the longest time until an error beyond what was to be waited for."""
    case = CASES[kind]
    for rank, found in enumerate(results):
        if kind == "missing rank" and rank == odd:
            continue
        for word in case.words:
            assert word in found.text, found.text
        named = {int(number) for number in re.findall(r"\brank (\d+) \(host", found.text)}
        others = set(range(len(results))) - {odd}
        assert named & (others if kind == "group" and rank == odd else {odd}), f"the rank is not named: {found.text}"
        if case.comes:
            assert len(named) >= 2, f"the ranks that differ are not named: {found.text}"
            assert not one_node or "rank 0" in found.text, "within a node, all ranks are named"
            assert found.again == found.text, "the group does not stay failed with the same message"
    waited = 0 if case.comes else PATIENCE
    return max(found.seconds for found in results) - waited


# --- models ----------------------------------------------------------------------------------------------------------


def build_different(rank: int, world: int, kind: str) -> str:
    """Wrap a model, which differs on rank 1. Return the error."""
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 5 if kind == "shape" and rank == 1 else 4))
    if kind in ("frozen", "strides"):
        module = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(3)))
    if rank == 1:
        if kind == "count":
            module.append(nn.Linear(4, 2))
        elif kind == "dtype":
            module[1].double()
        elif kind == "frozen":
            module[1].weight.requires_grad_(False)
        elif kind == "strides":
            module[2].to(memory_format=torch.channels_last)
    try:
        DistributedDataParallel(module)
    except RuntimeError as error:
        return str(error)
    return "accepted"


DIFFERENCES = {
    "shape": [r"1\.weight", r"float32 \[4, 3\] on rank 0", r"float32 \[5, 3\] on rank 1"],
    "dtype": [r"1\.weight", r"float32 \[4, 3\] on rank 0", r"float64 \[4, 3\] on rank 1"],
    "count": [r"rank 0 has 4 params, while rank 1 has 6", r"2\.weight"],
    "frozen": [r"parameter 2 \(1\.weight / 1\.bias\) is float32 \[4, 4, 3, 3\] on rank 0", r"float32 \[4\] on rank 1"],
    "strides": [r"2\.weight", r"float32 \[4, 4, 3, 3\] with strides \[36, 1, 12, 4\] on rank 1"],
}


def check_difference(kind: str, messages: list[str]) -> None:
    """Check the errors of all ranks."""
    assert len(set(messages)) == 1
    for pattern in DIFFERENCES[kind]:
        assert re.search(pattern, messages[0]), messages[0]
