"""What the training examples share: flags, start-up, checkpoints and metrics.

The training loops themselves stay in the examples, where they can be read from top to bottom.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ourddp


def argument_parser(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser with the flags that every example has; the arguments are this example's defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="ours", help="what init_process_group gets: ours, gloo, cpu:ours, ...")
    parser.add_argument("--ddp", choices=("ours", "torch"), default="ours", help="whose DistributedDataParallel")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the first weights and the order of samples")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="file written after every epoch, by rank 0")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, where that file exists")
    parser.add_argument("--stop-after", type=int, metavar="N", help="end after epoch N, as if interrupted there")
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="file for one JSON object per epoch, from rank 0")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the parsed command line; end the program with a message where flags contradict each other."""
    args = parser.parse_args()
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint PATH, the file to go on from")
    if args.epochs < 1 or args.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return args


@contextlib.contextmanager
def process_group(backend: str) -> Iterator[tuple[int, int]]:
    """Join the job that torchrun, mpirun or srun started, or make one of a single rank; yield (rank, number of ranks).

    Gives each rank its share of the cores: more threads than cores make every rank wait for the others' threads.
    """
    launch = ourddp.init(backend)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_world_size))
    try:
        yield launch.rank, launch.world_size
    finally:
        dist.destroy_process_group()


def data_parallel(model: nn.Module, which: str) -> nn.parallel.DistributedDataParallel:
    """Wrap `model` so that backward averages its gradients over the ranks; `which` is "ours" or "torch"."""
    if which == "ours":
        return ourddp.DistributedDataParallel(model)
    return nn.parallel.DistributedDataParallel(model)


def seed_epoch(seed: int, epoch: int) -> None:
    """Make the random state a function of seed, epoch and rank, so that a checkpoint has none to carry."""
    torch.manual_seed((seed * 1_000_003 + epoch) * 1_000_003 + dist.get_rank())


class Average:
    """Sums over samples, averaged over all ranks when an epoch ends."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._start = time.perf_counter()

    def add(self, loss: float, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the samples of a batch with mean loss `loss`, logits (..., classes) and labels (...)."""
        correct = (logits.argmax(-1) == labels).sum().item()
        samples = labels.numel()
        self._sums += torch.tensor([loss * samples, correct, samples], dtype=torch.float64)

    def over_ranks(self) -> dict[str, float]:
        """Return loss, accuracy and samples per second of all ranks together; every rank has to call it."""
        seconds = torch.tensor([time.perf_counter() - self._start], dtype=torch.float64)
        sums = torch.cat([self._sums, seconds])
        dist.all_reduce(sums)
        loss, correct, samples, seconds_of_all = sums.tolist()
        mean_seconds = seconds_of_all / dist.get_world_size()
        return {"loss": loss / samples, "accuracy": correct / samples, "samples_per_second": samples / mean_seconds}


def save_checkpoint(path: Path | None, epoch: int, args: argparse.Namespace, **parts: Any) -> None:
    """Write the state of every part (model, optimizer, ...) after `epoch`: rank 0 alone, and atomically.

    The file appears under its name only when it is whole: a job killed while writing leaves the old checkpoint.
    """
    if path is None or dist.get_rank() != 0:
        return
    state = {name: part.state_dict() for name, part in parts.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"epoch": epoch, "seed": args.seed, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path | None, args: argparse.Namespace, **parts: Any) -> int:
    """Restore every part from the checkpoint and return the next epoch; 0 where there is nothing to resume.

    Rank 0 reads the file and sends it to the others, which need not see its file system. Raises ValueError where the
    checkpoint was made with another seed: its held-out samples were others.
    """
    if path is None or not args.resume:
        return 0
    state: list[Any] = [None]
    if dist.get_rank() == 0 and path.exists():
        state[0] = torch.load(path, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(state, src=0)
    checkpoint = state[0]
    if checkpoint is None:
        return 0
    if checkpoint["seed"] != args.seed:
        raise ValueError(
            f"{path} was made with --seed {checkpoint['seed']}, this run has --seed {args.seed}: "
            "use the same seed, or start without --resume"
        )
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["epoch"] + 1


class Console:
    """Rank 0's progress bar, lines and metrics file; silent on every other rank."""

    def __init__(self, args: argparse.Namespace, steps: int, first_step: int, samples: str) -> None:
        """Open both; the training has `steps` steps, `first_step` of them done before, and counts `samples`."""
        from tqdm import tqdm

        self._first = dist.get_rank() == 0
        self._samples = samples
        # None: tqdm shows a bar on a terminal and nothing in a log file.
        off = None if self._first and args.progress else True
        self._bar = tqdm(total=steps, initial=first_step, disable=off, unit="step", dynamic_ncols=True, leave=False)
        self._metrics = args.metrics.open("a" if first_step else "w") if self._first and args.metrics else None

    def step(self, loss: float) -> None:
        """Advance the bar by one step."""
        self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self._bar.update()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if self._first:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def epoch(self, epoch: int, train: dict[str, float], held_out: dict[str, float]) -> None:
        """Print an epoch's metrics, and append them to the metrics file."""
        self.print(
            f"epoch {epoch + 1:3d}  loss {train['loss']:.4f}  accuracy {train['accuracy']:7.2%}  "
            f"held-out loss {held_out['loss']:.4f}  accuracy {held_out['accuracy']:7.2%}  "
            f"{train['samples_per_second']:8.0f} {self._samples}/s"
        )
        if self._metrics:
            print(json.dumps({"epoch": epoch, "train": train, "held_out": held_out}), file=self._metrics, flush=True)

    def close(self) -> None:
        """Remove the bar and close the metrics file."""
        self._bar.close()
        if self._metrics:
            self._metrics.close()
