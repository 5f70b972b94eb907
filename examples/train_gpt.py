"""Trains a small byte-level GPT on the sources of Python's own standard library, data-parallel.

    torchrun --nproc_per_node=4 examples/train_gpt.py

Every machine that runs Python has this text, so there is nothing to download. At the end the model writes some text of
its own: after a minute's training it has learnt what Python looks like, not yet what it means.
"""

from __future__ import annotations

import argparse
import sysconfig
from itertools import islice
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

BYTES = 256  # every byte is a token
# Flags that a resumed training must have the same of: they decide the held-out text and the shape of the model.
FIXED = ("seed", "corpus", "context", "width", "layers", "heads")


def read_corpus(size: int) -> torch.Tensor:
    """Return the first `size` bytes of the standard library's modules in the order of their names, as uint8 (size,).

    Raises RuntimeError if this Python comes with fewer bytes of source than that.
    """
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= size:
            return torch.frombuffer(text[:size], dtype=torch.uint8)
    raise RuntimeError(f"the standard library has {len(text)} bytes of source, not {size}: pass a smaller --corpus")


class Windows(Dataset):
    """Consecutive windows of text: item i is (bytes, the bytes that follow them), both int64 (length,)."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._text[index * self._length : (index + 1) * self._length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """One layer of a pre-norm transformer: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (N, length, width) to the next layer's."""
        batch, length, width = hidden.shape
        parts = self.query_key_value(self.norm_attention(hidden)).view(batch, length, 3, self._heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.perceptron(hidden)


class GPT(nn.Module):
    """Predicts the next byte; `context` is the most bytes that it can look back on."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, BYTES)
        for embedding in (self.byte, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map bytes (N, length) to logits of the byte after each of them (N, length, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        return self.output(self.norm(self.blocks(self.byte(text) + self.position(positions))))

    @torch.no_grad()
    def generate(self, prompt: str, length: int, seed: int, temperature: float = 0.7) -> str:
        """Return `prompt` followed by `length` bytes drawn from the model's predictions."""
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt.encode())])  # drawn on the CPU, so the same on any device
        device = self.output.weight.device
        for _ in range(length):
            logits = self(text[:, -self.context :].to(device))[0, -1].cpu() / temperature
            next_byte = torch.multinomial(logits.softmax(0), 1, generator=generator)
            text = torch.cat([text, next_byte.unsqueeze(0)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats a byte, 0-dim, of logits (N, length, 256) for bytes (N, length)."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Dataset, batch_size: int, rank: int, ranks: int) -> dict[str, float]:
    """Return loss and accuracy over the held-out text; each rank looks at its own share."""
    model.eval()
    device = next(model.parameters()).device
    average = common.Average()
    for text, following in DataLoader(Subset(held_out, range(rank, len(held_out), ranks)), batch_size):
        text, following = text.to(device), following.to(device)
        logits = model(text)
        average.add(loss_of(logits, following).item(), logits, following)
    return average.over_ranks()


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    """Train, print each epoch's metrics and, at the end, a sample of the model's writing."""
    torch.manual_seed(args.seed)
    text = read_corpus(args.corpus)
    cut = len(text) * 9 // 10
    training_set, held_out = Windows(text[:cut], args.context), Windows(text[cut:], args.context)
    sampler = DistributedSampler(training_set, ranks, rank, seed=args.seed)
    loader = DataLoader(training_set, args.batch_size, sampler=sampler)
    model = GPT(args.context, args.width, args.layers, args.heads).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    state = {"model": model, "optimizer": optimizer}
    first_epoch, done = common.load_checkpoint(args, FIXED, **state)
    parallel = common.data_parallel(model, args.ddp)

    step, steps = first_epoch * len(loader) + done, args.epochs * len(loader)
    schedule = {"start": args.lr / 25, "peak": args.lr, "warm_up": steps // 10}
    console = common.Console(args, steps, step, "bytes")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{ranks} ranks, {parameters:,} parameters, {cut:,} bytes to train on, {len(text) - cut:,} held out")
    for epoch in range(first_epoch, min(args.epochs, args.stop_after or args.epochs)):
        sampler.set_epoch(epoch)
        common.seed_epoch(args.seed, epoch, done)
        parallel.train()
        average = common.Average()
        for text, following in islice(loader, done, None):
            common.set_learning_rate(optimizer, common.learning_rate(step, steps, **schedule))
            optimizer.zero_grad()
            text, following = text.to(args.device), following.to(args.device)
            logits = parallel(text)
            loss = loss_of(logits, following)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            average.add(loss.item(), logits, following)
            console.step(loss.item())
            if common.preempted(args):
                common.end_early(console, step, len(loader), args, FIXED, **state)
                return
        done = 0
        metrics = average.over_ranks()
        console.epoch(epoch, metrics, evaluate(model, held_out, args.batch_size, rank, ranks))
        common.save_checkpoint(epoch, args, FIXED, **state)
    if rank == 0 and args.sample:
        console.print(f"\n{model.generate(args.prompt, args.sample, args.seed)}")
    console.close()
    dist.barrier()  # no rank leaves while rank 0 still writes


def main() -> None:
    """Read the command line and train."""
    parser = common.argument_parser(__doc__.splitlines()[0], epochs=3, batch_size=4, lr=3e-3)
    parser.add_argument("--corpus", type=int, default=400_000, help="bytes of text, a tenth of them held out")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model looks back on")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--prompt", default="def ", help="what the sample begins with")
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    args = common.parse(parser)
    with common.process_group(args.backend, args.checkpoint, args.metrics, device=args.device) as (rank, ranks):
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
