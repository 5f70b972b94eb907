"""Runs test functions in several ranks, each a process of its own.

``run_ranks(4, fn, *args)`` starts four processes, makes a process group of them, calls ``fn(rank, world, *args)`` in
each, and returns the four results. ``RankPool`` keeps the processes for many such calls, so that a property-based test
does not have to start processes for each case. Whatever goes wrong, no process is left behind, and the error shows the
tracebacks of all ranks.

``@in_ranks(4)`` makes a test of a function ``test_something(rank, world)`` that each of four ranks runs.

``fn`` must be a function at the top level of a module, and its arguments and result must be picklable. The processes
come from a fork server that has loaded torch. They end without Python's finalisation: a test of how a program exits has
to start one with ``subprocess``.

With ``nodes=2`` the ranks play two nodes: the first half is one and the second half the other, and the two share no
memory. ``nodes=hosts`` (see hosts.py) also gives them networks of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import device_type
import pytest
import torch
import torch.distributed as dist
from hosts import Host

Nodes = int | Sequence[Host]  # the number of nodes that the ranks play, or the hosts that are the nodes

GRACE = 5.0  # seconds in which the other ranks may end by themselves after one has failed


class RanksFailedError(AssertionError):
    """Some ranks raised, died or did not finish. The message shows what each of them did."""


@functools.cache
def fork_server() -> ForkServerContext:
    """Return the context that starts processes as forks of one that has loaded torch."""
    context = multiprocessing.get_context("forkserver")
    # torch loads the last two with the first optimizer or mesh, which takes seconds if each rank has to do it.
    modules = ["torch.distributed", "torch.distributed.distributed_c10d", "torch._dynamo", "torch.distributed.tensor"]
    # Otherwise each process would load pytest, which this module needs, and hypothesis, which some tests need, again.
    context.set_forkserver_preload([*modules, "ourddp", "pytest", "hypothesis"])
    return context


@functools.cache
def gloo_group() -> dist.ProcessGroup:
    """Return a Gloo group of all ranks to compare with, made once in each process. Every rank must call it."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    return group


def _set_up(
    rank: int, world: int, store: tuple[str, int], backend: str | None, env: dict[str, str], init: dict[str, Any]
) -> None:
    address, port = store
    torch.set_num_threads(1)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store's server is in the parent
            **env,
        }
    )
    if backend is None:
        return
    if device_type.NAME in backend:
        device_type.load()
    if "store" not in init and "init_method" not in init:
        init["store"] = dist.TCPStore(address, port, world, is_master=False)
        _meet(init["store"], world)
    dist.init_process_group(backend, rank=rank, world_size=world, **init)


def _meet(store: dist.Store, world: int) -> None:
    """Wait until all processes have started, which takes longer than some tests' timeouts on a busy machine."""
    if store.add("ranks that have started", 1) == world:
        store.set("all ranks have started", "")
    store.wait(["all ranks have started"])


def count_of(nodes: Nodes) -> int:
    """Return the number of nodes."""
    return nodes if isinstance(nodes, int) else len(nodes)


def node_ids(world: int, nodes: int) -> list[dict[str, str]]:
    """Return what to add to each rank's environment so that the ranks form ``nodes`` nodes of nearly equal size."""
    if nodes == 1:
        return [{}] * world
    return [{"OURS_NODE_ID": f"node {rank * nodes // world}"} for rank in range(world)]


def make_store(nodes: Nodes) -> tuple[dist.TCPStore, str]:
    """Return a new store, and an address of its server that all ranks can reach."""
    if isinstance(nodes, int):
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "127.0.0.1"
    first = nodes[0]
    # Only the thread that makes the sockets has to be on that host.
    with ThreadPoolExecutor(1, initializer=first.enter) as there:
        make = there.submit(dist.TCPStore, first.address, 0, is_master=True, wait_for_workers=False)
        return make.result(), first.address


@dataclasses.dataclass(frozen=True)
class Skip:
    """What a rank returns whose function skips the test."""

    why: str


