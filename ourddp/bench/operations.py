"""Every collective as a benchmark case: its buffers, the call through torch, the call through MPI, the right result.

The size of a case is that of a rank's larger buffer: what all_gather returns, what reduce_scatter takes. Elements are
float32, the reduction is SUM. Input element i of rank r is `(i mod 8192) mod 13 + r`, a small whole number: every sum
is exact, and any element of any result can be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch.distributed.distributed_c10d import AllgatherOptions

from ourddp import functional

PERIOD = 8192


@dataclass
class Buffers:
    """One rank's tensors for one size: `count` elements, or `count // ranks` a rank where a collective splits them."""

    rank: int
    ranks: int
    large: torch.Tensor  # (count,), count divisible by ranks
    small: torch.Tensor  # (count // ranks,)
    other: torch.Tensor  # (count,), where a collective needs a second large one

    @staticmethod
    def make(rank: int, ranks: int, size: int, device: str = "cpu") -> Buffers:
        """Allocate buffers of about `size` bytes."""
        count = Buffers.elements(ranks, size)
        return Buffers(rank, ranks, *(torch.empty(each, device=device) for each in (count, count // ranks, count)))

    @staticmethod
    def elements(ranks: int, size: int) -> int:
        """Return how many elements make up about `size` bytes: at least one for each rank."""
        return max(1, size // 4 // ranks) * ranks

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a large buffer, one for each rank."""
        return list(tensor.chunk(self.ranks))

    def pair(self) -> int | None:
        """Return the other rank of this rank's ping-pong pair: 0 and 1, 2 and 3, ...; None for an odd one left over."""
        partner = self.rank ^ 1
        return partner if partner < self.ranks else None


def fill(tensor: torch.Tensor, rank: int) -> None:
    """Write rank `rank`'s input into `tensor`."""
    pattern = _input(rank)
    for piece in tensor.split(len(pattern)):
        piece.copy_(pattern[: len(piece)])


@cache
def _input(rank: int) -> torch.Tensor:
    return _pattern(torch.arange(16 * PERIOD)) + rank


def _pattern(index: torch.Tensor) -> torch.Tensor:
    return (index % PERIOD % 13).float()


def differs(tensor: torch.Tensor, expected: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether some of the (at least 65,536, or all) elements looked at are not `expected(their indices)`."""
    count = len(tensor)
    index = torch.arange(0, count, max(1, count // 65536) | 1)
    return not torch.equal(tensor[index.to(tensor.device)].cpu(), expected(index))


def _no_result(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    raise AssertionError("this operation has no result to check")


@dataclass(frozen=True)
class Operation:
    """A collective: how torch and MPI call it, which buffer is the input, and which buffer the result is in.

    `expected(buffers, i)` is what the elements i of this rank's result must be. `torch` and `mpi` get the buffers and a
    group or communicator, and return the call. Where `half` is set the call is a round trip, and its time halved.
    """

    torch: Callable[[Buffers, Any], Callable[[], object]]
    mpi: Callable[[Buffers, Any], Callable[[], object]]
    source: str = "large"
    result: str | None = "large"
    only_root: bool = False
    expected: Callable[[Buffers, torch.Tensor], torch.Tensor] = _no_result
    half: bool = False

    def prepare(self, buffers: Buffers) -> None:
        """Write the input."""
        fill(getattr(buffers, self.source), buffers.rank)

    def touch(self, buffers: Buffers) -> None:
        """Read the input, and write it once more."""
        if self.has_size:
            getattr(buffers, self.source).add_(0)

    @property
    def changes_input(self) -> bool:
        """Return whether a call reads what the one before it wrote, as a sum in place does."""
        return self.source == self.result and self.expected is _sum

    @property
    def has_size(self) -> bool:
        """Return whether a call moves data, unlike a barrier."""
        return self.result is not None

    def is_wrong(self, buffers: Buffers) -> bool:
        """Return whether the result that the call left on this rank is not the right one."""
        if self.result is None or (self.only_root and buffers.rank != 0):
            return False
        return differs(getattr(buffers, self.result), lambda index: self.expected(buffers, index))


def _sum(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    return b.ranks * _pattern(i) + b.ranks * (b.ranks - 1) // 2


def _scattered_sum(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    return _sum(b, i + b.rank * len(b.small))


def _gathered(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    return _pattern(i % len(b.small)) + i // len(b.small)


def _from_root(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    return _pattern(i)


def _scattered(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    return _pattern(i + b.rank * len(b.small))


def _exchanged(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    return _pattern(i % len(b.small) + b.rank * len(b.small)) + i // len(b.small)


def _torch_ping_pong(b: Buffers, g: dist.ProcessGroup) -> Callable[[], object]:
    partner = b.pair()

    def send() -> None:
        dist.send(b.large, partner, group=g)

    def receive() -> None:
        dist.recv(b.other, partner, group=g)

    return _ping_pong(b, send, receive)


def _mpi_ping_pong(b: Buffers, c: Any) -> Callable[[], object]:
    partner, large, other = b.pair(), b.large.numpy(), b.other.numpy()
    return _ping_pong(b, lambda: c.Send(large, partner), lambda: c.Recv(other, partner))


def _ping_pong(b: Buffers, send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], object]:
    partner = b.pair()
    if partner is None:
        return lambda: None
    return (lambda: (send(), receive())) if b.rank < partner else (lambda: (receive(), send()))


def _of_partner(b: Buffers, i: torch.Tensor) -> torch.Tensor:
    partner = b.pair()
    return b.other[i] if partner is None else _pattern(i) + partner


def _mpi_all_reduce(b: Buffers, c: Any) -> Callable[[], object]:
    from mpi4py import MPI

    return partial(c.Allreduce, MPI.IN_PLACE, b.large.numpy())


def _mpi_async_all_reduce(b: Buffers, c: Any) -> Callable[[], object]:
    from mpi4py import MPI

    array = b.large.numpy()
    return lambda: c.Iallreduce(MPI.IN_PLACE, array).Wait()


def _mpi_reduce(b: Buffers, c: Any) -> Callable[[], object]:
    from mpi4py import MPI

    return partial(c.Reduce, *((MPI.IN_PLACE, b.large.numpy()) if b.rank == 0 else (b.large.numpy(), None)))


def _mpi(name: str, source: str, result: str) -> Callable[[Buffers, Any], Callable[[], object]]:
    """Return the MPI call `name` from one buffer to another; with a root, only the root has the large one."""

    def prepare(b: Buffers, c: Any) -> Callable[[], object]:
        rooted = name in ("Gather", "Scatter")
        arrays = [
            None if rooted and which == "large" and b.rank != 0 else getattr(b, which).numpy()
            for which in (source, result)
        ]
        return partial(getattr(c, name), *arrays)

    return prepare


def _own(method: Callable[..., Any], *args: object, options: Any = None) -> Callable[[], object]:
    """Return the call of a process group's method, which waits if the method does not."""
    if options is not None:
        options.asyncOp = False
        args = (*args, options)

    def call() -> None:
        work = method(*args)
        if work is not None:
            work.wait()

    return call


def _own_ping_pong(b: Buffers, g: dist.ProcessGroup) -> Callable[[], object]:
    partner = b.pair()
    return _ping_pong(b, _own(g.send, [b.large], partner, 0), _own(g.recv, [b.other], partner, 0))


def _torch_async_all_reduce(b: Buffers, g: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.all_reduce(b.large, group=g, async_op=True).wait()


def _functional_all_reduce(b: Buffers, g: dist.ProcessGroup) -> Callable[[], object]:
    def call() -> None:
        b.other = torch_functional.wait_tensor(torch_functional.all_reduce(b.large, "sum", g))

    return call


def _operator_all_reduce(b: Buffers, g: dist.ProcessGroup) -> Callable[[], object]:
    def call() -> None:
        b.other = functional.all_reduce(b.large, "sum", g)

    return call


def _none_in_mpi(b: Buffers, c: Any) -> Callable[[], object]:
    raise NotImplementedError


def _rooted(collective: Callable[..., object]) -> Callable[[Buffers, Any], Callable[[], object]]:
    """Return torch's call of `collective` between the small buffers and the parts of rank 0's large one."""
    return lambda b, g: partial(collective, b.small, b.parts(b.large) if b.rank == 0 else None, group=g)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        torch=lambda b, g: partial(dist.all_reduce, b.large, group=g),
        mpi=_mpi_all_reduce,
        expected=_sum,
    ),
    "async_all_reduce": Operation(
        torch=_torch_async_all_reduce,
        mpi=_mpi_async_all_reduce,
        expected=_sum,
    ),
    "functional_all_reduce": Operation(
        torch=_functional_all_reduce,
        mpi=_none_in_mpi,
        result="other",
        expected=_sum,
    ),
    "operator_all_reduce": Operation(
        torch=_operator_all_reduce,
        mpi=_none_in_mpi,
        result="other",
        expected=_sum,
    ),
    "reduce": Operation(
        torch=lambda b, g: partial(dist.reduce, b.large, 0, group=g),
        mpi=_mpi_reduce,
        expected=_sum,
        only_root=True,
    ),
    "broadcast": Operation(
        torch=lambda b, g: partial(dist.broadcast, b.large, 0, group=g),
        mpi=lambda b, c: partial(c.Bcast, b.large.numpy()),
        expected=_from_root,
    ),
    "all_gather": Operation(
        torch=lambda b, g: partial(dist.all_gather, b.parts(b.large), b.small, group=g),
        mpi=_mpi("Allgather", "small", "large"),
        source="small",
        expected=_gathered,
    ),
    "all_gather_into_tensor": Operation(
        torch=lambda b, g: partial(dist.all_gather_into_tensor, b.large, b.small, group=g),
        mpi=_mpi("Allgather", "small", "large"),
        source="small",
        expected=_gathered,
    ),
    "gather": Operation(
        torch=_rooted(dist.gather),
        mpi=_mpi("Gather", "small", "large"),
        source="small",
        only_root=True,
        expected=_gathered,
    ),
    "scatter": Operation(
        torch=_rooted(dist.scatter),
        mpi=_mpi("Scatter", "large", "small"),
        result="small",
        expected=_scattered,
    ),
    "reduce_scatter": Operation(
        torch=lambda b, g: partial(dist.reduce_scatter, b.small, b.parts(b.large), group=g),
        mpi=_mpi("Reduce_scatter_block", "large", "small"),
        result="small",
        expected=_scattered_sum,
    ),
    "reduce_scatter_tensor": Operation(
        torch=lambda b, g: partial(dist.reduce_scatter_tensor, b.small, b.large, group=g),
        mpi=_mpi("Reduce_scatter_block", "large", "small"),
        result="small",
        expected=_scattered_sum,
    ),
    "all_to_all": Operation(
        torch=lambda b, g: partial(dist.all_to_all, b.parts(b.other), b.parts(b.large), group=g),
        mpi=_mpi("Alltoall", "large", "other"),
        result="other",
        expected=_exchanged,
    ),
    "all_to_all_single": Operation(
        torch=lambda b, g: partial(dist.all_to_all_single, b.other, b.large, group=g),
        mpi=_mpi("Alltoall", "large", "other"),
        result="other",
        expected=_exchanged,
    ),
    "ping_pong": Operation(
        torch=_torch_ping_pong,
        mpi=_mpi_ping_pong,
        result="other",
        expected=_of_partner,
        half=True,
    ),
    "barrier": Operation(
        torch=lambda b, g: partial(dist.barrier, group=g),
        mpi=lambda b, c: c.Barrier,
        source="small",
        result=None,
    ),
}

# The process group's own methods: the same without the Python functions of torch.distributed, which take as long for
# every backend.
_OWN: dict[str, Callable[[Buffers, Any], Callable[[], object]]] = {
    "all_reduce": lambda b, g: _own(g.allreduce, [b.large], options=dist.AllreduceOptions()),
    "reduce": lambda b, g: _own(g.reduce, [b.large], options=dist.ReduceOptions()),
    "broadcast": lambda b, g: _own(g.broadcast, [b.large], options=dist.BroadcastOptions()),
    "all_gather_into_tensor": lambda b, g: _own(g._allgather_base, b.large, b.small, options=AllgatherOptions()),
    "gather": lambda b, g: _own(
        g.gather, [b.parts(b.large)] if b.rank == 0 else [], [b.small], options=dist.GatherOptions()
    ),
    "scatter": lambda b, g: _own(
        g.scatter, [b.small], [b.parts(b.large)] if b.rank == 0 else [], options=dist.ScatterOptions()
    ),
    "reduce_scatter_tensor": lambda b, g: _own(
        g._reduce_scatter_base, b.small, b.large, options=dist.ReduceScatterOptions()
    ),
    "all_to_all_single": lambda b, g: _own(g.alltoall_base, b.other, b.large, [], [], options=dist.AllToAllOptions()),
    "ping_pong": _own_ping_pong,
    "barrier": lambda b, g: _own(g.barrier, options=dist.BarrierOptions()),
}
OWN = "process_group_"
OPERATIONS |= {OWN + name: replace(OPERATIONS[name], torch=call) for name, call in _OWN.items()}
