"""A distributed sampler that goes on in the midst of an epoch, with any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

__all__ = ["ResumableSampler"]

TAILS = ("repeat", "drop", "uneven")


class ResumableSampler(Sampler[int]):
    """Deals the samples of each epoch out to the ranks, and remembers how many all of them together have used.

    It takes the place of ``torch.utils.data.DistributedSampler`` and has the same order of samples. After a restart, or
    when the group has other ranks, it deals out only what is left of the epoch, so that each sample is used once. Rank
    and number of ranks are those of ``process_group`` when an iteration begins.

        for epoch in range(sampler.epoch, epochs):  # 0, or where load() found the sampler
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                ...
                sampler.advance(len(inputs))
                checkpointer.save(step, model, optimizer, sampler=sampler)

    - ``dataset`` is anything that has a length.
    - ``tail`` says what happens to the last samples of an epoch if the ranks cannot have equally many. "repeat" adds
      fewer than one sample for each rank from the beginning of the epoch, as DistributedSampler does. "drop" leaves
      them out. "uneven" deals them out, so that some ranks have one sample less; ``model.join()`` copes with that.

    Attributes:
        epoch: The epoch that set_epoch() has set; 0 at first.
        position: The samples of this epoch that all ranks together have used. With "uneven" only rank 0, which never
            has fewer samples than another rank, knows at the end of an epoch; a Checkpointer saves what that one says.

    Raises:
        ValueError: If ``tail`` is none of these.

    """

    rank_0_knows = True  # tells a Checkpointer whose state to save

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = "repeat",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}; got {tail!r}")
        self.epoch = 0
        self.position = 0
        self._samples = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self._tail = tail
        self._group = process_group
        # The iteration under way: where it began, for how many ranks, and how many samples this rank has and used.
        self._begin, self._ranks, self._share, self._used = 0, 1, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the samples. Another epoch than the one before begins with its first sample."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        """Return this rank's share of what is left of the epoch."""
        order = self._order()
        left = order[self.position :]
        rank, self._ranks = self._place()
        if self._tail == "repeat" and left:
            missing = -len(left) % self._ranks
            left += (order * -(-missing // len(order)))[:missing]
        elif self._tail == "drop":
            del left[len(left) - len(left) % self._ranks :]
        own = left[rank :: self._ranks]
        self._begin, self._share, self._used = self.position, len(own), 0
        return iter(own)

    def __len__(self) -> int:
        """Return how many samples this rank has left in the epoch."""
        rank, ranks = self._place()
        left = self._samples - self.position
        if self._tail == "drop":
            return left // ranks
        return -(-left // ranks) if self._tail == "repeat" else max(0, -(-(left - rank) // ranks))

    def advance(self, samples: int) -> None:
        """Count what a step has used: ``samples`` is the size of this rank's batch, which is that of all ranks.

        Only the last batch of an epoch may differ. A loader may have drawn more samples meanwhile.

        Raises ValueError if they are more than this rank has left in the iteration under way.
        """
        if not 0 <= samples <= self._share - self._used:
            raise ValueError(
                f"this rank cannot have used {samples} samples: {self._share - self._used} of its {self._share} are "
                "left. Call advance() once for each batch, with its size"
            )
        self._used += samples
        done = self._used == self._share
        self.position = self._samples if done else self._begin + self._used * self._ranks

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position, with the number of samples and the seed that they belong to."""
        return {"epoch": self.epoch, "position": self.position, "samples": self._samples, "seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what state_dict() has returned.

        Raises ValueError if the state is that of a dataset of another size, or of another seed.
        """
        for name, own in (("samples", self._samples), ("seed", self._seed)):
            if state_dict[name] != own:
                raise ValueError(
                    f"the sampler was saved with {name} {state_dict[name]}, and this one has {name} {own}: the order "
                    "would be another. Use the same dataset and seed, or begin the epoch anew without this state"
                )
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._samples, generator=generator).tolist()

    def _place(self) -> tuple[int, int]:
        if not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)