def _worker(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world: int,
    store: tuple[str, int],
    backend: str | None,
    env: dict[str, str],
    init: dict[str, Any],
    host: Host | None,
    stack_file: str,
) -> None:
    """Serve calls from ``pipe`` until it closes."""
    gc.freeze()  # what is loaded is a million objects, which each gc.collect() would look through and so copy
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            if host is not None:
                host.enter()
            _set_up(rank, world, store, backend, env, dict(init))
            while True:
                try:
                    fn, args = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    break
                try:
                    result = inspect.unwrap(fn)(rank, world, *args)
                except pytest.skip.Exception as skipped:
                    result = Skip(str(skipped))  # the exception itself cannot be pickled
                pipe.send_bytes(pickle.dumps((True, result)))
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:  # the parent has to hear of any error
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            # After a failure, neither destructors nor a destroyed group can be trusted.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class RankPool:
    """A group of ``world`` processes that calls functions on request.

    ``backend=None`` makes no process group: ``fn`` finds what ``init_process_group`` needs in its environment. ``env``
    is added to the environment of every rank, or ``env[rank]`` to that of each rank if it is a list. ``pg_timeout`` is
    the group's timeout in seconds. The other keywords go to ``init_process_group``.
    """

    def __init__(
        self,
        world: int,
        backend: str | None = "ours",
        *,
        env: dict[str, str] | list[dict[str, str]] | None = None,
        pg_timeout: float = 60,
        nodes: Nodes = 1,
        **init: Any,
    ) -> None:
        self.world = world
        self._backend = backend
        each = env if isinstance(env, list) else [env or {}] * world
        count = count_of(nodes)
        if not isinstance(nodes, int):
            # Otherwise Gloo would look up the host's name, which is not known there.
            each = [{"GLOO_SOCKET_IFNAME": "eth0", **own} for own in each]
        if backend is not None and device_type.NAME in backend:
            each = [{**device_type.environment(), **own} for own in each]
        self._env = [{**ids, **own} for ids, own in zip(node_ids(world, count), each, strict=True)]
        self._nodes = nodes
        self._hosts = [None if isinstance(nodes, int) else nodes[rank * count // world] for rank in range(world)]
        self._init = {"timeout": datetime.timedelta(seconds=pg_timeout), **init}
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._store: dist.TCPStore | None = None
        self._folder = ""

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60, killed: Collection[int] = ()) -> list[Any]:
        """Call ``fn(rank, world, *args)`` in every rank and return the results by rank.

        ``killed`` are the ranks that are meant to die of a signal. Their results are None, and the pool replaces all
        its processes afterwards. Raises RanksFailedError if a rank raises, dies or takes more than ``timeout`` seconds.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that failed to start has closed it, and reported why
                pipe.send_bytes(call)
        results, failures = self._collect(time.monotonic() + timeout, timeout, frozenset(killed))
        if failures:
            raise RanksFailedError("\n".join(failures))
        if killed:
            self._kill()
        return [results.get(rank) for rank in range(self.world)]

    def close(self) -> None:
        """End the processes; kill those that do not end by themselves."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._store, address = make_store(self._nodes)
        store = (address, self._store.port)
        for rank in range(self.world):
            ours, theirs = fork_server().Pipe()
            init = (rank, self.world, store, self._backend, self._env[rank], self._init)
            process = fork_server().Process(
                target=_worker,
                args=(theirs, *init, self._hosts[rank], self._stack_file(rank)),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stack_file(self, rank: int) -> str:
        return os.path.join(self._folder, f"stack-{rank}")

    def _collect(self, deadline: float, timeout: float, killed: frozenset[int]) -> tuple[dict[int, Any], list[str]]:
        """Wait for every rank's answer. Return the results and the failures; after a failure all processes are gone."""
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    good, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    good, value = self._describe_end(rank, killed)
                if good:
                    results[rank] = value
                else:
                    deadline = min(deadline, time.monotonic() + GRACE)
                    failures.append(f"rank {rank}: {value}")
        if waiting:
            after = "" if failures else f" in {timeout:g} s"
            failures += [
                f"rank {rank} did not finish{after}; it was at\n{self._stack(rank)}" for rank in waiting.values()
            ]
        if failures:
            self._kill()
        return results, failures

    def _describe_end(self, rank: int, killed: frozenset[int]) -> tuple[bool, Any]:
        process = self._processes[rank]
        process.join(GRACE)
        code = process.exitcode
        if code is not None and code < 0:
            return rank in killed, None if rank in killed else f"died of {signal.Signals(-code).name}"
        return False, f"ended with exit code {code} before it answered"

    def _stack(self, rank: int) -> str:
        """Return the Python stacks of a rank that is still running."""
        path = Path(self._stack_file(rank))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline, seen = time.monotonic() + 1, ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            text = path.read_text() if path.is_file() else ""
            if len(text) > len(seen):
                seen = text
            elif seen:
                return seen
        return seen or "(no stack: it is stopped or in a blocking system call)"

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None
        shutil.rmtree(self._folder, ignore_errors=True)


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = "ours",
    timeout: float = 60,
    killed: Collection[int] = (),
    **pool: Any,
) -> list[Any]:
    """Call ``fn(rank, world, *args)`` in ``world`` new processes. RankPool describes the keywords and errors."""
    with RankPool(world, backend, **pool) as ranks:
        return ranks.run(fn, *args, timeout=timeout, killed=killed)


def in_ranks(
    world: int | None = None, *fixtures: str, fresh: bool = False, timeout: float = 60, **pool: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function ``fn(rank, world, ...)``, which each of ``world`` ranks runs.

    What ``fn`` takes beside its rank and the world comes from the test's marks and fixtures, as ``world`` does if it is
    not given here. ``fixtures`` say what ranks there are: "backend", "nodes" or "played_nodes". Tests share processes,
    unless they want ``fresh`` ones. RankPool describes the other keywords.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        own = list(inspect.signature(fn).parameters)[2:]

        @functools.wraps(fn)
        def test(**given: Any) -> None:
            size = given["world"] if world is None else world
            keywords = {**pool, **{name.removeprefix("played_"): given[name] for name in fixtures}}
            ranks = RankPool(size, **keywords) if fresh else given["rank_pool"](size, **keywords)
            with ranks if fresh else contextlib.nullcontext():
                for result in ranks.run(test, *(given[name] for name in own), timeout=timeout):
                    if isinstance(result, Skip):
                        pytest.skip(result.why)

        wanted = [*([] if fresh else ["rank_pool"]), *([] if world else ["world"]), *fixtures, *own]
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature(inspect.Parameter(name, kind) for name in dict.fromkeys(wanted))
        return test

    return decorate
