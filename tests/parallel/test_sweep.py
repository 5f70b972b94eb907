"""ourddp.sweep: trials with process groups of their own, what becomes of those that fail, and the engines."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_programs import EXAMPLES
from probes import is_running, reached
from programs import ROOT, environment, run_file

import ourddp
from ourddp.sweeps import Table
from ourddp.trials import Trial

pytestmark = pytest.mark.usefixtures("quick_starts")


def describe(trial: Trial) -> dict[str, Any]:
    ranks = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(ranks)
    return {"product": trial["a"] * trial["b"], "ranks": ranks.item(), "backend": dist.get_backend()}


def test_all_combinations_run_in_groups_of_their_own() -> None:
    seen: list[int] = []
    table = ourddp.sweep(
        describe, {"a": [2, 3], "b": [5, 7]}, ranks=2, processes=4, each=lambda row: seen.append(row["trial"])
    )
    assert [list(row.values())[:6] for row in table] == [
        [number, a, b, a * b, 3, "ours"] for number, (a, b) in enumerate([(2, 5), (2, 7), (3, 5), (3, 7)])
    ]
    assert [row["error"] for row in table] == [""] * 4
    assert sorted(seen) == [0, 1, 2, 3]


def meet(trial: Trial) -> None:
    (trial["folder"] / str(trial.number)).touch()
    while len(list(trial["folder"].iterdir())) < 2:
        time.sleep(0.01)


def test_several_trials_run_at_a_time(tmp_path: Path) -> None:
    table = ourddp.sweep(meet, [{"folder": tmp_path}] * 2, ranks=1, processes=2, timeout=60)
    assert [row["error"] for row in table] == ["", ""]


def do_nothing(trial: Trial) -> None:
    pass


def test_a_trial_that_ends_while_another_one_is_chosen_is_noticed() -> None:
    others = set(multiprocessing.active_children())  # the ranks of other tests

    def choose() -> Iterator[dict[str, int]]:
        yield {"x": 0}
        while set(multiprocessing.active_children()) != others:
            time.sleep(0.01)

    [row] = ourddp.sweep(do_nothing, choose(), ranks=1, processes=2)
    assert row["error"] == ""


def run_alone(trial: Trial) -> None:
    (trial["folder"] / "running").mkdir()  # which fails if it exists
    (trial["folder"] / "running").rmdir()


def test_no_more_trials_run_at_a_time_than_have_room(tmp_path: Path) -> None:
    table = ourddp.sweep(run_alone, {"folder": [tmp_path] * 3}, ranks=1, processes=1)
    assert [row["error"] for row in table] == [""] * 3


def fail(trial: Trial) -> Any:
    if trial["how"] == "unpicklable":
        return lambda: None
    if dist.get_rank() == 1:
        if trial["how"] == "raise":
            raise KeyError("no such thing")
        if trial["how"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if trial["how"] == "exit":
            os._exit(7)
    dist.barrier()  # where the other rank notices, and raises later
    return sys.exit() if trial["how"] == "leave" else "good"


def test_a_failed_trial_is_recorded_and_the_others_go_on() -> None:
    ends = {
        "raise": "KeyError: 'no such thing'",
        "die": "rank 1 died of SIGKILL",
        "exit": "rank 1 exited with 7",
        "leave": "rank 0 left no result",
        "unpicklable": "lambda",
        "not at all": "",
    }
    table = ourddp.sweep(fail, [{"how": how} for how in ends], ranks=2, processes=4)
    for row, (how, end) in zip(table, ends.items(), strict=True):
        assert row["how"] == how
        assert end in (row["error"].splitlines() or [""])[-1]
        assert ("result" in row) == (row["error"] == "")
    assert table[0]["error"].startswith("rank 1: Traceback")
    assert table[-1]["result"] == "good"


def hang(trial: Trial) -> None:
    time.sleep(1000)


def test_a_trial_that_takes_too_long_has_failed() -> None:
    others = set(multiprocessing.active_children())
    [row] = ourddp.sweep(hang, [{}], ranks=2, processes=2, timeout=0.5)
    assert row["error"] == "the trial took more than 0.5 s"
    assert 0.5 <= row["seconds"] < 60
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_no_processes_behind(tmp_path: Path, sent: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time, ourddp\n"
        "def hang(trial):\n"
        "    open(os.path.join(sys.path[0], f'pid-{os.getpid()}'), 'w')\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    ourddp.sweep(hang, {'a': [1, 2, 3]}, ranks=2, processes=4)\n"
    )
    around = environment(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))  # where a program that is killed leaves files
    with subprocess.Popen([sys.executable, program], stderr=subprocess.PIPE, text=True, env=around) as process:
        try:
            while len(pids := [int(path.name[4:]) for path in tmp_path.glob("pid-*")]) < 4:
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(sent)
            _, printed = process.communicate(timeout=60)
        finally:
            process.kill()
    if sent == signal.SIGINT:
        assert printed.strip().endswith("KeyboardInterrupt")
        assert not any(map(is_running, pids))
    # The ranks of a program that dies notice it themselves.
    assert reached(lambda: not any(map(is_running, pids)), 60)


def halve(trial: Trial) -> Any:
    return {"half": trial["x"] / 2} if trial["x"] < 3 else {"other": 0}


class Study:
    """Asks and tells as an Optuna study does."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def ask(self, distributions: dict[str, list[int]]) -> Any:
        values = {name: values[len(self.events) // 2] for name, values in distributions.items()}
        self.events.append("ask")
        return types.SimpleNamespace(params=values)

    def tell(self, trial: Any, value: float | None = None, state: Any = None) -> None:
        self.events.append((trial.params["x"], value, state))


def test_a_study_is_asked_when_a_trial_begins_and_told_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", types.ModuleType("optuna"))
    states = types.SimpleNamespace(TrialState=types.SimpleNamespace(FAIL="failed"))
    monkeypatch.setitem(sys.modules, "optuna.trial", states)
    study = Study()
    table = ourddp.sweep(halve, {"x": [1, 3]}, ranks=1, processes=1, study=study, count=2, objective="half")
    assert study.events == ["ask", (1, 0.5, None), "ask", (3, None, "failed")]
    assert table[1]["error"] == "the study is to be told 'half', but the function returned 'other'"


def test_optuna() -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    uniform = {"x": optuna.distributions.FloatDistribution(0, 4)}
    table = ourddp.sweep(halve, uniform, ranks=1, processes=2, study=study, count=4, objective="half")
    assert [trial.params["x"] for trial in study.trials] == [row["x"] for row in table]
    for row, trial in zip(table, study.trials, strict=True):
        assert trial.state.name == ("FAIL" if row["error"] else "COMPLETE")
        assert row["error"] or trial.value == row["half"]


def fake_ray() -> types.ModuleType:
    """Return a module whose tasks run at once; the first one fails as if its machine were lost."""
    ray, started = types.ModuleType("ray"), []

    class RayError(Exception):
        pass

    def remote(**options: int) -> Any:
        assert options == {"num_cpus": 1, "max_retries": 0}

        def start(function: Any) -> Any:
            def task(*arguments: Any) -> Any:
                started.append(function)
                return Reference(None if len(started) == 1 else function(*arguments))

            return types.SimpleNamespace(remote=task)

        return start

    class Reference:
        def __init__(self, result: Any) -> None:
            self.result = result

    def get(reference: Reference) -> Any:
        if reference.result is None:
            raise RayError("the machine is lost")
        return reference.result

    ray.exceptions = types.SimpleNamespace(RayError=RayError)
    ray.is_initialized, ray.cluster_resources = lambda: True, lambda: {"CPU": 2.0}
    ray.cloudpickle, ray.remote, ray.get = __import__("pickle"), remote, get
    ray.wait = lambda references: (references[-1:], references[:-1])
    return ray


def test_trials_are_tasks_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray())
    monkeypatch.delitem(sys.modules, "ourddp.sweep_by_ray", raising=False)
    table = ourddp.sweep(halve, {"x": [0, 1, 2]}, ranks=1, ray=True)
    del sys.modules["ourddp.sweep_by_ray"]
    assert [row["error"] for row in table] == ["Ray: the machine is lost", "", ""]
    assert [row.get("half") for row in table] == [None, 0.5, 1.0]


def test_ray() -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2)
    try:
        table = ourddp.sweep(lambda trial: trial["a"] * dist.get_world_size(), {"a": [3, None]}, ranks=2, ray=True)
    finally:
        ray.shutdown()
    assert table[0].get("result") == 6, table[0]["error"]
    assert "TypeError" in table[1]["error"].splitlines()[-1]


