"""Trains on handwritten digits with torchft: the ranks that are left go on when one has died, without a restart.

    torchrun --nproc_per_node=3 examples/libraries/fault_tolerance.py --die 40

Before each step the ranks ask a server, torchft's lighthouse, who is there. When the answer changes, torchft makes a
new process group. A step in which a reduction fails is not taken. `--die` lets the last rank end in the middle of a
step: `ours` then raises an error on all other ranks at once, and no timeout has to pass.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import digits
import torch
import torch.distributed as dist
import ways
from torch.nn import functional
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

from ourddp.torchft import ProcessGroupOurs

HOST = "localhost"
GROUPS = {"ours": ProcessGroupOurs, "gloo": ProcessGroupGloo}


def train(args: argparse.Namespace, manager: Manager, rank: int, ranks: int) -> tuple[torch.Tensor, torch.nn.Module]:
    """Train, print when the number of ranks changes, and return the last loss and the model."""
    model = digits.model(args.seed)
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr)
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    present = ranks
    for step, batch in enumerate(ways.batches(args)):
        images, labels = ways.share(batch, rank, ranks)  # nobody takes the share of a rank that has died
        optimizer.zero_grad()  # asks who is there
        loss = functional.cross_entropy(parallel(images), labels)
        if step == args.die and rank == ranks - 1:
            manager.wait_quorum()  # so that the others count on this rank
            os._exit(0)  # torchrun would end all ranks if one failed
        loss.backward()
        mean = loss.detach().clone()
        manager.allreduce(mean).wait()
        optimizer.step()  # takes the step if all reductions have gone well
        if present != manager.num_participants() or manager.errored():
            present = manager.num_participants()
            taken = "not taken" if manager.errored() else "taken"
            print(f"rank {rank}: step {step} with {present} ranks was {taken}", flush=True)
    return mean, model


def main() -> None:
    """Read the command line and train."""
    parser = digits.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--die", type=int, metavar="STEP", help="let the last rank end in this step")
    args = digits.parse(parser)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Each rank is a group of one for torchft, and has a store of its own. The first one has the lighthouse.
    store, _, _ = next(dist.rendezvous("env://"))
    own = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    if rank == 0:
        waits = {"join_timeout_ms": 10_000, "heartbeat_timeout_ms": 2_000}
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **waits)
        store.set("lighthouse", lighthouse.address())
    timeout = timedelta(seconds=30)
    group = GROUPS[args.backend](timeout)
    manager = Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        init_sync=False,  # the seed gives all ranks the same first weights
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=own.port,
        lighthouse_addr=store.get("lighthouse").decode(),
        replica_id=f"rank_{rank}",
        hostname=HOST,
    )
    # The first step waits for all whose heartbeats the lighthouse hears by then.
    store.set(f"manager {rank}", "")
    store.wait([f"manager {other}" for other in range(ranks)])
    loss, model = train(args, manager, rank, ranks)
    if rank == 0:
        backend = group.parent._get_backend(torch.device("cpu")).name()
        print(
            f"backend {backend}, loss {loss:.6f}, held-out accuracy {ways.accuracy(model, args.seed):.2%}", flush=True
        )
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
