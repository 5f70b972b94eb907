"""What the collectives of a process group have cost, and which rank was late: :func:`stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ourddp import _C

__all__ = ["Stats", "slow_links", "stats"]

# What a rank must have cost to be named: this share of the time, this many times what any other cost, in so many calls.
_LEAST_SHARE = 0.01
_LEAST_RATIO = 2
_LEAST_CALLS = 3


@dataclass(frozen=True)
class Stats:
    """What the collectives of a group have cost this rank, as far as tensors on the CPU are concerned.

    Times are in seconds, and ranks those of the group. ``seconds`` lie between the first of ``calls`` collectives and
    the end of the last one; they had ``bytes`` of this rank's tensors. ``waited`` is the time in which this rank's
    program was blocked until a collective had ended. ``late[r]`` is how much sooner this rank would have been here if
    rank ``r`` had always come with the last of the others, and ``last[r]`` counts the calls to which it came last.
    ``begun`` and ``ended`` count calls since the group was made: if they differ, one is under way.

    The difference of two of them, ``after - before``, is what came between.
    """

    rank: int
    seconds: float
    calls: int
    bytes: int
    waited: float
    late: tuple[float, ...]
    last: tuple[int, ...]
    begun: int
    ended: int

    @property
    def slowest(self) -> int | None:
        """The rank that held up the others; None if no rank did so more than chance would have it.

        It cost at least 1 % of the time, in at least three calls, and twice as much as any other.
        """
        *_, second, most = [0.0, *sorted(self.late)]
        worst = self.late.index(most)
        is_clear = self.last[worst] >= _LEAST_CALLS and most > _LEAST_RATIO * second
        return worst if is_clear and most >= _LEAST_SHARE * self.seconds else None

    @property
    def saving(self) -> float:
        """The share of the time, 0 to 1, that would have been saved if the slowest rank had not been late."""
        return 0.0 if self.slowest is None else self.late[self.slowest] / self.seconds

    def __sub__(self, earlier: Stats) -> Stats:
        if earlier.rank != self.rank or len(earlier.late) != len(self.late) or earlier.seconds > self.seconds:
            raise ValueError("subtract earlier statistics of the same rank and group from later ones")
        return Stats(
            self.rank,
            self.seconds - earlier.seconds,
            self.calls - earlier.calls,
            self.bytes - earlier.bytes,
            self.waited - earlier.waited,
            tuple(now - then for now, then in zip(self.late, earlier.late, strict=True)),
            tuple(now - then for now, then in zip(self.last, earlier.last, strict=True)),
            self.begun,
            self.ended,
        )

    def __str__(self) -> str:
        text = f"rank {self.rank} waited {self.waited:.2f} of {self.seconds:.2f} s for {self.calls} collectives; "
        if self.slowest is None:
            return text + "no rank held up the others"
        late, last = self.late[self.slowest], self.last[self.slowest]
        return text + (
            f"without the lateness of rank {self.slowest}: {self.saving:.0%} less time "
            f"(it came last to {last} of the calls, which cost {late:.2f} s)"
        )


def stats(group: dist.ProcessGroup | None = None, *, recent: bool = True) -> Stats:
    """Return what the collectives of ``group`` have cost this rank in the last 30 to 60 seconds.

    ``group`` is a group of the backend ``ours``, by default the one of all ranks. With ``recent=False``, the statistics
    begin with the group's first collective. The call needs no communication, and may come from any thread. Raises
    ValueError if another backend serves the group's CPU tensors.
    """
    backend = backend_of(group or dist.distributed_c10d._get_default_group())
    if backend is None:
        raise ValueError("the backend 'ours' does not serve CPU tensors in this group, so nothing is known of it")
    return _stats_of(backend, recent)


def slow_links(ranks: Sequence[Stats]) -> list[tuple[int, int]]:
    """Return the pairs of ranks, of which each takes the other to be the slowest, from what ``ranks`` of a group say.

    A late rank lets others wait and waits for nobody. But what comes late over a slow link makes both of its ends wait.
    """
    named = {one.rank: one.slowest for one in ranks}
    return [(a, b) for a, b in named.items() if b is not None and a < b and named.get(b) == a]


def all_stats(*, recent: bool) -> dict[str, Stats]:
    """Return the statistics of all groups of this process that the backend ``ours`` serves, by their names."""
    names = dict(dist.distributed_c10d._world.pg_names)
    known = {name: backend_of(group) for group, name in names.items()}
    return {name: _stats_of(backend, recent) for name, backend in known.items() if backend is not None}


def backend_of(group: dist.ProcessGroup) -> _C.ProcessGroupOurs | None:
    """Return the object of the backend ``ours`` that serves the group's CPU tensors; None if there is none."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none serves them
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch puts a layer around backends.
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, _C.ProcessGroupOurs) else None


def _stats_of(backend: _C.ProcessGroupOurs, recent: bool) -> Stats:
    tally = backend.tally(recent)
    return Stats(
        backend.rank(),
        tally["elapsed"] / 1e6,
        tally["calls"],
        tally["bytes"],
        tally["blocked"] / 1e6,
        tuple(late / 1e6 for late in tally["late"]),
        tuple(tally["last"]),
        tally["begun"],
        tally["ended"],
    )
