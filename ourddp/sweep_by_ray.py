"""Runs the trials of a sweep as tasks of Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import ray
from ray import cloudpickle

from ourddp import trials as local
from ourddp.trials import Outcome, Plan, Trial

dumps = cloudpickle.dumps  # takes functions of the main program along, which the workers of Ray do not have


def cores() -> int:
    """Return the cores of the cluster, which is started on this machine if there is none."""
    if not ray.is_initialized():
        ray.init()
    return int(ray.cluster_resources().get("CPU", 1))


def _run_one(plan: Plan, trial: Trial) -> Outcome:
    [(_, outcome)] = local.run(plan, [trial], 1)
    return outcome


def run(plan: Plan, trials: Iterable[Trial], most: int) -> Iterator[tuple[Trial, Outcome]]:
    """Yield each trial when it has ended, as ourddp.trials.run() does."""
    trials = iter(trials)
    # Ray would try again what has failed.
    task = ray.remote(num_cpus=plan.ranks, max_retries=0)(_run_one)
    running: dict[Any, Trial] = {}
    try:
        while True:
            running.update((task.remote(plan, trial), trial) for trial in islice(trials, most - len(running)))
            if not running:
                return
            [ended], _ = ray.wait(list(running))
            trial = running.pop(ended)
            try:
                outcome = ray.get(ended)
            except ray.exceptions.RayError as error:
                outcome = Outcome(0.0, error=f"Ray: {error}")
            yield trial, outcome
    finally:
        for task in running:
            ray.cancel(task, force=True)
