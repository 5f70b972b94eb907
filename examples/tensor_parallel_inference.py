"""Lets a small model after Llama write tokens, with each layer cut into slices: each rank computes a part of a token.

    torchrun --nproc_per_node=2 examples/tensor_parallel_inference.py
    torchrun --nproc_per_node=2 examples/tensor_parallel_inference.py --check --no-compile
    torchrun --nproc_per_node=2 examples/tensor_parallel_inference.py --backend gloo

Heads, the layers before them and the wide layers of the perceptrons are cut by their outputs, the layers after them by
their inputs. So a layer of the model has two all-reduces, each of one vector, and how fast tokens come depends on how
long a short all-reduce takes. They are those of ourddp.functional, which return a new tensor: torch.compile puts them
into the one graph of a token. The weights are random, so the tokens mean nothing; with --check, rank 0 compares their
logits with those of the whole model. benchmarks/inference.py compares the speeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ourddp import functional as collectives


@dataclass(frozen=True)
class Shape:
    """The sizes of the whole model, and the most tokens that it looks back on."""

    width: int = 512
    layers: int = 4
    heads: int = 8
    hidden: int = 1376
    tokens: int = 512
    context: int = 256


@dataclass(frozen=True)
class Part:
    """Which of `ranks` slices a model has, and the group whose all-reduce adds them up; by default the whole model."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        return partial if self.ranks == 1 else collectives.all_reduce(partial, "sum", self.group)

    def linear(self, inputs: int, outputs: int, cut: int) -> nn.Linear:
        """Return this rank's slice of a layer, cut by outputs (0) or inputs (1), with the weights of the whole one.

        All ranks draw all of the weights, so that any number of ranks has the same model.
        """
        weight = torch.randn(outputs, inputs) / inputs**0.5
        part = weight.chunk(self.ranks, cut)[self.rank]
        layer = nn.utils.skip_init(nn.Linear, part.shape[1], part.shape[0], bias=False)  # which would draw numbers too
        layer.weight = nn.Parameter(part.clone(), requires_grad=False)
        return layer


class Attention(nn.Module):
    """Attention of this rank's heads to the tokens so far, of which it keeps the keys and values."""

    def __init__(self, shape: Shape, part: Part) -> None:
        super().__init__()
        self._part, self._heads = part, shape.heads // part.ranks
        self.query, self.key, self.value = (part.linear(shape.width, shape.width, 0) for _ in range(3))
        self.output = part.linear(shape.width, shape.width, 1)
        size = shape.width // shape.heads
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(self._heads, shape.context, size))
        angles = torch.outer(torch.arange(shape.context), 10_000 ** -torch.linspace(0, 1, size // 2 + 1)[:-1])
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))

    def turn(self, vectors: Tensor, position: Tensor) -> Tensor:
        """Rotate each pair of numbers of vectors (heads, 1, size) by an angle that depends on the position."""
        cos, sin = self.turns[:, position].unbind()
        first, second = vectors.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def forward(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Map a hidden state (1, width), at a position (1), to what the heads of all ranks add to it."""
        query, key, value = (layer(hidden).view(self._heads, 1, -1) for layer in (self.query, self.key, self.value))
        self.keys.index_copy_(1, position, self.turn(key, position))
        self.values.index_copy_(1, position, value)
        # The cache has one size, so that one graph serves all tokens; what lies behind the position is masked.
        seen = torch.arange(self.keys.shape[1]) <= position
        attended = functional.scaled_dot_product_attention(self.turn(query, position), self.keys, self.values, seen)
        return self._part.sum(self.output(attended.view(1, -1)))


class Perceptron(nn.Module):
    """SwiGLU: a wide layer that another one gates, of which this rank has a slice."""

    def __init__(self, shape: Shape, part: Part) -> None:
        super().__init__()
        self._part = part
        self.gate, self.up = (part.linear(shape.width, shape.hidden, 0) for _ in range(2))
        self.down = part.linear(shape.hidden, shape.width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map a hidden state (1, width) to what the slices of all ranks add to it."""
        return self._part.sum(self.down(functional.silu(self.gate(hidden)) * self.up(hidden)))


class Llama(nn.Module):
    """A part of a model after Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) with random weights.

    What comes before and after the layers is small, and every rank has all of it.
    """

    def __init__(self, shape: Shape, part: Part, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(shape.tokens, shape.width).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.RMSNorm(shape.width), Attention(shape, part), nn.RMSNorm(shape.width), Perceptron(shape, part)]
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.width)
        self.output = Part().linear(shape.width, shape.tokens, 0)

    def forward(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest next token (1), and the logits (1, tokens), after a token (1) at a position (1)."""
        hidden = self.embedding(token)
        for norm_attention, attention, norm_perceptron, perceptron in self.layers:
            hidden = hidden + attention(norm_attention(hidden), position)
            hidden = hidden + perceptron(norm_perceptron(hidden))
        logits = self.output(self.norm(hidden))
        return logits.argmax(-1), logits


Model = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def compiled(model: Llama) -> Model:
    """Return the model as one graph, without breaks: all-reduces are part of it."""
    return torch.compile(model, fullgraph=True, dynamic=False)


@torch.inference_mode()
def write(model: Model, prompt: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return `length` tokens that follow the prompt, and the logits of each; a prompt is read token by token."""
    logits = []
    following = prompt[:1]
    for position in range(len(prompt) + length - 1):
        token = prompt[position : position + 1] if position < len(prompt) else following
        following, scores = model(token, torch.tensor([position]))
        logits.append(scores)
    last = torch.cat(logits[-length:])
    return last.argmax(-1), last


def run(args: argparse.Namespace, rank: int, ranks: int) -> None:
    """Write tokens, and print how fast."""
    shape = Shape(layers=args.layers)
    if shape.heads % ranks:
        raise common.Refused(
            f"{shape.heads} heads cannot be cut into {ranks} equal parts: choose another number of ranks"
        )
    model: Model = Llama(shape, Part(rank, ranks, dist.group.WORLD), args.seed)
    if args.compile:
        model = compiled(model)
    prompt = torch.arange(8)
    write(model, prompt, 1)  # compiles it
    begin = time.perf_counter()
    tokens, logits = write(model, prompt, args.length)
    seconds = time.perf_counter() - begin
    if rank == 0:
        print(f"{args.length / seconds:.0f} tokens a second; they begin with {tokens[:8].tolist()}")
    if rank == 0 and args.check:
        expected_tokens, expected = write(Llama(shape, Part(), args.seed), prompt, args.length)
        print(f"same tokens as one process: {tokens.equal(expected_tokens)}")
        print(f"largest difference to the logits of one process: {(logits - expected).abs().max():.1e}")


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ours", help="what init_process_group gets")
    parser.add_argument("--length", type=int, default=64, help="tokens to write")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="make one graph of the model first"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--check", action="store_true", help="compare with the whole model on rank 0")
    args = parser.parse_args()
    with common.process_group(args.backend) as (rank, ranks):
        run(args, rank, ranks)


if __name__ == "__main__":
    main()
