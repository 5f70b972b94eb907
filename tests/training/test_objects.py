"""Objects that are broadcast and gathered, short and long ones, and errors that all ranks raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks

import ourddp
from ourddp.objects import SHORT_BYTES, raise_on_all


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("this one stays")


class Counted:
    """Counts the calls of a function of torch.distributed."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.calls = 0
        self._function = getattr(dist, name)
        patch.setattr(dist, name, self)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        return self._function(*arguments, **keywords)


@in_ranks(3, "backend", "nodes")
def test_objects_of_all_lengths_are_gathered(rank: int, world: int) -> None:
    for length in (0, 1, SHORT_BYTES - 60, SHORT_BYTES, 3 * SHORT_BYTES + 1):
        own = {"rank": rank, "text": "x" * (length + rank)}
        expected = [{"rank": other, "text": "x" * (length + other)} for other in range(world)]
        assert ourddp.allgather_object(own) == expected
    mixed = ourddp.allgather_object(b"a" * (9000 if rank == 1 else 1))
    assert list(map(len, mixed)) == [1, 9000, 1]


@in_ranks(2)
def test_short_objects_take_one_collective(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gather = Counted(patch, "all_gather_into_tensor")
        ourddp.allgather_object("short")
        assert gather.calls == 1
        ourddp.allgather_object("x" * SHORT_BYTES)
        assert gather.calls == 3


@in_ranks(3, "backend")
def test_an_object_is_broadcast_from_any_rank(rank: int, world: int) -> None:
    for root in range(world):
        own = {"from": rank, "tensor": torch.arange(rank + 1)}
        received = ourddp.broadcast_object(own, root)
        assert received["from"] == root
        assert torch.equal(received["tensor"], torch.arange(root + 1))
        assert (received is own) == (rank == root)
    assert ourddp.broadcast_object("of the root" if rank == 0 else None, name="any") == "of the root"


@in_ranks(3)
def test_a_group_of_some_ranks_has_ranks_of_its_own(rank: int, world: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    assert ourddp.allgather_object(rank, process_group=group) == [1, 2]
    assert ourddp.broadcast_object(rank, 1, process_group=group) == 2


@in_ranks(2)
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks(rank: int, world: int) -> None:
    own = Unpicklable() if rank == 1 else 1
    with pytest.raises(ValueError, match=r"cannot be gathered: rank 1: RuntimeError: this one stays"):
        ourddp.allgather_object(own)
    with pytest.raises(ValueError, match=r"object of rank 1 cannot be pickled: RuntimeError: this one stays"):
        ourddp.broadcast_object(own, 1)
    assert ourddp.broadcast_object(own, 0) == 1
    with pytest.raises(ValueError, match="root_rank is 2, but the group has the ranks 0 to 1"):
        ourddp.broadcast_object(own, 2)


@in_ranks(3, "backend")
def test_an_error_of_one_rank_is_raised_on_all(rank: int, world: int) -> None:
    raise_on_all("nothing failed", None)
    own = OSError("disk full") if rank == 2 else None
    with pytest.raises(RuntimeError, match=r"^not written: rank 2: OSError: disk full$") as caught:
        raise_on_all("not written", own)
    assert caught.value.__cause__ is own
