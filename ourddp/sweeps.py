"""Tries combinations of parameters, and makes a table of the results."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ourddp import trials as local
from ourddp.processes import cores as cores_here
from ourddp.trials import Outcome, Plan, Trial

OWN_COLUMNS = ("trial", "seconds", "error")

Row = dict[str, Any]


class Table(list[Row]):
    """The rows of a sweep: ``trial`` (its number), the parameters, the results, ``seconds``, and ``error``."""

    def to_markdown(self) -> str:
        """Return the table in Markdown, with the last line of each error, and without that column if there are none."""
        names = [name for name in dict.fromkeys(itertools.chain(*self)) if name not in OWN_COLUMNS]
        names = ["trial", *names, "seconds", *(["error"] if any(row["error"] for row in self) else [])]
        lines = [names, ["---"] * len(names), *([_cell(row.get(name, "")) for name in names] for row in self)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return (text.splitlines() or [""])[-1].replace("|", "\\|")


def sweep(
    fn: Callable[[Trial], Any],
    grid: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    *,
    ranks: int = 2,
    processes: int | None = None,
    timeout: float | None = None,
    backend: str = "ours",
    each: Callable[[Row], None] | None = None,
    study: Any = None,
    count: int | None = None,
    objective: str = "result",
    ray: bool = False,
) -> Table:
    """Run ``fn(trial)`` for each combination of parameters, each time in a new process group of ``ranks`` processes.

    Several trials run at a time. One that fails, because a rank raises or dies or because it takes too long, gets a row
    that says why, and the others go on. An interrupt ends all processes before it is raised here.

    The processes are spawned. So a program calls this under ``if __name__ == "__main__":``, and ``fn`` has to be a
    function at the top level of a module.

    Args:
        fn: What each rank of a trial runs, in its default process group; ``trial["lr"]`` is a parameter. What it
            returns on rank 0 becomes columns of the table if it is a dict, and otherwise the column ``result``.
        grid: Lists of values by name, of which all combinations are tried; or the combinations themselves; or with
            ``study``, Optuna's distributions by name.
        ranks: The processes of a trial.
        processes: How many may run at a time; by default one for each core. The cores are shared out among them.
        timeout: Seconds after which a trial has failed, from the start of its processes, which takes some.
        backend: What ``init_process_group`` gets.
        each: Called with each row when its trial has ended.
        study: An Optuna study, which is asked for parameters when a trial begins, and told the objective when it ends.
        count: How many trials the study is asked for.
        objective: The column that the study is told.
        ray: Whether the trials are tasks of Ray, each on a machine of its cluster that has a core for each rank.
            ``processes`` are by default the cores of the cluster.

    Returns:
        A row for each trial, in the order in which they began.

    Raises:
        ValueError: If the numbers do not fit together, or a parameter has the name of another column.
        ImportError: If Ray is wanted and not installed.

    """
    cores = cores_here()
    run, dumps = local.run, pickle.dumps
    if ray:
        from ourddp import sweep_by_ray

        run, dumps, cores = sweep_by_ray.run, sweep_by_ray.dumps, sweep_by_ray.cores()
    if processes is None:
        processes = max(ranks, cores)
    if not 1 <= ranks <= processes:
        raise ValueError(f"a trial has {ranks} ranks, and {processes} processes may run: let ranks be 1 to {processes}")
    if study is not None and count is None:
        raise ValueError("a study has no end: give count, the number of trials that it is asked for")
    threads = 1 if ray else max(1, cores // processes)
    plan = Plan(dumps(fn), ranks, threads, backend, math.inf if timeout is None else timeout)
    asked: list[Any] = []  # Optuna's trials by number
    parameters = _combinations(grid) if study is None else _ask(study, grid, count, asked)
    trials = (_checked(Trial(number, dict(values))) for number, values in enumerate(parameters))
    rows = {}
    with contextlib.closing(run(plan, trials, processes // ranks)) as ended:
        for trial, outcome in ended:
            row = _row(trial, outcome, None if study is None else objective)
            if study is not None:
                _tell(study, asked[trial.number], row, objective)
            rows[trial.number] = row
            if each is not None:
                each(row)
    return Table(rows[number] for number in sorted(rows))


def _combinations(grid: Any) -> Iterable[Mapping[str, Any]]:
    if not isinstance(grid, Mapping):
        return grid
    return (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def _checked(trial: Trial) -> Trial:
    if clash := trial.parameters.keys() & set(OWN_COLUMNS):
        raise ValueError(f"a parameter is named {clash.pop()!r}, as a column of the table is: give it another name")
    return trial


def _row(trial: Trial, outcome: Outcome, needed: str | None) -> Row:
    """Return the row of a trial; it has failed as well if it lacks what is needed, or hides another column."""
    result, error = outcome.result, outcome.error
    results = {} if error else result if isinstance(result, dict) else {"result": result}
    if clash := results.keys() & {*OWN_COLUMNS, *trial.parameters}:
        results, error = {}, f"the function returned {clash.pop()!r}, which is the name of another column"
    elif needed is not None and not error and needed not in results:
        error = f"the study is to be told {needed!r}, but the function returned {', '.join(map(repr, results))}"
    return {"trial": trial.number, **trial.parameters, **results, "seconds": outcome.seconds, "error": error}


def _ask(study: Any, distributions: Any, count: int, asked: list[Any]) -> Iterator[Mapping[str, Any]]:
    for _ in range(count):
        asked.append(study.ask(distributions))
        yield asked[-1].params


def _tell(study: Any, asked: Any, row: Row, objective: str) -> None:
    from optuna.trial import TrialState

    if row["error"]:
        study.tell(asked, state=TrialState.FAIL)
    else:
        study.tell(asked, row[objective])
