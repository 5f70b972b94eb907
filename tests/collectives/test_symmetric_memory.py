"""torch.distributed._symmetric_memory on the CPU: memory that the ranks of a node reach, and signals between them."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import HAS_HOOKS, backend_of, bytes_in_heap, reached, waits_for_peers
from ranks import gloo_group, in_ranks, run_ranks

pytestmark = pytest.mark.skipif(not HAS_HOOKS, reason="the package has symmetric memory from torch 2.15 on")

with contextlib.suppress(ImportError):
    import torch.distributed._symmetric_memory as symm_mem

COUNT = 1000


def share(count: int = COUNT, group: Any = None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any]:
    """Return a tensor in symmetric memory, and its handle."""
    tensor = symm_mem.empty(count, dtype=dtype, device="cpu")
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def shared_files() -> int:
    """Return how many shared files of the package this process has open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "memfd:ours" in os.readlink(f"/proc/self/fd/{entry}")
    return count


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@in_ranks()
def test_every_rank_reaches_the_memory_of_all_others(rank, world):
    assert symm_mem.get_backend("cpu") == "ours"
    tensor, handle = share()
    assert symm_mem.is_symm_mem_tensor(tensor)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (rank, world, tensor.nbytes)
    assert handle.device == torch.device("cpu")
    assert symm_mem.rendezvous(tensor[10:20], dist.group.WORLD) is not None  # of a view: that of the whole
    tensor.fill_(rank)
    handle.barrier()
    for peer in range(world):
        assert torch.equal(handle.get_buffer(peer, (COUNT,), torch.float32), torch.full((COUNT,), float(peer)))
        part = handle.get_buffer(peer, (2, 5), torch.int32, storage_offset=10)
        assert part.shape == (2, 5)
    handle.barrier(channel=1)
    # Writes are seen where the memory is.
    right = (rank + 1) % world
    handle.get_buffer(right, (COUNT,), torch.float32).fill_(100 + rank)
    handle.barrier()
    assert torch.equal(tensor, torch.full((COUNT,), 100.0 + (rank - 1) % world))
    handle.barrier()


@in_ranks(2)
def test_memory_lasts_as_long_as_the_tensor_or_the_handle(rank, world):
    share(1)
    gc.collect()
    dist.barrier()
    before = shared_files(), bytes_in_heap("ours")
    dist.barrier()
    tensor, handle = share()
    tensor.fill_(rank)
    handle.barrier()
    if rank == 0:
        del tensor  # the others still read it
        gc.collect()
    handle.barrier()
    for peer in range(world):
        assert handle.get_buffer(peer, (COUNT,), torch.float32)[-1] == peer
    handle.barrier()
    view = handle.get_buffer(1 - rank, (COUNT,), torch.float32)
    if rank == 1:
        del handle  # torch keeps it for the tensor
        gc.collect()
        assert view[0] == 0
        del tensor
    dist.barrier()
    if rank == 0:
        assert view[0] == 1  # although rank 1 has nothing left
        del handle
    del view
    gc.collect()
    dist.barrier()
    assert (shared_files(), bytes_in_heap("ours")) == before
    dist.barrier()


@in_ranks(2)
def test_a_forked_child_has_a_copy_of_its_own(rank, world):
    tensor, handle = share()
    tensor.fill_(rank)
    handle.barrier()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            assert tensor[0] == rank
            tensor.fill_(7)
            handle.get_buffer(1 - rank, (COUNT,), torch.float32).fill_(7)
            handle.get_signal_pad(1 - rank).fill_(7)
            for call in (handle.barrier, lambda: handle.put_signal(0), lambda: share(1)):
                with pytest.raises(RuntimeError, match="forked"):
                    call()
            del tensor, handle
            gc.collect()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    handle.barrier()
    assert torch.equal(tensor, torch.full((COUNT,), float(rank)))
    handle.barrier()


@in_ranks(2)
def test_persistent_memory_is_given_again(rank, world):
    allocate = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
    arguments = ((COUNT,), (1,), torch.float32, torch.device("cpu"), dist.group.WORLD.group_name)
    tensor = allocate(*arguments, alloc_id=42)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="still active"):
        allocate(*arguments, alloc_id=42)
    del tensor
    tensor = allocate(*arguments, alloc_id=42)
    assert tensor.data_ptr() == address
    tensor.fill_(rank)
    handle.barrier()
    assert handle.get_buffer(1 - rank, (COUNT,), torch.float32)[0] == 1 - rank
    handle.barrier()


