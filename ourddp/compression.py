"""What happens to a bucket of gradients on its way, other than the plain average that the reducer makes by itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Average", "Compression", "Reduction", "Sum"]

# By Horovod's names.
Average = dist.ReduceOp.AVG
Sum = dist.ReduceOp.SUM


class Compression(enum.Enum):
    """The precision in which gradients travel. They are rounded before they are added up, and the sums are, too."""

    none = None  #: as they are
    fp16 = torch.float16  #: half the bytes of float32; overflows beyond 65,504
    bf16 = torch.bfloat16  #: half the bytes, and the range, of float32; 8 bits of precision


@dataclass(frozen=True)
class Reduction:
    """A communication hook of the reducer: adds a bucket up, or averages it, in the precision of ``compression``."""

    group: dist.ProcessGroup
    compression: Compression
    average: bool

    def __call__(self, _state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the all-reduce, and return a future of the bucket with the result."""
        buffer = bucket.buffer()
        narrow = self.compression.value
        shrinks = narrow is not None and buffer.is_floating_point() and buffer.element_size() > narrow.itemsize
        sent = buffer.to(narrow) if shrinks else buffer
        if self.average:
            sent.div_(self.group.size())  # before they are added up, so that the sum stays in range
        done = dist.all_reduce(sent, group=self.group, async_op=True).get_future()

        def finish(reduced: torch.futures.Future[Any]) -> torch.Tensor:
            reduced.value()  # raises if the reduction failed
            return buffer.copy_(sent) if shrinks else buffer

        return done.then(finish)
