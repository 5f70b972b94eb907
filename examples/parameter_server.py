"""Trains on handwritten digits with parameter servers, as Li et al. describe them (OSDI 2014).

    torchrun --nproc_per_node=4 examples/parameter_server.py --servers 1 --mode async

The last ranks are servers: each keeps a slice of all parameters, takes the steps of its slice, and trains nothing. The
other ranks are workers: they send gradients to all servers, and get parameters back. With --mode

- sync, a server waits for the gradients of all workers and averages them, which is data-parallel training;
- async, it takes a step with each gradient as it comes, so no worker waits for another, but a gradient may have been
  computed with parameters that others have changed since;
- bounded, it does the same, but a worker that is --staleness steps ahead of the slowest waits for that one (Ho et al.,
  More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013).

Whose message comes next is not known, so a server receives from any source. All bytes of a step go through the servers,
twice; docs/parallel/servers.md measures what this means as workers are added.
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
import ways
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Server:
    """The server of one slice of the parameters."""

    def __init__(self, slice_: torch.Tensor, workers: int, rate: float, mode: str, staleness: int) -> None:
        self._slice = nn.Parameter(slice_.clone())
        self._optimizer = torch.optim.SGD([self._slice], lr=rate)
        self._gradients = torch.zeros(workers, slice_.numel())
        self._steps = [0] * workers  # of each worker
        self._waiting: list[int] = []  # workers that have sent a gradient, and have not got parameters for it
        self._sync = mode == "sync"
        self._ahead = {"sync": 0, "async": None, "bounded": staleness}[mode]

    def serve(self, steps: int) -> None:
        """Serve until every worker has taken its steps."""
        incoming = torch.empty_like(self._gradients[0])
        for _ in range(steps * len(self._steps)):
            worker = dist.recv(incoming)  # from any source
            self._gradients[worker] = incoming
            self._steps[worker] += 1
            self._waiting.append(worker)
            if not self._sync:
                self._take_step(self._gradients[worker])
            elif len(self._waiting) == len(self._steps):
                # The order of the workers, and not that of their messages, makes the same sum in every run.
                self._take_step(self._gradients.mean(0))
            self._answer()

    @property
    def kept(self) -> list[torch.Tensor]:
        """What a server keeps from step to step."""
        return [self._slice, self._gradients]

    def _take_step(self, gradient: torch.Tensor) -> None:
        self._slice.grad = gradient
        self._optimizer.step()

    def _answer(self) -> None:
        ready = [worker for worker in self._waiting if may_go_on(self._steps, worker, self._ahead)]
        self._waiting = [worker for worker in self._waiting if worker not in ready]
        for sent in [dist.isend(self._slice.detach(), worker) for worker in ready]:
            sent.wait()


def may_go_on(steps: list[int], worker: int, ahead: int | None) -> bool:
    """Return whether a worker may begin another step, being at most so many steps ahead of the slowest."""
    return ahead is None or steps[worker] - min(steps) <= ahead


class Worker:
    """A rank that computes gradients."""

    def __init__(self, model: nn.Module, servers: list[int]) -> None:
        self._model = model
        self._servers = servers

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Train with this worker's part of a batch; return its mean loss."""
        self._model.zero_grad()
        loss = functional.cross_entropy(self._model(images), labels)
        loss.backward()
        gradient = parameters_to_vector(parameter.grad for parameter in self._model.parameters())
        parameters = torch.empty_like(gradient)
        parts = zip(slices(gradient, self._servers), slices(parameters, self._servers), self._servers, strict=True)
        works = [work for sent, got, server in parts for work in (dist.isend(sent, server), dist.irecv(got, server))]
        for work in works:
            work.wait()
        vector_to_parameters(parameters, self._model.parameters())
        return loss.item()


def slices(vector: torch.Tensor, servers: list[int]) -> tuple[torch.Tensor, ...]:
    """Return the slice of each server, which are of nearly equal size."""
    return vector.tensor_split(len(servers))


def main() -> None:
    """Read the command line and train."""
    parser = ways.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--mode", choices=("sync", "async", "bounded"), default="sync")
    parser.add_argument("--staleness", type=int, default=2, help="most steps ahead of the slowest, with --mode bounded")
    args = parser.parse_args()
    with common.process_group(args.backend) as (rank, ranks):
        workers = ranks - args.servers
        if args.servers < 1 or workers < 1:
            raise common.Refused(f"{ranks} ranks cannot be {args.servers} servers and at least one worker")
        ways.check_batch(args, workers)
        servers = list(range(workers, ranks))
        model = ways.model(args.seed)
        if rank in servers:
            mine = slices(parameters_to_vector(model.parameters()).detach(), servers)[rank - workers]
            Server(mine, workers, args.lr, args.mode, args.staleness).serve(args.steps)
        else:
            worker = Worker(model, servers)
            losses = [worker.step(*ways.share(batch, rank, workers)) for batch in ways.batches(args)]
            ways.finish(args, rank, losses[-1], model)


if __name__ == "__main__":
    main()
