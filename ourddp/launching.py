"""Starts ranks on this machine: ``python -m ourddp launch`` for a program, :func:`launch` for a function."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from ourddp import processes
from ourddp.spawned import LONGEST_WAIT, Call, SpawnedRanks

HELP = "start ranks of a program on this machine, without any port given"


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    ranks: int = 2,
    threads: int | None = None,
    timeout: float | None = None,
    backend: str = "ours",
) -> list[Any]:
    """Run ``fn(*args)`` in ``ranks`` processes of this machine that form a process group, and return all results.

    The processes are spawned, and meet without a port. In a notebook or at a prompt, ``fn`` may be defined there; that
    needs the package cloudpickle. A program calls this under ``if __name__ == "__main__":``. An interrupt ends all
    ranks before it is raised here.

    Args:
        fn: What each rank runs, in its default process group.
        args: What it is called with, the same for all ranks, and picklable.
        ranks: How many processes.
        threads: Of each rank; by default its share of the cores.
        timeout: Seconds after which the ranks are ended, from the start of the processes, which takes some.
        backend: What ``init_process_group`` gets.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        ValueError: If the numbers make no sense, or ``fn`` or ``args`` cannot be sent to another process; the message
            says what helps.
        RuntimeError: If a rank has failed; the message names the first one that did and has its traceback. The others
            are ended.
        TimeoutError: If the ranks took too long.

    """
    if ranks < 1 or (threads is not None and threads < 1) or (timeout is not None and timeout <= 0):
        raise ValueError(f"ranks={ranks}, threads={threads}, timeout={timeout}: each has to be greater than 0")
    dumps = _pickler(fn, args)
    share = threads or processes.threads_for(ranks)
    limit = time.monotonic() + (math.inf if timeout is None else timeout)
    running = SpawnedRanks(Call(dumps(fn), dumps(tuple(args)), ranks, share, backend, dumps))
    try:
        while True:
            ended, failed = running.look()
            if failed is not None:
                raise RuntimeError(running.describe(failed))
            if ended:
                return [running.result(rank) for rank in range(ranks)]
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the {ranks} ranks took more than {timeout:g} s and were ended")
            connection.wait(running.sentinels(), min(left, LONGEST_WAIT))
    finally:
        running.stop()


def _pickler(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[[Any], bytes]:
    """Return what pickles the function and its arguments; ValueError if nothing does."""
    # Spawned processes import the main program again, unless it has no file, as a notebook.
    by_name = getattr(fn, "__module__", "") != "__main__" or hasattr(sys.modules["__main__"], "__file__")
    reason = "it is defined in a notebook or at a prompt, which other processes cannot import"
    if by_name:
        try:
            pickle.dumps((fn, tuple(args)))
        except Exception as error:
            reason = str(error)
        else:
            return pickle.dumps
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        dumps: Callable[[Any], bytes] = importlib.import_module("cloudpickle").dumps
    except ImportError:
        raise ValueError(
            f"{name} cannot be sent to other processes: {reason}. Install cloudpickle (pip install cloudpickle), or "
            "move it into a file that you import"
        ) from None
    try:
        dumps((fn, tuple(args)))
    except Exception as error:
        raise ValueError(
            f"{name} cannot be sent to other processes: {error}. Make what cannot be pickled in the function itself"
        ) from error
    return dumps


# --- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m ourddp launch``."""
    parser.usage = f"{parser.prog} [-n N] [--max-restarts N] [-m] PROGRAM [ARGUMENTS ...]"
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="how many ranks (default: one for each core)")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often all ranks are started again after one has failed (default: %(default)s)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the program gets")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks by torch's elastic launcher; return 0 when all have ended well, 1 where one has failed.

    After a signal it is 128 and the number of the signal, as in a shell.
    """
    ranks = processes.cores() if arguments.ranks is None else arguments.ranks
    if ranks < 1 or arguments.max_restarts < 0:
        raise ValueError("--ranks must be at least 1, and --max-restarts not negative")
    if not arguments.module and not os.path.isfile(arguments.program):
        raise ValueError(f"there is no file {arguments.program}; -m before it starts a module")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(processes.threads_for(ranks)))
    flags = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={arguments.max_restarts}"]
    flags += ["--module"] if arguments.module else []
    try:
        torchrun.run(torchrun.parse_args([*flags, arguments.program, *arguments.arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"died of signal {-failure.exitcode}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
        print(f"rank {rank} {how}, and the others were ended", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"interrupted by {error.sigval.name}, and all ranks with it", file=sys.stderr)
        return 128 + error.sigval
    return 0
