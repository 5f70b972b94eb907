"""Each injection of the campaign, tried once, and what the judge finds."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator

import pytest
from hosts import Host
from ranks import RankPool

from faults import injections
from faults.campaign import WORLD, Trial, Trials
from faults.injections import INJECTIONS
from faults.job import RESTART
from faults.judge import Outcome, judge
from faults.mismatches import kinds as kinds_of_mismatches
from faults.mismatches import try_kind
from faults.rank import Report

TRIES = 4  # on a busy machine, an error may come late


@pytest.fixture(scope="module")
def trials_on(network: Callable[..., list[Host]]) -> Iterator[Callable[[str], Trials]]:
    """Return a function that makes the trials of a place once."""
    made: dict[str, Trials] = {}

    def get(place: str) -> Trials:
        if place not in made:
            made[place] = Trials({"one node": 1, "two nodes": 2}.get(place) or network(2))
        return made[place]

    yield get
    for trials in made.values():
        trials.close()


@pytest.mark.parametrize("name", INJECTIONS)
def test_what_has_to_come_of_an_injection_does(name: str, trials_on: Callable[[str], Trials]) -> None:
    injection = INJECTIONS[name]
    if reason := injection.why_not():
        pytest.skip(reason)
    number = list(INJECTIONS).index(name)
    places = [place for place in ("one node", "two nodes", "two hosts") if place in injection.places]
    trials = trials_on(places[number % 2] if len(places) > 1 else places[0])
    parts = [part for part in injection.parts if part not in injections.MAKE_GROUPS]  # the others may take seconds
    part = parts[number % len(parts)]
    findings = []
    for seed in range(TRIES):
        outcome = trials.run(Trial(injection, part, seed))
        assert len(outcome.reports) == len(outcome.nodes), outcome.hung
        findings = judge(outcome)
        assert not {kind for kind, _ in findings} - {"late"}, findings
        if not findings and not outcome.void:
            return
    assert not findings


@pytest.mark.parametrize("kind", ["calls: order", "invalid on rank 0: gather", "models: frozen"])
def test_mismatches_are_tried(kind: str) -> None:
    assert kind in kinds_of_mismatches()
    with RankPool(WORLD, nodes=2) as pool:
        assert try_kind(pool, kind, one_node=False, rng=random.Random(0)) < 60


# --- the judge -------------------------------------------------------------------------------------------------------


def outcome_of(effect: str, *texts: str, victim: int = 1, delay: float = 0.1, part: str = "collectives") -> Outcome:
    """Return an outcome in which the rank of each of ``texts`` raised it, or got right results if it is empty."""
    injection = dataclasses.replace(INJECTIONS["SIGKILL"], effect=effect, timeout=2.0)
    outcome = Outcome(injection, part, victim, nodes=[0, 0, 1][: len(texts)], hit_at=time.monotonic())
    for rank, text in enumerate(texts):
        outcome.reports[rank] = Report(rank, "error" if text else "right", text, outcome.hit_at + delay)
    return outcome


def kinds(outcome: Outcome) -> list[str]:
    return sorted(kind for kind, _ in judge(outcome))


def test_what_did_not_hold_is_found() -> None:
    named = "rank 1 (host a, pid 7) died"
    death = outcome_of(injections.DIES, named, "", "ranks 0, 1 are gone")
    death.reports[1] = None
    assert kinds(death) == []
    assert kinds(outcome_of(injections.DIES, named, named, "rank 12 died")) == ["not named"]
    assert kinds(outcome_of(injections.DIES, "", named)) == ["no error"]
    assert kinds(outcome_of(injections.STOPS, named, named, delay=2.9)) == []
    assert kinds(outcome_of(injections.STOPS, named, named, delay=3.1)) == ["late"]  # but for the victim itself
    assert kinds(outcome_of(injections.WORKS, "", named)) == ["no error"]
    assert kinds(outcome_of(injections.CUT, "rank 2 is mute", "rank 0 is mute", "rank 0 is mute")) == ["not named"]
    assert kinds(outcome_of(injections.STORE, "the store is silent", "")) == []
    death.hung, death.left = {0: "its stack"}, ["a segment"]
    death.again = {2: None}
    death.reports[0] = Report(0, "wrong", "3 instead of 4")
    assert kinds(death) == ["hang", "left behind", "new group", "wrong result"]
    death.void = True
    assert kinds(death) == ["hang", "left behind", "wrong result"]


def test_a_rank_that_dies_before_it_joins_may_be_missed_at_the_timeout() -> None:
    late = "rank 0, 1 of group '2' did not publish where it is"
    assert kinds(outcome_of(injections.DIES, late, late, delay=4.5)) == ["late"]
    assert kinds(outcome_of(injections.DIES, late, late, delay=4.5, part=RESTART)) == []
    assert kinds(outcome_of(injections.DIES, late, late, delay=5.5, part=RESTART)) == ["late"]
