"""Says why a job is not as many times faster as it has ranks, from its timelines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ourddp.intervals import Interval, common, overlap, union
from ourddp.report import aligned
from ourddp.trace_file import Rank

__all__ = ["RankShare", "TraceReport", "analyse"]

TITLES = ("rank", "step", "compute", "exposed", "of that, peers", "reductions", "hidden")  # of the table's columns
_NOTABLE = 0.02  # of a step


@dataclass(frozen=True)
class RankShare:
    """How one rank spends a step, in milliseconds; means over the steps.

    ``compute`` and ``exposed`` make up ``step``. Of the exposed communication, ``peers`` is the wait until all ranks of
    a node have arrived, and the rest is spent on data and, with several nodes, on waiting for ranks of others. ``busy``
    is the time in which buckets were being reduced, and ``hidden`` the part of it, 0 to 1, that ran while gradients
    were computed.
    """

    rank: int
    step: float
    compute: float
    exposed: float
    peers: float
    busy: float
    hidden: float


@dataclass(frozen=True)
class TraceReport:
    """What a timeline tells. ``steps`` is the number of steps that were seen whole on all ranks.

    With ``several_nodes`` it does not tell who is late: no event tells the wait for another node from its data.
    """

    steps: int
    ranks: tuple[RankShare, ...]
    several_nodes: bool = False

    @property
    def step(self) -> float:
        """Milliseconds of a step, of the slowest rank."""
        return max(rank.step for rank in self.ranks)

    @property
    def efficiency(self) -> float:
        """The part of a step that ranks compute on average: as many times faster than one rank, divided by ranks."""
        return statistics.mean(rank.compute for rank in self.ranks) / self.step if self.step > 0 else 0.0

    @property
    def last(self) -> RankShare | None:
        """The rank that waits least for its peers, as they wait for it; None with several nodes."""
        return None if self.several_nodes else min(self.ranks, key=lambda rank: rank.peers)

    @property
    def lateness(self) -> float | None:
        """Milliseconds of a step by which that rank is later than the second last; None with several nodes."""
        if self.several_nodes:
            return None
        waits = sorted(rank.peers for rank in self.ranks)
        return waits[1] - waits[0] if len(waits) > 1 else 0.0

    @property
    def imbalance(self) -> float:
        """By what part the rank that computes most computes more than the mean."""
        shares = [rank.compute for rank in self.ranks]
        mean = statistics.mean(shares)
        return max(shares) / mean - 1 if mean > 0 else 0.0

    def sentences(self) -> list[str]:
        """Return the answer, the largest loss first."""
        count = len(self.ranks)
        exposed = statistics.mean(rank.exposed for rank in self.ranks)
        peers = min(exposed, statistics.mean(rank.peers for rank in self.ranks))
        later, data = "waiting for ranks that arrive later", "moving and reducing data"
        if self.several_nodes:
            later, data = "waiting for later ranks of the same node", f"{data}, and waiting for other nodes"
        parts = [(peers, later), (exposed - peers, data)]
        losses = ", ".join(f"{_share(ms, self.step)} {what}" for ms, what in sorted(parts, reverse=True))
        told = [
            f"A step takes {self.step:.2f} ms (mean of {self.steps}). Ranks compute for {self.efficiency:.0%} of it: "
            f"{count} ranks do the work of {count * self.efficiency:.1f}. Lost on average: {losses}."
        ]
        if self.several_nodes:
            told.append(
                "Which rank the others wait for is not in the timelines of several nodes: ourddp.stats() knows."
            )
        elif self.last and self.lateness and self.lateness > _NOTABLE * self.step:
            told.append(
                f"Rank {self.last.rank} arrives last: without its lateness a step would take {self.lateness:.2f} ms "
                f"({self.lateness / self.step:.0%}) less. Does it get more data, or a slower or shared processor?"
            )
        if self.imbalance > _NOTABLE:
            most = max(self.ranks, key=lambda rank: rank.compute)
            told.append(f"Rank {most.rank} computes {self.imbalance:.0%} more than the mean.")
        hidden = statistics.mean(rank.hidden for rank in self.ranks)
        if exposed - peers > _NOTABLE * self.step and any(rank.busy > 0 for rank in self.ranks):
            told.append(
                f"{hidden:.0%} of the reductions hide behind the computation. Larger batches, accumulation with "
                'no_sync(), gradients of 16 bits, or bucket_cap_mb="auto" leave less of them.'
            )
        return told

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), "", "milliseconds of a step:", *aligned(self.table())])

    def table(self) -> list[tuple[str, ...]]:
        """Return the cells of the table by row; the first one has the titles. Times are in milliseconds."""
        shares = [(str(one.rank), *(f"{ms:.2f}" for ms in _times(one)), f"{one.hidden:.0%}") for one in self.ranks]
        return [TITLES, *shares]


def _times(one: RankShare) -> tuple[float, ...]:
    return one.step, one.compute, one.exposed, one.peers, one.busy


def _share(ms: float, step: float) -> str:
    return f"{ms / step if step > 0 else 0:.0%}"


def analyse(ranks: Sequence[Rank]) -> TraceReport:
    """Return the report on a timeline that ``load`` has read.

    Raises ValueError if there is nothing in it, or the ranks have no step in common.
    """
    ranks = [rank for rank in ranks if rank.events]
    if not ranks:
        raise ValueError("the timeline is empty: it ended before a collective or a backward did")
    windows = {rank.number: _steps(rank) for rank in ranks}
    # Ranks begin the first step at different times, and buckets may be rebuilt after it.
    shared = sorted(set.intersection(*(set(steps) for steps in windows.values())))
    if not shared:
        without = [str(number) for number, steps in windows.items() if 0 in steps]
        who = f" (rank {', '.join(without)} recorded no two steps of a model)" if without else ""
        raise ValueError(f"the ranks have no step in common{who}: let all of them record the same steps, at least two")
    shared = shared[1:] if len(shared) > 2 else shared
    shares = tuple(_share_of(rank, [windows[rank.number][i] for i in shared]) for rank in ranks)
    return TraceReport(len(shared), shares, several_nodes=any(rank.named("wire") for rank in ranks))


def _steps(rank: Rank) -> dict[int, Interval]:
    """Return when each step was, by iteration; without a model, the whole timeline as step 0.

    A step lasts until the next recorded one. A DistributedOptimizer has backwards alone, each of which lasts from the
    end of the one before.
    """
    begins: dict[int, float] = {}
    for event in rank.named("forward") or rank.named("backward"):
        begins.setdefault(event.facts["iteration"], event.begin)  # of several models, the first one's
    steps = {one: (begins[one], begins[other]) for one, other in pairwise(sorted(begins))}
    if steps:
        return steps
    return {0: (rank.events[0].begin, max(event.end for event in rank.events))}


def _share_of(rank: Rank, steps: list[Interval]) -> RankShare:
    in_model = union(event.interval for event in rank.named("exposed communication"))
    # Without a forward a backward is no more than the time since the one before.
    backwards = union(event.interval for event in rank.named("backward")) if rank.named("forward") else []
    by_hand = [
        event.interval
        for event in rank.events
        if event.thread == rank.main_thread
        and (event.category == "collective" or event.name == "wait for the result")
        and overlap([event.interval], backwards) == 0
    ]
    exposed = union([*in_model, *by_hand])
    peers = common(exposed, union(event.interval for event in rank.named("wait for peers")))
    reductions = union(event.interval for event in rank.named("reduction"))

    def mean(of: list[Interval]) -> float:
        return overlap(steps, of) / len(steps)

    step, busy = mean(steps), mean(reductions)
    return RankShare(
        rank=rank.number,
        step=step,
        compute=step - mean(exposed),
        exposed=mean(exposed),
        peers=mean(peers),
        busy=busy,
        hidden=max(0.0, 1 - mean(in_model) / busy) if busy > 0 else 0.0,
    )
