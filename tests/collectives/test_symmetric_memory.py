"""torch.distributed._symmetric_memory on the CPU: memory that the ranks of a node reach, and signals between them."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist
from probes import HAS_HOOKS, bytes_in_heap, reached, waits_for_peers
from ranks import gloo_group, in_ranks, run_ranks
from symmetric import COUNT, share, symm_mem

pytestmark = pytest.mark.skipif(not HAS_HOOKS, reason="the package has symmetric memory from torch 2.15 on")


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
