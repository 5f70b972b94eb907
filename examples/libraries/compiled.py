"""Trains on handwritten digits with a compiled DistributedDataParallel.

    torchrun --nproc_per_node=2 examples/libraries/compiled.py

torch.compile cuts the model where a bucket of gradients is full, so that a bucket is on its way while the graph of the
next one runs backward. It takes the sizes from the module, and accepts no `bucket_cap_mb` below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ourddp


class Perceptron(nn.Module):
    """A network with 5 MB of weights, which are several buckets, from images (N, 1, 8, 8) to logits (N, 10).

    It is a class because torch.compile passes over functions of torch's own files that it meets after a break, as the
    forward of an nn.Sequential in a DistributedDataParallel is.
    """

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = functional.relu(self.first(images.flatten(1)))
        return self.last(functional.relu(self.second(hidden)))


def main() -> None:
    """Read the command line and train."""
    parser = digits.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--compiler", default="inductor", help="a backend of torch.compile, such as aot_eager")
    args = digits.parse(parser)
    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(args.compiler)(graph, inputs)

    ourddp.init(args.backend)
    torch.manual_seed(args.seed)
    model = ourddp.DistributedDataParallel(Perceptron(), bucket_cap_mb=1)
    compiled = torch.compile(model, backend=compiler)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for images, labels in digits.shares(args):
        optimizer.zero_grad()
        loss = functional.cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()
    digits.finish(args, loss, model)
    if dist.get_rank() == 0:
        print(f"{len(graphs)} graphs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
