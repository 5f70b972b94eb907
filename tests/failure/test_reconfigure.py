"""Other ranks in the same group, by c10d's reconfigure(): those that are left go on, and others join them."""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import backend_of, is_to_store, tcp_connections, total
from ranks import in_ranks, run_ranks
from symmetric import share, symm_mem
from torch import nn

import ourddp

pytestmark = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_reconfigure"), reason="torch has reconfigure() from 2.15 on"
)

PATIENCE = datetime.timedelta(seconds=30)


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def publish(name: str, who: int) -> None:
    default_store().set(f"{name}/{who}", dist.distributed_c10d._get_reconfigure_handle())


def handles_of(name: str, members: Any) -> list[str]:
    return [default_store().get(f"{name}/{who}").decode() for who in members]


def exchange(name: str, who: int, members: Any) -> list[str]:
    """Return the handles of the members, which all of them publish under the same name."""
    publish(name, who)
    return handles_of(name, members)


def reconfigure(uuid: int, handles: Any, timeout: datetime.timedelta = PATIENCE) -> None:
    work = dist.distributed_c10d._reconfigure(uuid=uuid, handles=handles, timeout=timeout)
    assert work.wait()
    assert work.is_completed()


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# --- the contract ----------------------------------------------------------------------------------------------------


@in_ranks(3, "nodes", fresh=True, enable_reconfigure=True)
def test_ranks_leave_come_and_change_their_order(rank: int, world: int) -> None:
    assert dist.distributed_c10d._supports_reconfigure()
    assert backend_of().supports_reconfigure
    reconfigure(100, exchange("all", rank, range(3)))
    assert place() == (rank, 3)
    assert total(value=rank) == 3
    # The order of a list is that of the ranks.
    reconfigure(101, exchange("reversed", rank, [2, 1, 0]))
    assert place() == (2 - rank, 3)
    dist.broadcast(tensor := torch.tensor(float(rank)), 0)
    assert tensor == 2
    # One leaves. It has a group of its own then.
    members = [1] if rank == 1 else [0, 2]
    reconfigure(102 + len(members), exchange("apart", rank, members))
    assert place() == (members.index(rank), len(members))
    assert total(value=rank) == sum(members)
    sent = torch.tensor([float(rank)])
    if len(members) == 2:  # messages, and a group of the new ranks
        other = dist.irecv(received := torch.zeros(1), 1 - dist.get_rank())
        dist.send(sent, 1 - dist.get_rank())
        other.wait()
        assert received.item() == 2 - rank
    reconfigure(105, exchange("together", rank, range(3)))
    assert total() == 3
    assert dist.get_rank(dist.new_group([0, 1, 2])) == rank


@in_ranks(3, fresh=True, enable_reconfigure=True)
def test_a_set_puts_newcomers_behind_those_that_were_there(rank: int, world: int) -> None:
    if rank != 0:  # 2 becomes rank 0
        reconfigure(1, exchange("first", rank, [2, 1]))
    reconfigure(2, set(exchange("second", rank, range(3))))
    assert place() == ([2, 1, 0][rank], 3)
    assert total(value=rank) == 3


@in_ranks(3, fresh=True, enable_reconfigure=True)
def test_old_ranks_and_newcomers_shrink_the_group_together(rank: int, world: int) -> None:
    if rank != 2:
        reconfigure(1, exchange("first", rank, [0, 1]))
        backend_of().shrink([], 0)
    reconfigure(2, exchange("second", rank, range(3)))
    if rank != 1:
        shrunk = backend_of().shrink([1], 0)
        shrunk.allreduce([tensor := torch.ones(3)]).wait()
        assert tensor.tolist() == [2.0] * 3


@in_ranks(2, "nodes", fresh=True)
def test_a_group_that_was_made_in_the_usual_way_can_change_its_ranks(rank: int, world: int) -> None:
    assert total() == 2
    reconfigure(1, exchange("swapped", rank, [1, 0]))
    assert place() == (1 - rank, 2)
    assert total() == 2


@in_ranks(3, fresh=True, enable_reconfigure=True)
def test_symmetric_memory_is_that_of_the_new_ranks(rank: int, world: int) -> None:
    reconfigure(100, exchange("all", rank, range(3)))
    before, handle = share()
    assert (handle.rank, handle.world_size) == (rank, 3)
    if rank == 1:
        return
    reconfigure(101, exchange("apart", rank, [2, 0]))
    for tensor in (before, symm_mem.empty(8, dtype=torch.float32, device="cpu")):
        handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
        assert (handle.rank, handle.world_size) == ([1, None, 0][rank], 2)
        tensor.fill_(rank)
        handle.barrier()
        assert handle.get_buffer(0, (1,), torch.float32).item() == 2
        handle.barrier()


