"""What has to hold in a trial: compares what the ranks report with what the injection has to come to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from faults import injections
from faults.injections import DEATH_S, Injection
from faults.rank import Report

# The columns of the table that count what did not hold.
FAULTS = ["hang", "wrong result", "no error", "not named", "late", "new group", "left behind"]
WHENEVER = {"hang", "wrong result", "left behind"}  # those that count even if the machine stood still

# A rank that dies before it has joined a group that is being made is missed only at the timeout.
NEVER_CAME = "did not publish where it is"
NOTE_OF_NEVER_CAME = "died before it joined"


@dataclass
class Outcome:
    """What came of one trial."""

    injection: Injection
    part: str
    victim: int
    nodes: list[int]  # the node of each rank
    doing: str = ""  # what the victim did when it was hit
    hit_at: float = 0.0
    reports: dict[int, Report | None] = field(default_factory=dict)  # None: the rank has died
    hung: dict[int, str] = field(default_factory=dict)  # ranks that did not end, and their stacks
    again: dict[int, Report | None] = field(default_factory=dict)  # the same of a new group
    left: list[str] = field(default_factory=list)
    note: str = ""
    void: bool = False  # the machine stood still meanwhile, so that times mean nothing

    def delays(self) -> list[float]:
        """Return the seconds from the disturbance to each error, without the victim's."""
        if self.injection.effect == injections.SHORT or self.note == NOTE_OF_NEVER_CAME:
            return []
        others = [report for rank, report in self.reports.items() if rank != self.victim and report is not None]
        return [report.raised_at - self.hit_at for report in others if report.outcome == "error"]


def _names(report: Report, ranks: set[int]) -> bool:
    """Tell whether an error names one of ``ranks``."""
    lists = re.findall(r"\b[Rr]anks? (\d+(?:, \d+)*)", report.text)
    return any(int(rank) in ranks for numbers in lists for rank in numbers.split(", "))


def _to_blame(outcome: Outcome, rank: int) -> set[int]:
    """Return the ranks of which the error of ``rank`` has to name one.

    A rank that receives waits for its sender alone, which may wait for the victim itself.
    """
    if outcome.injection.effect == injections.CUT and outcome.part != "messages":
        return {other for other, node in enumerate(outcome.nodes) if node != outcome.nodes[rank]}
    waits_for_one = outcome.part == "messages" and outcome.injection.effect in (injections.STOPS, injections.CUT)
    if waits_for_one or outcome.injection.effect in (injections.RESET, injections.SHORT):
        return set(range(len(outcome.nodes)))
    return {outcome.victim}


def _limit(outcome: Outcome) -> float:
    """Return the seconds in which each rank has to raise."""
    waits = outcome.injection.effect in (injections.STOPS, injections.CUT, injections.STORE)
    return DEATH_S + (outcome.injection.timeout if waits else 0)


def _judge_error(outcome: Outcome, report: Report) -> list[tuple[str, str]]:
    effect = outcome.injection.effect
    who = f"rank {report.rank}"
    if effect == injections.WORKS:
        return [("no error", f"{who} raised: {report.text}")]
    blamed = _to_blame(outcome, report.rank)
    named = "store" in report.text if effect == injections.STORE else _names(report, blamed)
    found = [] if named else [("not named", f"{who} raised: {report.text}")]
    seconds = report.raised_at - outcome.hit_at
    limit = _limit(outcome)
    if effect == injections.DIES and outcome.part in injections.MAKE_GROUPS and NEVER_CAME in report.text:
        outcome.note = NOTE_OF_NEVER_CAME
        limit += injections.JOINING_S
    if seconds > limit and report.rank != outcome.victim and effect != injections.SHORT:
        found.append(("late", f"{who} raised after {seconds:.2f} s: {report.text}"))
    return found


def _judge_report(outcome: Outcome, rank: int, report: Report | None) -> list[tuple[str, str]]:
    effect = outcome.injection.effect
    if report is None:
        dead = effect == injections.DIES and rank == outcome.victim
        return [] if dead else [("no error", f"rank {rank} died")]
    if report.outcome == "wrong":
        return [("wrong result", f"rank {rank}: {report.text}")]
    if report.outcome == "broken":
        return [("no error", f"rank {rank} raised something else: {report.text}")]
    if report.outcome == "error":
        return _judge_error(outcome, report)
    if effect in (injections.WORKS, injections.STORE, injections.SHORT, injections.RESET):
        return []
    return [("no error", f"rank {rank} noticed nothing")]


def judge(outcome: Outcome) -> list[tuple[str, str]]:
    """Return what did not hold: names in FAULTS, each with a sentence."""
    effect = outcome.injection.effect
    found = [("hang", f"rank {rank} did not end:\n{stack}") for rank, stack in outcome.hung.items()]
    for rank, report in outcome.reports.items():
        found += _judge_report(outcome, rank, report)
    for rank, report in outcome.again.items():
        may_fail = effect == injections.SHORT and report is not None and report.outcome == "error"
        if not may_fail and (report is None or report.outcome != "right"):
            found.append(("new group", f"rank {rank}: {report.text if report else 'died'}"))
    found += [("left behind", what) for what in outcome.left]
    return [each for each in found if not outcome.void or each[0] in WHENEVER]
