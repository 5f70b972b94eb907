"""The report on a backward: how long its communication took, and how much of that the computation did not hide.

``ourddp.DistributedDataParallel.report`` returns a ``BackwardReport``; printing it shows a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ourddp import _C

__all__ = ["BackwardReport", "BucketReport", "Tuning"]

_MIB = 1024 * 1024
_NS_PER_MS = 1e6

_COLUMNS = ("bucket", "params", "MiB", "first grad", "last grad", "launched", "began", "ended", "GB/s", "exposed")


@dataclass(frozen=True)
class BucketReport:
    """One bucket in one backward. Times are in milliseconds since backward began; None: it did not happen.

    ``parameters`` are the names of the parameters whose gradients it holds, ``size`` its bytes. ``first_gradient`` and
    ``last_gradient`` tell when gradients arrived, ``launched`` when the bucket was handed to the process group or the
    communication hook. ``began`` is when the backend began with it, or ``launched`` if that is not known. If ``exact``
    is False, ``ended`` is only when the end of backward found the reduction done. ``exposed`` tells how long backward
    had to wait for this bucket after the end of the computation, when those before it had been reduced.
    """

    parameters: tuple[str, ...]
    size: int
    first_gradient: float | None
    last_gradient: float | None
    launched: float | None
    began: float | None
    ended: float | None
    exact: bool
    exposed: float

    @property
    def duration(self) -> float:
        """Milliseconds from the beginning to the end of the reduction; 0 if there was none."""
        return 0.0 if self.began is None or self.ended is None else self.ended - self.began

    @property
    def bandwidth(self) -> float | None:
        """Gigabytes (1e9) of the bucket reduced in a second; None if it was not reduced or is empty."""
        return self.size / self.duration / 1e6 if self.duration > 0 and self.size > 0 else None


@dataclass(frozen=True)
class Tuning:
    """The choice of the buckets' size that ``bucket_cap_mb="auto"`` makes.

    ``cap`` is the size in bytes that a bucket is filled to, ``first_cap`` that of the first one. Both are 0 while
    ``backwards_left`` more backwards have to be observed. A reduction of n bytes takes about ``latency`` microseconds
    plus n divided by ``bandwidth``, in gigabytes (1e9) a second, as measured when the model was built. ``slowdown``,
    0 to 1, is the share of that time by which a reduction delays a concurrent computation.
    """

    cap: int
    first_cap: int
    backwards_left: int
    latency: float
    bandwidth: float
    slowdown: float

    @classmethod
    def of(cls, tuning: _C.BucketTuning) -> Tuning:
        """Convert the reducer's own record into these units."""
        cost = tuning.cost
        bandwidth = 1 / cost.ns_per_byte if cost.ns_per_byte > 0 else math.inf
        return cls(tuning.cap, tuning.first_cap, tuning.backwards_left, cost.latency_ns / 1e3, bandwidth, cost.slowdown)

    def __str__(self) -> str:
        group = (
            f"a reduction takes {self.latency:.0f} us plus its size at {self.bandwidth:.2f} GB/s, and delays "
            f"concurrent computation by {self.slowdown:.0%} of that time"
        )
        if self.cap == 0:
            return f'bucket_cap_mb="auto": to be chosen after {self.backwards_left} more backwards; {group}'
        return f'bucket_cap_mb="auto": {self.cap / _MIB:g} MiB (first: {self.first_cap / _MIB:g} MiB); {group}'