@in_ranks(2, fresh=True, enable_reconfigure=True)
def test_a_group_without_ranks_says_so(rank: int, world: int) -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.send(torch.ones(1), 1 - rank),
        lambda: backend_of().shrink([1 - rank], 0),
    ):
        with pytest.raises(RuntimeError, match=r"(?i)without ranks|no ranks"):
            call()
    assert backend_of().get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    reconfigure(1, exchange("all", rank, range(2)))
    assert total() == 2


@in_ranks(2, "nodes", fresh=True, enable_reconfigure=True)
def test_an_aborted_group_gets_new_ranks_and_its_hooks_stay(rank: int, world: int) -> None:
    reconfigure(1, exchange("all", rank, range(2)))
    called: list[int] = []
    backend_of().register_abort_hook(7, lambda: called.append(rank))
    backend_of().abort()
    with pytest.raises(RuntimeError):
        total()
    reconfigure(2, exchange("again", rank, range(2)))
    assert backend_of().get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    assert total() == 2
    if rank == 1:  # a failure of the group that the hook was not registered for
        backend_of().set_timeout(datetime.timedelta(milliseconds=100))
        with pytest.raises(dist.DistBackendError):
            dist.recv(torch.ones(1), 0)
        assert called == [1]


@in_ranks(2, fresh=True, enable_reconfigure=True)
def test_operations_under_way_fail_when_the_ranks_change(rank: int, world: int) -> None:
    reconfigure(1, exchange("all", rank, range(2)))
    if rank == 0:
        pending = dist.all_reduce(torch.ones(4), async_op=True)
        reconfigure(2, exchange("alone", 0, [0]))
        with pytest.raises(RuntimeError, match=r"reconfigure\(\) was called while operations were pending"):
            pending.wait()
        assert total() == 1
    else:
        with pytest.raises(RuntimeError, match=r"reconfigure\(\)|left"):
            dist.recv(torch.ones(1), 0)
    reconfigure(3, exchange("back", rank, range(2)))
    assert total() == 2


@in_ranks(2, fresh=True, enable_reconfigure=True)
def test_what_all_have_begun_ends_well_when_the_ranks_change(rank: int, world: int) -> None:
    reconfigure(1, exchange("all", rank, range(2)))
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    handles = exchange("again", rank, range(2))  # all have begun
    reconfigure(2, handles)
    work.wait()
    assert tensor.eq(2).all()


@in_ranks(2, fresh=True, enable_reconfigure=True)
def test_invalid_handles_are_refused_and_change_nothing(rank: int, world: int) -> None:
    both = exchange("all", rank, range(2))
    reconfigure(1, both)
    handles = exchange("new", rank, range(2))
    for wrong, message in [
        ([], "there are no handles; pass one for each rank"),
        (set(), "there are no handles"),
        (["gloo:0:-1:0:"], "'gloo:0:-1:0:' is no handle of the backend ours; pass what"),
        (["ours:0:new:" + "f" * 31], "is no handle of the backend ours"),
        ([handles[1 - rank]], r"this process's handle .* is not among the handles"),
        ([*handles, handles[0]], "is there twice"),
        ([handles[rank], both[rank]], "is there twice, or in an old and a new form"),
    ]:
        with pytest.raises(ValueError, match=message):
            reconfigure(2, wrong)
    assert total() == 2
    reconfigure(2, handles)
    assert total() == 2


@in_ranks(2, fresh=True, enable_reconfigure=True)
def test_a_uuid_counts_once(rank: int, world: int) -> None:
    reconfigure(10 + rank, [dist.distributed_c10d._get_reconfigure_handle()])
    with pytest.raises(RuntimeError, match=r"uuid 1[01] was already used in this group"):
        reconfigure(10 + rank, [dist.distributed_c10d._get_reconfigure_handle()])
    assert total() == 1
    # The ranks disagree about who there is.
    handles = exchange("all", rank, range(2))
    if rank == 0:
        reconfigure(20, handles[:1])
        default_store().set("used", "")
    default_store().get("used")
    if rank == 1:
        with pytest.raises(RuntimeError, match="uuid 20 was already used for other ranks, or in another order"):
            reconfigure(20, handles)
        with pytest.raises(RuntimeError, match="this process group has no ranks"):
            total()
    reconfigure(21, exchange("again", rank, range(2)))
    assert total() == 2


@in_ranks(2, "nodes", fresh=True, enable_reconfigure=True)
def test_an_attempt_that_fails_can_be_repeated(rank: int, world: int) -> None:
    handles = exchange("all", rank, range(2))
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            reconfigure(1, handles, datetime.timedelta(seconds=0.5))
        assert time.monotonic() - began < 5
        default_store().set("failed", "")
    default_store().get("failed")
    reconfigure(2, exchange("again", rank, range(2)))
    assert total() == 2


@in_ranks(2, fresh=True, enable_reconfigure=True, pg_timeout=2)
def test_without_a_timeout_the_groups_holds(rank: int, world: int) -> None:
    handles = exchange("all", rank, range(2))
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"rank 1 .*2000ms"):
            dist.distributed_c10d._reconfigure(uuid=1, handles=handles)
        assert time.monotonic() - began >= 2


