"""What the collectives of a process group have cost, and which rank was late: :func:`stats`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ourddp import _C

__all__ = ["Stats", "stats"]

# What a rank must have cost to be named: this share of the time, more than all others together, in this many calls.
_LEAST_SHARE = 0.01
_LEAST_CALLS = 3


@dataclass(frozen=True)
class Stats:
    """What the collectives of a group have cost this rank, as far as tensors on the CPU are concerned.

    Times are in seconds, and ranks those of the group. ``seconds`` lie between the first of ``calls`` collectives and
    the end of the last one; they had ``bytes`` of this rank's tensors. ``waited`` is the time in which this rank's
    program was blocked until a collective had ended. ``late[r]`` is how much sooner this rank would have been here if
    rank ``r`` had always come with the last of the others, and ``last[r]`` counts the calls to which it came last.
    ``links[r]`` is how long this rank and rank ``r`` have both waited for what was on its way between their nodes.
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
    links: tuple[float, ...]
    begun: int
    ended: int

    @property
    def slowest(self) -> int | None:
        """The rank that held up the others; None if no rank did so more than chance would have it.

        It cost at least 1 % of the time, in at least three calls, and more than all other ranks together.
        """
        worst = max(range(len(self.late)), key=self.late.__getitem__, default=0)
        is_clear = self.last[worst] >= _LEAST_CALLS and self.late[worst] > sum(self.late) / 2
        return worst if is_clear and self.late[worst] >= _LEAST_SHARE * self.seconds else None

    @property
    def saving(self) -> float:
        """The share of the time, 0 to 1, that would have been saved if the slowest rank had not been late."""
        return 0.0 if self.slowest is None else self.late[self.slowest] / self.seconds

    @property
    def slowest_link(self) -> int | None:
        """The rank the link to which held this rank up, by at least 1 % of the time more than any other; or None."""
        ordered = sorted(range(len(self.links)), key=self.links.__getitem__)
        return ordered[-1] if self._link_cost() >= _LEAST_SHARE * self.seconds > 0 else None

    @property
    def link_saving(self) -> float:
        """The share of the time, 0 to 1, that would have been saved if that link were like the next slowest one.

        If this rank uses no other link, it is the time without the network's.
        """
        return 0.0 if self.slowest_link is None else self._link_cost() / self.seconds

    def _link_cost(self) -> float:
        *_, next_one, worst = [0.0, 0.0, *sorted(self.links)]
        return worst - next_one

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
            tuple(now - then for now, then in zip(self.links, earlier.links, strict=True)),
            self.begun,
            self.ended,
        )

    def __str__(self) -> str:
        text = f"rank {self.rank} waited {self.waited:.2f} of {self.seconds:.2f} s for {self.calls} collectives; "
        if self.slowest is not None:
            late, last = self.late[self.slowest], self.last[self.slowest]
            text += f"without the lateness of rank {self.slowest}: {self.saving:.0%} less time "
            text += f"(it came last to {last} of the calls, which cost {late:.2f} s)"
        else:
            text += "no rank held up the others"
        if self.slowest_link is not None:
            text += f"; without the slowness of the link to rank {self.slowest_link}: {self.link_saving:.0%} less time"
        return text


def stats(group: dist.ProcessGroup | None = None, *, recent: bool = True) -> Stats:
    """Return what the collectives of ``group`` have cost this rank in the last 30 to 60 seconds.

    ``group`` is a group of the backend ``ours``, by default the one of all ranks. With ``recent=False``, the statistics
    begin with the group's first collective. The call needs no communication, and may come from any thread. Raises
    ValueError if another backend serves the group's CPU tensors.
    """
    backend = _backend_of(group or dist.distributed_c10d._get_default_group())
    if backend is None:
        raise ValueError("the backend 'ours' does not serve CPU tensors in this group, so nothing is known of it")
    return _stats_of(backend, recent)


def all_stats(*, recent: bool) -> dict[str, Stats]:
    """Return the statistics of all groups of this process that the backend ``ours`` serves, by their names."""
    names = dict(dist.distributed_c10d._world.pg_names)
    known = {name: _backend_of(group) for group, name in names.items()}
    return {name: _stats_of(backend, recent) for name, backend in known.items() if backend is not None}


def _backend_of(group: dist.ProcessGroup) -> _C.ProcessGroupOurs | None:
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
        tuple(link / 1e6 for link in tally["links"]),
        tally["begun"],
        tally["ended"],
    )
