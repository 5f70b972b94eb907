"""Reduces a sparse and a dense tensor at the same time, again and again: python sparse_beside_dense.py gloo

Two ranks do so for a minute, and the exit status of each is printed; see comparison.md.
"""

import multiprocessing
import sys
import time

import torch
import torch.distributed as dist

import ourddp  # noqa: F401

SECONDS = 60


def run(rank: int, backend: str, port: int) -> None:
    """Reduce for a minute and compare each sum with what is expected."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    end = time.monotonic() + SECONDS
    more = torch.ones(1)
    while more.item() > 0:
        sparse = torch.sparse_coo_tensor([[rank, 2 + rank]], torch.ones(2, 8), (4, 8), check_invariants=True)
        more.fill_(time.monotonic() < end)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (sparse, more)]
        for work in works:
            work.wait()
        if not torch.equal(sparse.to_dense(), torch.ones(4, 8)):
            sys.exit(f"rank {rank} has another sum")
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[1:] or ("ours", "gloo"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run, args=(rank, name, store.port)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        print(name, [process.exitcode for process in ranks])
