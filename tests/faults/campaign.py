"""Trials: a job on a team of ranks, a disturbance at a random moment, the end, and a new group."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from ranks import Nodes

from faults import injections, surroundings
from faults.injections import JOINING_S, Injection, Strike
from faults.job import PARTS, RESTART, Job
from faults.judge import Outcome
from faults.team import StoreProcess, Team

WORLD = 4
GRACE_S = 10.0  # a rank that has not ended this long after it should have hangs
STILL_S = 0.4  # a machine that stands still for longer makes a trial void


# What each process gets with its first group that is not within a node, and keeps. A group within a node becomes one if
# a rank dies before the others have seen its memory.
BETWEEN_NODES = Counter({"thread ours_where_tcp": 1, "descriptor of socket": 2})


class Watch:
    """Notices when the whole machine stands still, as one in the cloud may."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.02):
            now = time.monotonic()
            self._longest = max(self._longest, now - last)
            last = now

    def restart(self) -> float:
        """Return the longest time without a tick since the last call."""
        longest, self._longest = self._longest, 0.0
        return longest

    def close(self) -> None:
        """End the thread."""
        self._over.set()


def own_segments() -> set[str]:
    """Return the names of the package's files in /dev/shm, which should have none."""
    return {name for name in os.listdir("/dev/shm") if "ours" in name}


@dataclass
class Trial:
    """A trial that can be repeated: the same injection, place and seed."""

    injection: Injection
    part: str
    seed: int

    def job(self, name: str, rank: int, victim: int, store: tuple[str, int]) -> Job:
        """Return what ``rank`` is to do."""
        rng = random.Random(self.seed)
        own = self.injection.own if rank == victim else ""
        groups = self.part in injections.MAKE_GROUPS
        timeout = min(self.injection.timeout, JOINING_S) if groups else self.injection.timeout
        patience = timeout if groups else 30
        step = rng.randint(1, 8)
        return Job(name, self.seed, self.part, rank, WORLD, store, timeout, patience, own, step)


