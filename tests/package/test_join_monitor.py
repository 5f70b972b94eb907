"""While a group is made, the ranks of a machine watch one another."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist
from patience import check_soon
from probes import backend_over, reached, waits_for_another_thread
from ranks import run_ranks
from watched_store import WatchedStore


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