@in_ranks(3, "nodes", fresh=True)
def test_a_group_of_some_ranks_can_change_its_own(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        default_store().set(f"of some/{rank}", dist.distributed_c10d._get_reconfigure_handle(group))
        handles = handles_of("of some", [1, 0])
        assert dist.distributed_c10d._supports_reconfigure(group)
        # Hints are for backends that know them.
        work = dist.distributed_c10d._reconfigure(1, handles, group, PATIENCE, hints={"of another backend": "1"})
        assert work.wait()
        assert (group.rank(), group.size()) == (1 - rank, 2)
        dist.all_reduce(tensor := torch.ones(3), group=group)
        assert tensor.tolist() == [2] * 3
    assert place() == (rank, 3)
    assert total() == 3


def connections_to_store() -> int:
    """Return how many connections this process has to the store of the job."""
    return sum(map(is_to_store, tcp_connections()))


@in_ranks(2, fresh=True, enable_reconfigure=True)
def test_only_an_attempt_after_one_that_failed_connects_to_the_store(rank: int, world: int) -> None:
    """Connecting takes seconds where no name server answers, since the store asks for names."""
    before = connections_to_store()
    assert before > 0
    for uuid in (1, 2):
        reconfigure(uuid, exchange(f"all {uuid}", rank, range(2)))
        assert connections_to_store() == before
    with pytest.raises(dist.DistBackendError):
        reconfigure(10 + rank, exchange("apart", rank, range(2)), datetime.timedelta(seconds=0.5))
    reconfigure(3, exchange("again", rank, range(2)))
    assert connections_to_store() == before + 1


# --- kills -----------------------------------------------------------------------------------------------------------

VICTIM = 1


def connect() -> dist.Store:
    """Connect to the job's store; the keys of the default group's store have a prefix, and those of this one none."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def join(who: int, world: int) -> None:
    """Begin as a process that has no ranks to talk to yet."""
    store = connect()
    dist.init_process_group("ours", store=store, rank=who, world_size=world, timeout=PATIENCE, enable_reconfigure=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: float) -> list[float]:
    optimizer.zero_grad()
    model(torch.full((1, 3), float(inputs))).sum().backward()
    optimizer.step()
    return model.module.weight.grad.flatten().tolist()


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ourddp.DistributedDataParallel(nn.Linear(3, 1), bucket_cap_mb=1e-5)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def recovers(who: int, world: int, ordered: bool) -> dict[str, Any]:
    """Be one of three that train, of which one is killed; or the last one of ``world``, which takes its place."""
    kind = list if ordered else set
    spare = world - 1
    survivors = [other for other in range(spare) if other != VICTIM]
    times = {}
    store = connect()
    if who != spare:
        join(who, spare)
        reconfigure(1, exchange("first", who, range(spare)))
        model, optimizer = make_training(seed=0)
        for _ in range(3):
            assert train(model, optimizer, who) == [1.0] * 3
        if who == VICTIM:
            store.set("died at", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistNetworkError, match=f"rank {VICTIM}"):
            train(model, optimizer, who)
        reconfigure(2, kind(exchange("left", who, survivors)))
        assert total() == len(survivors)
        times["recovery"] = time.time() - float(store.get("died at"))
        model.change_group(init_sync=False)
        for _ in range(3):
            assert train(model, optimizer, who) == [1.0] * 3  # the mean of 0 and 2
        publish("all", who)
        store.set(f"ready {who}", "")
        came = float(store.get("came"))
    else:
        store.wait([f"ready {other}" for other in survivors])  # they are about to look for newcomers
        came = time.time()
        join(who, world)
        store.set("came", str(came))
        publish("all", who)
    reconfigure(3, kind(handles_of("all", [*survivors, spare])))
    assert total() == len(survivors) + 1
    times["join"] = time.time() - came
    if who == spare:
        model, optimizer = make_training(seed=1)
    else:
        model.change_group()
    ourddp.broadcast_optimizer_state(optimizer)
    for _ in range(3):
        # The mean of 0, 2 and 3.
        assert train(model, optimizer, who) == pytest.approx([5 / 3] * 3)
    times["rank"], times["weights"] = dist.get_rank(), model.module.weight.flatten().tolist()
    dist.barrier()
    dist.destroy_process_group()
    return times


@pytest.mark.parametrize("ordered", [True, False])
def test_survivors_go_on_within_a_second_and_a_replacement_joins_within_two(ordered: bool, nodes: Any) -> None:
    times: list[dict[str, Any]] = []

    def attempt() -> float:
        results = run_ranks(4, recovers, ordered, backend=None, killed=[VICTIM], nodes=nodes)
        assert results.pop(VICTIM) is None
        assert [result["rank"] for result in results] == [0, 1, 2]
        assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
        times[:] = results
        # Both limits at once, in the unit of the first.
        return max(max(result.get("recovery", 0), result["join"] / 2) for result in results)

    check_soon(1, attempt)