def test_the_example_prints_a_table_and_the_best_parameters() -> None:
    # One trial, since each of its ranks spends seconds on loading torch.
    flags = ("--lr", "0.2", "--batch-size", "24", "--samples", "480")
    [(status, output)] = run_file(EXAMPLES / "sweep.py", *flags)
    assert status == 0, output
    assert "| trial | lr | batch size | loss | accuracy | seconds |" in output
    [accuracy] = re.findall(r"^trial 0: ([\d.]+)%$", output, re.M)
    assert 10 < float(accuracy) < 100  # guessing gets 10
    assert output.endswith("the best: --lr 0.2 --batch-size 24\n")


def test_a_table_in_markdown() -> None:
    table = Table(
        [
            {"trial": 0, "lr": 0.1, "name": "a|b", "loss": 0.123456, "seconds": 2.0, "error": ""},
            {"trial": 1, "lr": 0.2, "name": "c", "seconds": 1.5, "error": "Traceback\nKeyError: 1"},
        ]
    )
    assert table.to_markdown().splitlines() == [
        "| trial | lr | name | loss | seconds | error |",
        "| --- | --- | --- | --- | --- | --- |",
        r"| 0 | 0.1 | a\|b | 0.1235 | 2 |  |",
        "| 1 | 0.2 | c |  | 1.5 | KeyError: 1 |",
    ]
    assert "error" not in Table(table[:1]).to_markdown()


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="a trial has 3 ranks, and 2 processes may run"):
        ourddp.sweep(describe, {}, ranks=3, processes=2)
    with pytest.raises(ValueError, match="give count"):
        ourddp.sweep(describe, {}, study=Study())
    with pytest.raises(ValueError, match="a parameter is named 'seconds'"):
        ourddp.sweep(describe, {"seconds": [1]})
    with pytest.raises((AttributeError, TypeError), match="lambda"):
        ourddp.sweep(lambda trial: 0, {"a": [1]})
