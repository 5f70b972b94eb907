"""Ways to join a group: environment, URLs and stores; and ranks that do not come, or cannot be reached."""

from __future__ import annotations

import datetime
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from patience import with_growing_timeouts
from probes import backend_of, backend_over, errors_written, forbid_calls, refused_to_join, total
from programs import free_port
from ranks import in_ranks, run_ranks
from watched_store import WatchedStore

# --- ways to join ----------------------------------------------------------------------------------------------------


def init_from_environment(rank: int, world: int, port: int) -> float:
    os.environ.update({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"})
    dist.init_process_group("cpu:ours")
    return total()


@pytest.mark.parametrize("world", [1, 3])
def test_environment(world):
    assert run_ranks(world, init_from_environment, free_port(), backend=None) == [world] * world


@pytest.mark.parametrize("world", [1, 3])
def test_urls(world, tmp_path, nodes):
    urls = [f"file://{tmp_path}/store", f"tcp://MASTER_ADDR:{free_port()}", f"file://{tmp_path}/another"]
    run_ranks(world, init_from_urls, urls, backend=None, nodes=nodes)


def init_from_urls(rank: int, world: int, urls: list[str]) -> None:
    """Make one group after another, each from a URL of its own."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for url in urls:
        url = url.replace("MASTER_ADDR", os.environ["MASTER_ADDR"])
        dist.init_process_group("ours", init_method=url, rank=rank, world_size=world)
        assert total() == world
        dist.destroy_process_group()


def init_from_one_store(rank: int, world: int, path: str) -> list[float]:
    """Make several groups from the same store, one after another; a file store if there is a path."""
    results = []
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = None if path else dist.TCPStore(*address, world, is_master=False)
    for round_number in range(4):
        store = server or dist.FileStore(path, world)
        dist.init_process_group("ours", store=store, rank=rank, world_size=world)
        results.append(total(value=float(round_number)))
        dist.barrier()
        dist.destroy_process_group()
    return results


@pytest.mark.parametrize("kind", ["server", "file"])
def test_a_store_can_serve_several_groups_in_turn(tmp_path, kind, nodes):
    path = str(tmp_path / "store") if kind == "file" else ""
    assert run_ranks(3, init_from_one_store, path, backend=None, nodes=nodes) == [[0, 3, 6, 9]] * 3


# --- ranks that do not come ------------------------------------------------------------------------------------------


def alone(rank: int, world: int, timeout: int) -> tuple[str, float]:
    if rank == world - 1:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=timeout))
    return str(error.value), time.monotonic() - start


def test_a_rank_that_does_not_come_is_named_at_the_timeout():
    def attempt(timeout: int) -> None:
        results = run_ranks(3, alone, timeout, backend=None)[:2]
        for text, seconds in results:
            assert "rank 2" in text
            assert f"{timeout}000ms" in text
            assert timeout - 0.1 < seconds < timeout + 2
        assert len({text for text, _ in results}) == 1, "the ranks have different errors"

    with_growing_timeouts(attempt, (2, 8))


@in_ranks(3, backend=None, fresh=True)
def test_an_absent_leader_is_named_at_the_timeout(rank: int, world: int) -> None:
    if rank != 0:
        with pytest.raises(dist.DistBackendError, match=r"rank 0.*did not publish|did not publish.*rank 0"):
            dist.init_process_group("ours", timeout=datetime.timedelta(seconds=1))


def stopped_while_others_wait(rank: int, world: int) -> str:
    """Rank 1 is stopped until rank 0 has given up on rank 2, which never comes."""
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    if rank == 2:
        store.get("rank 1 has heard")
        return ""
    own = store
    if rank == 1:
        waits = threading.Event()
        own = WatchedStore(store, lambda call, key: waits.set() if key.endswith("/leaders") else None)

        def stop_in_the_midst() -> None:
            waits.wait()
            store.set("stops", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        threading.Thread(target=stop_in_the_midst).start()
    pid = int(store.get("stops")) if rank == 0 else 0
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", store=own, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    else:
        store.set("rank 1 has heard", "")
    return str(error.value)


def test_a_rank_that_was_stopped_while_the_others_gave_up_gets_their_error():
    first, second, _ = run_ranks(3, stopped_while_others_wait, backend=None)
    assert "rank 2 of group" in first
    assert second == first


def leaves_after_a_group_it_was_late_for(rank: int, world: int) -> str:
    """Rank 1 comes when rank 0 has given up, finds no time left, and leaves. Return why, as each of them sees it."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("rank 0 has given up")
    with pytest.raises(dist.DistBackendError) as error:
        backend_over(dist.PrefixStore("late", store), world, rank, (0.5, 0.001)[rank])
    if rank == 1:
        dist.destroy_process_group()
        return str(error.value)
    store.set("rank 0 has given up", "")
    with pytest.raises(dist.DistNetworkError) as error:
        dist.barrier()
    return str(error.value).partition("another of its groups had failed: ")[2]


def test_a_rank_that_leaves_gives_the_error_that_it_got_as_the_reason():
    told, own = run_ranks(2, leaves_after_a_group_it_was_late_for)
    assert "rank 1 of the process group did not publish where it is" in own
    assert told.startswith(own)


def does_not_attach(rank: int, world: int) -> str:
    """Let rank 3 hang before it finds the memory of its node."""
    store, _, _ = next(dist.rendezvous("env://", rank, world))

    def before(call: str, key: str) -> None:
        if rank == 3 and call == "compare_set" and "/node/" in key:
            store.get("rank 2 leads the node")
        if rank == 2 and call == "set" and key.endswith("/leader/2"):
            store.set("rank 2 leads the node", "")
        if rank == 3 and "/memory/" in key:
            store.get("the others have raised")

    own = WatchedStore(store, before)
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", store=own, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=2))
        dist.barrier()  # ranks of the other node have joined
    if rank != 3 and store.add("raised", 1) == 3:
        store.set("the others have raised", "")
    return str(error.value)


def test_a_rank_that_does_not_attach_is_named_by_its_number_in_the_group():
    for text in run_ranks(4, does_not_attach, backend=None, nodes=2)[:3]:
        assert "absent: rank 3." in text, text


def loses_its_store(rank: int, world: int) -> str:
    """Let rank 1 lose the store when it asks for the last addresses, and rank 0 has joined."""
    store, _, _ = next(dist.rendezvous("env://", rank, world))

    def before(call: str, key: str) -> None:
        if rank == 1 and call == "check" and "/messages/card/" in key:
            store.get("rank 0 has joined")
            raise OSError("the line was cut")

    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", store=WatchedStore(store, before), rank=rank, world_size=world)
        store.set("rank 0 has joined", "")
        dist.barrier()
    return str(error.value)


def test_who_has_joined_hears_that_another_rank_lost_the_store():
    for text in run_ranks(2, loses_its_store, backend=None, nodes=2):
        assert re.search("store of the process group failed.*the line was cut", text), text


def join_by_a_stopped_store(rank: int, world: int, address: tuple[str, int], pid: int, shrinks: bool) -> float:
    """Make a group, or shrink one, with a store that is stopped. Return the seconds that it took."""
    store = dist.TCPStore(*address, 2, is_master=False)
    parent = backend_over(store, 1) if shrinks else None
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="the store of the process group does not answer"):
        parent.shrink([], dist.distributed_c10d.SHRINK_ABORT) if parent else backend_over(store, 2)
    return time.monotonic() - start


@pytest.mark.parametrize("shrinks", [False, True])
def test_the_timeout_holds_if_the_store_does_not_answer(shrinks):
    script = (
        "import torch.distributed as dist, sys\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = ("127.0.0.1", int(server.stdout.readline()))
            [seconds] = run_ranks(1, join_by_a_stopped_store, address, server.pid, shrinks, backend=None)
        finally:
            server.kill()
    assert seconds < 10


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@in_ranks(3, backend=None, fresh=True)
def test_ranks_use_tcp_if_memory_cannot_be_shared(rank: int, world: int, wire: str, error: int) -> None:
    os.environ["OURS_WIRE_DTYPE"] = wire
    forbid_calls("memfd_create", error)
    with errors_written() as errors:
        dist.init_process_group("ours")
        dist.new_group()
    assert backend_of().node_sizes() == [1, 1, 1]
    assert total() == 3
    assert errors().count("memfd_create") == 1
    assert os.strerror(error) in errors()
    assert "over TCP" in errors()


@in_ranks(2, backend=None, fresh=True)
def test_memory_is_shared_even_if_it_must_not_hold_programs(rank: int, world: int) -> None:
    forbid_calls("memfd_create", errno.EACCES, unless_flags=0x8)  # MFD_NOEXEC_SEAL
    dist.init_process_group("ours")
    assert total() == world
    assert backend_of().node_sizes() == [2]


@pytest.mark.parametrize(
    ("rank", "variable"), [(0, "OURS_INTERFACE"), (1, "OURS_INTERFACE"), (1, "OURS_TCP_CONGESTION")]
)
def test_all_ranks_name_a_rank_that_other_nodes_cannot_reach(rank, variable):
    environments = [{variable: "nosuch0"} if each == rank else {} for each in range(3)]
    results = run_ranks(3, refused_to_join, backend=None, env=environments, nodes=2)
    assert len({text for text, _ in results}) == 1, "the ranks have different errors"
    text = results[0][0]
    assert f"rank {rank} (host" in text
    assert "nosuch0" in text
    assert max(seconds for _, seconds in results) < 10