@in_ranks(3)
def test_groups_are_apart(rank, world):
    pair = dist.new_group([0, 2])
    tensor, handle = share()
    tensor.fill_(rank)
    if rank == 1:
        handle.put_signal(0)  # in the word of the pair's rank 1, if they had one pad
    handle.barrier(channel=1)
    if rank != 1:
        # The same tensor in two groups, and the ranks by their numbers in each.
        own = symm_mem.rendezvous(tensor, pair)
        assert own.world_size == 2
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            own.wait_signal(1 - own.rank, timeout_ms=50)
        dist.barrier(pair)  # otherwise a rank that is late takes the other's next barrier for the signal
        own.barrier()
        assert own.get_buffer(1, (COUNT,), torch.float32)[0] == 2
        own.barrier()
    if rank == 0:
        handle.wait_signal(1)
    handle.barrier()
    assert handle.get_buffer(1, (COUNT,), torch.float32)[0] == 1
    handle.barrier()
    if rank != 1:
        dist.destroy_process_group(pair)


@in_ranks(2)
def test_a_group_of_gloo_has_it_too(rank, world):
    tensor, handle = share(group=gloo_group())
    tensor.fill_(rank)
    handle.barrier()
    assert handle.get_buffer(1 - rank, (COUNT,), torch.float32)[0] == 1 - rank
    handle.barrier()


def twice(rank: int, world: int) -> None:
    for _ in range(2):
        tensor, handle = share()
        tensor.fill_(rank)
        handle.barrier()
        assert handle.get_buffer(1 - rank, (COUNT,), torch.float32)[0] == 1 - rank
        handle.barrier()
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("ours", rank=rank, world_size=world, store=dist.PrefixStore("again", store))


def test_a_group_that_is_made_again_shares_memory_again():
    run_ranks(2, twice)


# --- signals ---------------------------------------------------------------------------------------------------------


@in_ranks(2)
def test_a_signal_hands_over_what_was_written(rank, world):
    tensor, handle = share()
    for step in range(1, 100):
        if rank == 0:
            handle.get_buffer(1, (COUNT,), torch.float32).fill_(step)
            handle.put_signal(1, channel=3)
            handle.wait_signal(1, channel=3)
        else:
            handle.wait_signal(0, channel=3)
            assert tensor[0] == step
            assert tensor[-1] == step
            handle.put_signal(0, channel=3)
    handle.barrier(channel=4)
    assert not handle.get_signal_pad(rank, (4, world)).any()  # a program may use it for itself
    handle.barrier(channel=4)


@pytest.mark.parametrize("call", ["wait_signal", "barrier", "rendezvous"])
@in_ranks(2)
def test_a_wait_leaves_python_to_other_threads(rank, world, call):
    _, handle = share()
    store = dist.distributed_c10d._get_default_store()
    other = symm_mem.empty(1, device="cpu")
    wait = {
        "wait_signal": lambda: handle.wait_signal(1 - rank),
        "barrier": handle.barrier,
        "rendezvous": lambda: symm_mem.rendezvous(other, dist.group.WORLD),
    }[call]
    if rank == 0:
        # Rank 1 comes when another thread has run during the wait.
        main = threading.get_native_id()
        helper = threading.Thread(target=lambda: reached(lambda: waits_for_peers(main)) and store.set(call, "seen"))
        helper.start()
        wait()
        helper.join()
        handle.put_signal(1)
        handle.wait_signal(1)
    else:
        store.wait([call], datetime.timedelta(seconds=30))
        store.delete_key(call)
        if call == "wait_signal":
            handle.put_signal(0)
        else:
            wait()
        handle.wait_signal(0)
        handle.put_signal(0)


# --- what goes wrong -------------------------------------------------------------------------------------------------


@in_ranks(2)
def test_an_ordinary_tensor_has_no_handle(rank, world):
    assert symm_mem.rendezvous(torch.ones(4), dist.group.WORLD) is None  # what torch's own callers expect
    with pytest.raises(ValueError, match=r"one_shot_all_reduce: the tensor is not in symmetric memory; .*empty"):
        torch.ops.symm_mem.one_shot_all_reduce(torch.ones(4), "sum", "0")
    assert not symm_mem.is_symm_mem_tensor(torch.ones(4))


@in_ranks(3)
def test_tensors_of_different_sizes_are_refused_by_all_ranks(rank, world):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank 0 has 4000 bytes of symmetric memory and rank 1 has 4004"):
            share(COUNT + rank)
    share()


