"""What the training examples share: flags, start-up, checkpoints and metrics.

The training loops themselves stay in the examples, where they can be read from top to bottom.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ourddp
from ourddp import interrupts

# Flags that may differ in a resumed training; load_checkpoint reports the differences.
MAY_CHANGE = ("epochs", "batch_size", "lr")


class Refused(Exception):
    """The command line asks for something impossible; the message says what to do. Every rank raises it."""


def argument_parser(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser with the flags of data-parallel trainings; the arguments are this example's defaults."""
    parser = small_parser(description, epochs=epochs, batch_size=batch_size, lr=lr)
    parser.add_argument("--ddp", choices=("ours", "torch"), default="ours", help="whose DistributedDataParallel")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ranks may share a GPU")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="file written after every epoch, by rank 0")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint if that file exists")
    parser.add_argument("--stop-after", type=int, metavar="N", help="end after epoch N, as if interrupted there")
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="file for one JSON object per epoch, from rank 0")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    return parser


def small_parser(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser with the flags that every example has, for a program that writes no files."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.set_defaults(checkpoint=None, resume=False, metrics=None, device="cpu")
    parser.add_argument("--backend", default="ours", help="what init_process_group gets: ours, gloo, cpu:ours, ...")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the first weights and the order of samples")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the parsed command line; end the program with a message if flags contradict each other."""
    args = parser.parse_args()
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint PATH, the file to go on from")
    if args.epochs < 1 or args.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; leave it out to train on the CPU")
    return args


@contextlib.contextmanager
def process_group(backend: str, *files: Path | None, device: str = "cpu") -> Iterator[tuple[int, int]]:
    """Join the job that torchrun, mpirun or srun started, or make one of a single rank; yield (rank, number of ranks).

    Gives each rank its share of the cores: more threads than cores make every rank wait for the others' threads; with
    `device` cuda also a GPU, which is the current one from then on. Ends the program with a line from rank 0 if
    something is Refused, such as one of the `files`, which rank 0 must be able to write.
    """
    interrupts.in_one_line()
    launch = ourddp.init(backend)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_world_size))
    if device == "cuda":
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    try:
        check_files(*files)
        yield launch.rank, launch.world_size
    except Refused as refused:
        if launch.rank == 0:
            print(refused, file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


def check_files(*paths: Path | None) -> None:
    """Raise Refused if rank 0 cannot write one of the files: before the training, and not after its first epoch."""
    obstacles = [""]
    if dist.get_rank() == 0:
        obstacles = [next(filter(None, (obstacle_to_writing(path) for path in paths if path is not None)), "")]
    dist.broadcast_object_list(obstacles, src=0)
    if obstacles[0]:
        raise Refused(obstacles[0])


def obstacle_to_writing(path: Path) -> str:
    """Return why a file cannot be written, or an empty string; makes its folder."""
    if path.is_dir():
        return f"cannot write {path}: it is a folder; name a file in it"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"cannot write {path}: {error.strerror}; name another file"


def data_parallel(model: nn.Module, which: str) -> nn.parallel.DistributedDataParallel:
    """Wrap `model` so that backward averages its gradients over the ranks; `which` is "ours" or "torch"."""
    if which == "ours":
        return ourddp.DistributedDataParallel(model)
    return nn.parallel.DistributedDataParallel(model)


def learning_rate(step: int, steps: int, *, start: float, peak: float, warm_up: int) -> float:
    """Return the rate of step `step` of `steps`: from `start` to `peak` over `warm_up` steps, under a cosine down to 0.

    It depends on the step alone, so that a training can be resumed with another schedule.
    """
    risen = start + (peak - start) * min(1.0, step / warm_up if warm_up else 1.0)
    return risen * 0.5 * (1 + math.cos(math.pi * step / steps))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the optimizer's next step have this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def seed_epoch(seed: int, epoch: int, done: int = 0) -> None:
    """Make the random state a function of seed, epoch and rank, so that a checkpoint has none to carry.

    `done`: the batches that were done before; after a resume within an epoch the random numbers are others.
    """
    torch.manual_seed((seed * 1_000_003 + epoch) * 1_000_003 + dist.get_rank() + done * 1_000_000_007)


def preempted(args: argparse.Namespace) -> bool:
    """Return whether a rank was asked to stop by SIGTERM, the same on all ranks. Other backends do not tell."""
    return "ours" in args.backend and ourddp.preempted()


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


def save_checkpoint(
    epoch: int, args: argparse.Namespace, fixed: Sequence[str], *, batches: int = 0, **parts: Any
) -> None:
    """Write the state of every part (model, optimizer) after `epoch` to --checkpoint: rank 0 alone, and atomically.

    `batches` of the next epoch are done as well.

    The file appears under its name only when it is whole: a job killed while writing leaves the old checkpoint.
    `fixed`: flags that must be the same in a resumed training, e.g. "seed".
    """
    path = args.checkpoint
    if path is None or dist.get_rank() != 0:
        return
    state = {name: part.state_dict() for name, part in parts.items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            done = {"epoch": epoch, "samples": samples_of(batches, args)}
            torch.save({**done, "flags": flags_of(args, fixed), **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def samples_of(batches: int, args: argparse.Namespace) -> int:
    """Return how many samples that many batches of all ranks have."""
    return batches * args.batch_size * dist.get_world_size()


def flags_of(args: argparse.Namespace, fixed: Sequence[str]) -> dict[str, Any]:
    """Return the flags that a checkpoint records, by name, and the number of ranks."""
    return {**{name: getattr(args, name) for name in (*fixed, *MAY_CHANGE)}, "ranks": dist.get_world_size()}


def load_checkpoint(args: argparse.Namespace, fixed: Sequence[str], **parts: Any) -> tuple[int, int]:
    """Restore every part from --checkpoint and return the epoch to go on with, and how many of its batches are done.

    Both are 0 if there is nothing to resume.

    Rank 0 reads the file and sends it to the others, which need not see its file system. Raises Refused if the file is
    not one of this program's, or was made with another value of a flag in `fixed`; another seed, for example, has other
    held-out samples. With other ranks, epochs, batches or rates the training goes on, and rank 0 prints what differs.
    """
    path = args.checkpoint
    if path is None or not args.resume:
        return 0, 0
    state: list[Any] = [None]
    if dist.get_rank() == 0 and path.exists():
        state[0] = read_checkpoint(path, {"epoch", "samples", "flags", *parts})
    dist.broadcast_object_list(state, src=0)
    checkpoint = state[0]
    if checkpoint is None:
        return 0, 0
    if isinstance(checkpoint, str):
        raise Refused(checkpoint)
    before, now = checkpoint["flags"], flags_of(args, fixed)
    for name in fixed:
        if before[name] != now[name]:
            raise Refused(
                f"{path} was made with --{name} {before[name]}, this run has --{name} {now[name]}: "
                "use the same, or start without --resume"
            )
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    epoch, batches = checkpoint["epoch"] + 1, checkpoint["samples"] // samples_of(1, args)
    if dist.get_rank() == 0:
        where = f"resumed after epoch {epoch}" + (f" and {batches} batches of the next" if batches else "")
        changed = [f"{name} {now[name]} instead of {before[name]}" for name in now if now[name] != before[name]]
        print(", ".join([where, *changed]), flush=True)
    return epoch, batches


def read_checkpoint(path: Path, parts: set[str]) -> dict[str, Any] | str:
    """Return the checkpoint in a file, or a sentence that says why there is none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its parts raise
        return f"cannot resume from {path}: {str(error).splitlines()[0]}; start without --resume"
    if not isinstance(checkpoint, dict) or not parts <= checkpoint.keys():
        return f"cannot resume from {path}: it is no checkpoint of this program; start without --resume"
    return checkpoint


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


def end_early(
    console: Console, step: int, steps_in_epoch: int, args: argparse.Namespace, fixed: Sequence[str], **parts: Any
) -> None:
    """Save a checkpoint in the middle of an epoch, after `step` steps, because the job was asked to stop."""
    epochs, batches = divmod(step, steps_in_epoch)
    save_checkpoint(epochs - 1, args, fixed, batches=batches, **parts)
    console.print(f"asked to stop: ended after step {step}")
    console.close()
    dist.barrier()  # no rank leaves while rank 0 still writes