@dataclass(frozen=True)
class BackwardReport:
    """The last backward that ended in a reduction. Times are in milliseconds since backward began.

    Backward begins when forward hands over its outputs, so the loss is part of it. ``compute`` tells when autograd had
    computed all gradients, ``total`` when the averages were ready for the optimizer. During ``communication``
    milliseconds at least one reduction was under way. ``iteration`` counts, from 1, forwards outside ``no_sync()``,
    and also backwards that a program prepares by calling the reducer's ``prepare_for_backward()`` without such a
    forward. Before the first reduction it is 0, all times are 0 and there are no buckets. ``tuning`` is None without
    ``bucket_cap_mb="auto"``.
    """

    iteration: int
    rank: int
    world_size: int
    backend: str
    compute: float
    total: float
    communication: float
    buckets: tuple[BucketReport, ...]
    tuning: Tuning | None = None

    @property
    def size(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def exposed(self) -> float:
        """Milliseconds that backward spent waiting for reductions, after the computation."""
        return sum(bucket.exposed for bucket in self.buckets)

    @property
    def hidden(self) -> float:
        """The part of the communication, from 0 to 1, that ran while gradients were still being computed.

        It does not tell how much longer that computation took; see ``Tuning.slowdown``.
        """
        return max(0.0, 1.0 - self.exposed / self.communication) if self.communication > 0 else 0.0

    def __str__(self) -> str:
        where = f"rank {self.rank} of {self.world_size}, {self.backend}"
        if self.iteration == 0:
            return "\n".join([f"No backward has reduced gradients yet ({where}).", *self._tuning_lines()])
        rows = [_COLUMNS, *(_row(index, bucket) for index, bucket in enumerate(self.buckets)), self._total_row()]
        lines = [f"Backward of iteration {self.iteration} ({where}); times in ms since backward began", *aligned(rows)]
        lines.append(
            f"computation until {self.compute:.2f}, all done at {self.total:.2f}; "
            f"{self.communication:.2f} ms of reductions, {self.hidden:.0%} of them hidden behind the computation"
        )
        if any(bucket.ended is not None and not bucket.exact for bucket in self.buckets):
            lines.append("~: no later than this; the backend does not tell when a reduction ended")
        return "\n".join([*lines, *self._tuning_lines()])

    def _tuning_lines(self) -> list[str]:
        return [] if self.tuning is None else [str(self.tuning)]

    def _total_row(self) -> tuple[str, ...]:
        parameters = sum(len(bucket.parameters) for bucket in self.buckets)
        rate = self.size / self.communication / 1e6 if self.communication > 0 else None
        blanks = ("",) * 5
        return ("total", str(parameters), f"{self.size / _MIB:.2f}", *blanks, _number(rate), f"{self.exposed:.2f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _row(index: int, bucket: BucketReport) -> tuple[str, ...]:
    times = (bucket.first_gradient, bucket.last_gradient, bucket.launched, bucket.began)
    ended = _number(bucket.ended) if bucket.exact or bucket.ended is None else f"~{bucket.ended:.2f}"
    return (
        str(index),
        str(len(bucket.parameters)),
        f"{bucket.size / _MIB:.2f}",
        *(_number(time) for time in times),
        ended,
        _number(bucket.bandwidth),
        f"{bucket.exposed:.2f}",
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines whose columns are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def make_report(
    times: _C.BackwardTimes,
    tuning: _C.BucketTuning,
    names: Sequence[str],
    *,
    rank: int,
    world_size: int,
    backend: str,
) -> BackwardReport:
    """Return the report of ``times``; ``names`` are those of all parameters, by index."""

    def since_start(time: int) -> float | None:
        return None if time < 0 else (time - times.began) / _NS_PER_MS

    buckets = [
        BucketReport(
            parameters=tuple(names[index] for index in indices),
            size=size,
            first_gradient=since_start(bucket.first_gradient),
            last_gradient=since_start(bucket.last_gradient),
            launched=since_start(bucket.launched),
            began=since_start(bucket.reduction_began),
            ended=since_start(bucket.reduction_ended),
            exact=bucket.end_is_exact,
            exposed=exposed / _NS_PER_MS,
        )
        for bucket, indices, size, exposed in zip(
            times.buckets, times.parameters, times.bytes, times.exposed, strict=times.iteration > 0
        )
    ]
    return BackwardReport(
        iteration=times.iteration,
        rank=rank,
        world_size=world_size,
        backend=backend,
        compute=since_start(times.compute_ended) or 0.0,
        total=since_start(times.ended) or 0.0,
        communication=times.busy / _NS_PER_MS,
        buckets=tuple(buckets),
        tuning=Tuning.of(tuning) if tuning.enabled else None,
    )
