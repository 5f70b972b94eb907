"""Ranks for a benchmark that a launcher has started: one machine or several, which share neither memory nor clock."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ourddp import joining
from ourddp.bench import harness


class JobRanks(harness.Ranks):
    """One rank of a job that a launcher has started, on one machine or several."""

    def __init__(self, place: joining.Launch) -> None:
        """Take the rank's place. Whoever makes it sets ``plan``, the same on all ranks, once they have joined."""
        super().__init__(place.rank, place.world_size)
        self._one_machine = place.local_world_size == place.world_size
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> JobRanks:
        joining.init("gloo", timeout=harness.TIMEOUT)
        if self._one_machine:
            folder = [""]
            if self.rank == 0:
                self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
                folder = [self._folder.name]
                Path(self._folder.name, "pace").write_bytes(bytes(self.size * harness.CACHE_LINE))
            dist.broadcast_object_list(folder, 0)
            self.open_pace(Path(folder[0]))
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            dist.barrier()
            dist.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()

    def together(self) -> None:
        """Return when every rank has called it; between machines, by a barrier of Gloo's."""
        if self._one_machine:
            super().together()
        else:
            dist.barrier()

    def span(self, turns: torch.Tensor) -> torch.Tensor:
        """Return the seconds of turns as `Ranks.span`; between machines, which share no clock, those of the slowest."""
        if self._one_machine:
            return super().span(turns)
        seconds = turns[..., 1] - turns[..., 0]
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds
