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
from collections.abc import Callable

import pytest
import torch.distributed as dist
from patience import check_soon, with_growing_timeouts
from probes import (
    backend_of,
    backend_over,
    errors_written,
    forbid_calls,
    reached,
    refused_to_join,
    total,
    waits_for_another_thread,
)
from programs import free_port
from ranks import in_ranks, run_ranks

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


class WatchedStore(dist.Store):
    """A store that calls ``before`` with the name and the key of each of its calls."""

    def __init__(self, inner: dist.Store, before: Callable[[str, str], object]) -> None:
        super().__init__()
        self._inner, self._before = inner, before

    def set(self, key: str, value: bytes) -> None:
        self._before("set", key)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._before("get", key)
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        self._before("add", key)
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._before("compare_set", key)
        return self._inner.compare_set(key, expected, value)

    def check(self, keys: list[str]) -> bool:
        self._before("check", keys[0])
        return self._inner.check(keys)

    def has_extended_api(self) -> bool:
        return self._inner.has_extended_api()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._before("multi_get", keys[0])
        return self._inner.multi_get(keys)


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


def calls_while_rank_0_stays_away(rank: int, world: int) -> list[tuple[str, str]]:
    """Rank 0 comes when rank 1 has looked twice for the others, which have announced themselves. Return its calls."""
    store = dist.distributed_c10d._get_default_store()
    calls: list[tuple[str, str]] = []

    def before(call: str, key: str) -> None:
        calls.append((call, key))
        if call == "compare_set":
            store.set(f"rank {rank} has announced itself", "")
        if rank == 1 and len(looks(calls)) == 2:
            store.set("rank 1 has looked twice", "")

    if rank == 0:
        store.get("rank 1 has looked twice")
    if rank == 1:
        store.wait([f"rank {other} has announced itself" for other in range(2, world)])
    group = backend_over(WatchedStore(dist.PrefixStore("looks", store), before), world, rank, 30)
    dist.barrier()  # no group may go before all ranks have made theirs
    del group
    return calls


def looks(calls: list[tuple[str, str]]) -> list[int]:
    """Return where looks begin among the calls."""
    return [place for place, (_, key) in enumerate(calls) if key.endswith("/error")]


def test_a_look_for_the_ranks_of_a_machine_takes_few_requests_however_many_they_are():
    calls = run_ranks(6, calls_while_rank_0_stays_away)[1]
    first, second = looks(calls)[:2]
    requests = [call for call, key in calls[first:second] if "/machine/" in key]
    assert 0 < len(requests) <= 3, requests


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


def dies_while_others_wait(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 dies when the ranks of its machine have met, and rank ``world - 1`` never comes."""
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    if rank == world - 1:
        store.get("all have heard")
        return "", 0.0
    if rank == 1:

        def die_in_the_midst() -> None:
            # Both ranks have announced themselves before they wait.
            assert reached(lambda: waits_for_another_thread(threading.main_thread().native_id))
            store.get("rank 0 waits")
            store.set("died at", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die_in_the_midst).start()
    if rank == 0:
        threading.Thread(target=tell_when_it_waits, args=[store]).start()
    with pytest.raises(dist.DistNetworkError) as error:
        dist.init_process_group("ours", store=store, rank=rank, world_size=world)
    seconds = time.time() - float(store.get("died at"))
    if store.add("heard", 1) == world - 2:
        store.set("all have heard", "")
    return str(error.value), seconds


def tell_when_it_waits(store: dist.Store) -> None:
    assert reached(lambda: waits_for_another_thread(threading.main_thread().native_id))
    store.set("rank 0 waits", "")


@pytest.mark.parametrize("count", [1, 4])
def test_a_rank_that_dies_while_the_group_is_made_is_named_at_once(count):
    def attempt() -> float:
        results = run_ranks(4, dies_while_others_wait, backend=None, killed=[1], nodes=count)
        for text, _ in (results[0], results[2]):
            assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died while", text)
        return max(results[0][1], results[2][1])

    check_soon(2, attempt)


class StoreOfTheDead(WatchedStore):
    """Announces this process as one that had the same number, and began before it."""

    def set(self, key: str, value: bytes) -> None:
        if "/machine/" in key:
            pid, start, name = value.split(b" ", 2)
            value = b"%b %d %b" % (pid, int(start) - 1, name)
        super().set(key, value)


class StoreOfTheSilent(WatchedStore):
    """Counts this process, but does not announce it."""

    def set(self, key: str, value: bytes) -> None:
        if "/machine/" not in key:
            super().set(key, value)


def meets_a_number_that_is_used_again(rank: int, world: int, silent: bool) -> str:
    """Rank 1 counts as dead, and rank 2 never comes. If ``silent``, rank 0 is counted before it, and no more."""
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    if rank == 2:
        store.wait([f"heard/{other}" for other in range(2)])
        return ""

    def before(call: str, key: str) -> None:
        if call == "compare_set":
            store.set(f"rank {rank} has announced itself", "")

    if rank == 1 and silent:
        store.get("rank 0 has announced itself")
    kind = StoreOfTheDead if rank == 1 else StoreOfTheSilent if silent else WatchedStore
    own = kind(store, before)
    with pytest.raises(dist.DistNetworkError) as error:
        dist.init_process_group("ours", store=own, rank=rank, world_size=world)
    store.set(f"heard/{rank}", "")
    return str(error.value)


@pytest.mark.parametrize("silent", [False, True])
def test_a_dead_rank_is_missed_though_another_process_has_its_number(silent):
    for text in run_ranks(3, meets_a_number_that_is_used_again, silent, backend=None)[:2]:
        assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died while", text), text


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
