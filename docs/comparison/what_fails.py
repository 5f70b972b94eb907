"""Shows what three ranks see when one of them fails, over several backends: python what_fails.py ours gloo

Each case runs in processes of its own: rank 1 gives an all-reduce another size, is killed before it, or stays away for
longer than the timeout of 2 seconds. The table has the seconds until each rank had its error, and what that said.
"""

import datetime
import multiprocessing
import os
import signal
import sys
import textwrap
import time

import torch
import torch.distributed as dist

import ourddp  # noqa: F401

CASES = ("another size", "killed", "stays away")
RANKS, LIMIT, TIMEOUT = 3, 40, datetime.timedelta(seconds=2)


def run(rank: int, backend: str, case: str, port: int, pipe: object, over: object) -> None:
    """Make one call that cannot succeed, and send what came of it."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    dist.all_reduce(torch.ones(100))
    began = time.monotonic()
    try:
        if rank == 1 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and case == "stays away":
            over.wait(LIMIT)
        else:
            dist.all_reduce(torch.ones(101 if rank == 1 and case == "another size" else 100))
        what = "no error"
    except RuntimeError as error:
        what = f"{type(error).__name__}: {error}"
    pipe.send((time.monotonic() - began, what))
    over.wait(LIMIT)  # a rank that ends would be an error of its own to the others
    os._exit(0)


def show(backend: str, case: str) -> None:
    """Run one case and print what each rank saw."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    over = context.Event()
    ranks = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(rank, backend, case, store.port, theirs, over))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    print(f"{backend}, rank 1: {case}")
    for rank, (process, pipe) in enumerate(ranks):
        if rank == 1 and case == "stays away":
            continue
        try:
            line = "{:.1f} s, {}".format(*pipe.recv()) if pipe.poll(LIMIT) else f"nothing within {LIMIT} s"
        except EOFError:
            process.join(5)
            line = f"the process ended with {process.exitcode}"
        print(textwrap.fill(f"rank {rank}: {line.splitlines()[0]}", 116, initial_indent="  ", subsequent_indent="    "))
    over.set()
    for process, _ in ranks:
        process.join(5)
        process.kill()


if __name__ == "__main__":
    for name in sys.argv[1:] or ("ours", "gloo"):
        for each in CASES:
            show(name, each)