class Trials:
    """Runs trials in one place, with one team for each surroundings."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._teams: dict[str, Team] = {}
        self._usual: Counter[str] = Counter()  # what a process has after a peaceful job
        self._watch = Watch()
        self._count = 0

    def close(self) -> None:
        """End all processes."""
        self._watch.close()
        for team in self._teams.values():
            team.close()

    def _team(self, around: str) -> Team:
        if around not in self._teams:
            if around != surroundings.NONE:  # one of these at a time
                for name in [name for name in self._teams if name != surroundings.NONE]:
                    self._teams.pop(name).close()
            self._teams[around] = Team(WORLD, self._nodes, around)
        self._teams[around].complete()
        return self._teams[around]

    def _name(self) -> str:
        self._count += 1
        return f"job {self._count}"

    def run(self, trial: Trial) -> Outcome:
        """Run a trial. Whatever comes of it, the team can be used again."""
        injection = trial.injection
        rng = random.Random(trial.seed)
        team = self._team(injection.around)
        shared = own_segments()
        store = StoreProcess() if injection.own_store else None
        victim = rng.randrange(WORLD)
        outcome = Outcome(injection, trial.part, victim, [team.node_of(rank) for rank in range(WORLD)])
        self._watch.restart()
        name, address = self._name(), store.address if store else team.store
        team.begin({rank: trial.job(name, rank, victim, address) for rank in range(WORLD)})
        strike = Strike(team, victim, rng, store)
        try:
            self._disturb(trial, strike, outcome)
            self._await(strike, outcome)
        finally:
            strike.undo.close()
            if store:
                store.close()
        outcome.void = self._watch.restart() > STILL_S or outcome.void
        team.kill(outcome.hung)
        self._meet_again(team, outcome)
        outcome.left += [f"/dev/shm/{name}" for name in own_segments() - shared]
        return outcome

    @staticmethod
    def _disturb(trial: Trial, strike: Strike, outcome: Outcome) -> None:
        page = strike.team.pages[strike.victim]
        deadline = time.monotonic() + 30
        # A part is disturbed once all ranks have made the group of the job, whose timeout is another one.
        awaited, pages = (("", "init"), strike.team.pages) if trial.part in PARTS else (("",), [page])
        while any(each.doing in awaited for each in pages) and time.monotonic() < deadline:
            time.sleep(0.001)
        outcome.void = time.monotonic() >= deadline
        time.sleep(strike.rng.uniform(0, 0.12))
        outcome.doing, outcome.hit_at = page.doing, time.monotonic()
        trial.injection.act(strike)
        outcome.note = strike.note
        if trial.injection.effect in (injections.WORKS, injections.STORE, injections.SHORT):
            time.sleep(strike.rng.uniform(0.05, 0.3))
            strike.team.pages[0].ends = True
        if trial.injection.effect == injections.RESET:
            time.sleep(injections.DEATH_S if strike.note != injections.NOTHING_DONE else 0)
            strike.team.pages[0].ends = True

    @staticmethod
    def _await(strike: Strike, outcome: Outcome) -> None:
        """Collect the reports: first those of the ranks that must not wait for a stopped one."""
        team, victim = strike.team, strike.victim
        limit = max(outcome.injection.timeout, JOINING_S) + GRACE_S
        others = [rank for rank in range(WORLD) if rank != victim]
        stops = outcome.injection.effect == injections.STOPS
        first = others if stops else range(WORLD)
        outcome.reports = team.collect(first, time.monotonic() + limit)
        strike.undo.close()
        if stops:
            outcome.reports |= team.collect([victim], time.monotonic() + limit)
        if team.pages[victim].hit_at:
            outcome.hit_at = team.pages[victim].hit_at
        outcome.hung = {rank: team.stack(rank) for rank in range(WORLD) if rank not in outcome.reports}

    def _meet_again(self, team: Team, outcome: Outcome) -> None:
        """Let the ranks that are left make a new group, and use it."""
        # A rank that was killed may have reported just before.
        dead = {outcome.victim} if outcome.injection.effect == injections.DIES else set()
        team.kill(dead)
        alive = [rank for rank, report in outcome.reports.items() if report is not None and rank not in dead]
        if not alive:
            return
        name = self._name()
        jobs = {
            rank: Job(name, 7, "collectives", index, len(alive), team.store, 20, steps=2)
            for index, rank in enumerate(sorted(alive))
        }
        team.begin(jobs)
        outcome.again = team.collect(alive, time.monotonic() + 30 + GRACE_S)
        for rank in set(alive) - set(outcome.again):
            outcome.hung[rank] = "in a new group\n" + team.stack(rank)
        team.kill(outcome.hung)

    # --- what processes have left behind -----------------------------------------------------------------------------

    def learn_what_is_usual(self) -> None:
        """Let the ranks do all parts of a job in peace, and remember what their processes have then."""
        team = self._team(surroundings.NONE)
        for part in (*PARTS, RESTART):
            name = self._name()
            team.begin({r: Job(name, 1, part, r, WORLD, team.store, 30, steps=2) for r in range(WORLD)})
            reports = team.collect(range(WORLD), time.monotonic() + 60)
            assert all(report is not None and report.outcome == "right" for report in reports.values()), reports
        time.sleep(4)  # threads tell latecomers for three seconds that a rank has left
        for each in team.possessions(range(WORLD)):
            self._usual |= each

    def _beyond_usual(self, own: Counter[str]) -> Counter[str]:
        """Return what a process has beyond what is usual."""
        usual = self._usual.copy()
        if BETWEEN_NODES.keys() - usual.keys() and own.keys() >= BETWEEN_NODES.keys():
            usual += BETWEEN_NODES
        return own - usual

    def left_behind(self, patience: float = 6) -> list[str]:
        """Return what the processes have beyond what is usual, even after ``patience`` seconds."""
        team = self._team(surroundings.NONE)
        deadline = time.monotonic() + patience
        while True:
            more = [self._beyond_usual(each) for each in team.possessions(range(WORLD))]
            if not any(more) or time.monotonic() > deadline:
                texts = [", ".join(f"{count} more: {what}" for what, count in each.items()) for each in more]
                return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
            time.sleep(0.05)