@in_ranks(2)
def test_what_does_not_exist_is_refused(rank, world):
    _, handle = share()
    channels = symm_mem.get_signal_pad_size() // 4 // world
    handle.barrier(channel=channels - 1)
    with pytest.raises(ValueError, match=f"channels 0 to {channels - 1} for 2 ranks"):
        handle.barrier(channel=channels)
    with pytest.raises(ValueError, match="rank 2 is not one of the 2 ranks"):
        handle.put_signal(2)
    with pytest.raises(RuntimeError, match="exceeds the allocated size"):
        handle.get_buffer(0, (COUNT + 1,), torch.float32)
    handle.barrier()


@in_ranks(2)
def test_a_signal_that_does_not_come_can_be_awaited_again(rank, world):
    _, handle = share()
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as error:
            handle.wait_signal(1, channel=2, timeout_ms=50)
        text = str(error.value)
        assert "wait_signal (channel 2) on symmetric memory: Timed out waiting 50ms on rank 0" in text
        assert re.search(r"for rank 1 \(host [^ ]+, pid \d+\)", text)
        handle.put_signal(1)
        handle.wait_signal(1, channel=2, timeout_ms=2**64 - 1)
    else:
        handle.wait_signal(0)
        handle.put_signal(0, channel=2)
    handle.barrier()


def late(rank: int, world: int) -> str:
    _, handle = share()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    with pytest.raises(dist.DistBackendError) as error:
        handle.barrier(timeout_ms=100)
    store.set("given up", "")
    # The process group goes on, but not its symmetric memory.
    with pytest.raises(dist.DistBackendError):
        share()
    dist.barrier()
    assert backend_of().failure() == ""
    return str(error.value)


def test_a_barrier_that_times_out_fails_on_all_ranks():
    texts = run_ranks(2, late)
    assert "barrier (channel 0) on symmetric memory: Timed out waiting 100ms" in texts[0]
    assert "for rank 1" in texts[0]
    assert texts[1] == texts[0]


def dies(rank: int, world: int, call: str) -> tuple[str, float]:
    _, handle = share()
    store = dist.distributed_c10d._get_default_store()
    handle.barrier()
    if rank == 1:
        store.set("died at", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistNetworkError) as error:
        {
            "barrier": handle.barrier,
            "wait_signal": lambda: handle.wait_signal(1),
            "put_signal": lambda: [handle.put_signal(1) for _ in range(2)],
            "rendezvous": lambda: share(),
        }[call]()
    return str(error.value), time.time() - float(store.get("died at"))


@pytest.mark.parametrize("call", ["barrier", "wait_signal", "put_signal", "rendezvous"])
def test_survivors_name_a_killed_rank_within_a_second(call):
    def attempt() -> float:
        results = run_ranks(3, dies, call, killed=[1])
        for text, _ in (results[0], results[2]):
            assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died during ", text), text
        return max(results[0][1], results[2][1])

    before = set(os.listdir("/dev/shm"))
    check_soon(1, attempt)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ours" in name]


def dies_before(rank: int, world: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistError) as error:
        share()
    return str(error.value)


def test_a_rank_that_dies_before_the_first_rendezvous_is_named():
    results = run_ranks(2, dies_before, killed=[1], pg_timeout=2)
    assert "rank 1 of the symmetric memory of group '0' did not publish" in results[0]


def interrupted(rank: int, world: int) -> str:
    _, handle = share()
    handle.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError) as error:
            handle.barrier()
        return str(error.value)
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait_signal(1, channel=1)
    timer.join()
    return ""


def test_an_interrupt_ends_a_wait_and_all_ranks_hear_of_it():
    _, text = run_ranks(2, interrupted)
    assert "KeyboardInterrupt" in text
    assert "rank 0" in text


@in_ranks(4, nodes=2)
def test_ranks_of_several_nodes_are_refused_and_those_of_each_are_not(rank, world):
    with pytest.raises(ValueError, match=r"on 2 nodes: rank 0, 1 beside .*; rank 2, 3 beside .*new_group"):
        share()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    tensor, handle = share(group=groups[rank // 2])
    tensor.fill_(rank)
    handle.barrier()
    assert handle.get_buffer(1 - rank % 2, (COUNT,), torch.float32)[0] == rank ^ 1
    handle.barrier()


@in_ranks(2)
def test_memory_that_cannot_be_had_is_an_error(rank, world):
    with pytest.raises(RuntimeError, match=r"cannot (size|map|reserve)"):
        symm_mem.empty(1 << 60, dtype=torch.uint8, device="cpu")
    share()
