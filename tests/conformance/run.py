"""Run PyTorch's own distributed suite against a backend and compare with what Gloo passes.

    python tests/conformance/run.py              # the backend `ours`, world sizes 2, 3 and 4, torch's own DDP
    python tests/conformance/run.py --ddp ours   # ourddp.DistributedDataParallel in the place of torch's
    python tests/conformance/run.py --world-sizes 4 --nodes 2   # 2 nodes of 2 ranks, which share no memory
    python tests/conformance/run.py --backend gloo --save-baseline   # store the names of the tests that Gloo passes

Exit status 0: every test that the baseline names passed. Without a stored baseline for this torch, Gloo is run first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

_FOLDER = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path[0] = str(_FOLDER.parent)

from conformance import report  # noqa: E402
from conformance.report import Outcome, Results  # noqa: E402

_GRACE_S = 60  # beyond a test's own bound, for starting ranks and collecting their traces


class _Worker:
    """A process that runs tests of one world size and reports a JSON line for each."""

    def __init__(self, options: argparse.Namespace, backend: str, ddp: str, world_size: int, log: Path) -> None:
        self._timeout_s, self._log = options.timeout, log
        self._arguments = [f"--world-size={world_size}", f"--backend={backend}", f"--ddp={ddp}"]
        self._arguments += [f"--timeout={options.timeout}", f"--nodes={options.nodes}", f"--log={log}"]

    def _start(self, tests: list[str], *extra: str) -> tuple[subprocess.Popen[str], queue.Queue[str | None]]:
        command = [sys.executable, "-m", "conformance.worker", *self._arguments, *extra]
        folder = _FOLDER.parent
        path = [*map(str, (folder, folder / "support", folder.parent)), os.environ.get("PYTHONPATH", "")]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with self._log.with_suffix(".err").open("a") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True).start()
        assert process.stdin is not None
        process.stdin.write("\n".join(tests))
        process.stdin.close()
        return process, lines

    @staticmethod
    def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    def _next(self, lines: queue.Queue[str | None]) -> dict[str, Any] | None:
        """The worker's next report; None once it ended or fell silent for too long."""
        try:
            line = lines.get(timeout=3 * self._timeout_s + _GRACE_S)
        except queue.Empty:
            return None
        report_line: dict[str, Any] | None = None if line is None else json.loads(line)
        return report_line

    def run(self, pattern: str, only: list[str] | None) -> list[Outcome]:
        """Run the tests, those in ``only`` if given, whose name ``pattern`` finds.

        A worker that dies or hangs costs only the test that it was running. The first worker tells the names, since
        the suite reads its world size while it is imported.
        """
        outcomes: list[Outcome] = []
        left = only
        while left is None or left:
            process, lines = self._start(left or [], f"--pattern={pattern}")
            began = time.monotonic()
            first = self._next(lines)
            if first is None:
                _end(process)
                raise RuntimeError(
                    "the suite cannot be imported:\n" + self._log.with_suffix(".err").read_text()[-4000:]
                )
            left = list(first["tests"])
            try:
                while left and (answer := self._next(lines)) is not None:
                    if "start" in answer:
                        began = time.monotonic()
                        continue
                    outcomes.append(Outcome(**answer))
                    left.remove(answer["test"])
                    print(outcomes[-1].line, flush=True)
            finally:
                _end(process)
            if left:
                seconds = time.monotonic() - began
                outcomes.append(Outcome(left.pop(0), "crash", seconds, "the worker died or hung in this test"))
                print(outcomes[-1].line, flush=True)
        return outcomes


def _end(process: subprocess.Popen[str]) -> None:
    """End the worker and whatever it left in its process group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_suite(options: argparse.Namespace, backend: str, ddp: str, only: dict[int, list[str]] | None = None) -> Results:
    """Run the suite, or the tests named in ``only``, at every world size asked for."""
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        for world_size in options.world_sizes:
            print(f"\n== {backend} (DDP: {ddp}), world size {world_size}", flush=True)
            worker = _Worker(options, backend, ddp, world_size, Path(folder) / f"ranks-{world_size}.log")
            results[world_size] = worker.run(options.k, None if only is None else only.get(world_size, []))
    return results


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=lambda text: [int(size) for size in text.split(",")], default=[2, 3, 4])
    parser.add_argument("--backend", default="ours", help="a registered c10d backend (default: %(default)s)")
    parser.add_argument("--ddp", choices=("torch", "ours"), default="torch", help="whose DDP (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes the ranks play (default: %(default)s)")
    parser.add_argument("-k", default="", metavar="REGEX", help="run the tests whose name matches")
    parser.add_argument(
        "--timeout", type=int, default=120, metavar="SECONDS", help="for one test (default: %(default)s)"
    )
    parser.add_argument("--baseline-only", action="store_true", help="run only the tests that the baseline names")
    parser.add_argument("--save-baseline", action="store_true", help="store what passes as this torch's baseline")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome with errors and output")
    parser.add_argument(
        "--show", type=int, default=20, metavar="LINES", help="lines of a failure to print (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def _print_failures(outcomes: list[Outcome], names: list[str], lines: int) -> None:
    for outcome in outcomes:
        if outcome.test in names:
            print(f"\n-- {outcome.test}: {outcome.outcome}\n" + "\n".join(outcome.detail.strip().splitlines()[-lines:]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the worker and its ranks end as well
    torch_version = importlib.metadata.version("torch").split("+")[0]
    baseline_path = _FOLDER / f"gloo_passes_{torch_version}.json"
    baseline: dict[int, list[str]] = {}
    if (options.backend, options.ddp) != ("gloo", "torch"):
        if baseline_path.exists():
            baseline = report.load_baseline(baseline_path)
        if not set(options.world_sizes) <= set(baseline):
            print(f"no stored baseline for torch {torch_version}: running Gloo first")
            baseline = report.passed(run_suite(options, "gloo", "torch"))

    results = run_suite(options, options.backend, options.ddp, baseline if options.baseline_only and baseline else None)
    if options.json:
        report.save_results(options.json, results)
    if options.save_baseline:
        report.save_baseline(baseline_path, torch_version, results)

    lost = report.missing(results, baseline)
    for world_size, outcomes in results.items():
        _print_failures(outcomes, lost[world_size], options.show)
    print()
    for world_size, outcomes in results.items():
        print(report.summary(world_size, outcomes))
        if baseline:
            ran = {outcome.test for outcome in outcomes}
            expected = len(ran.intersection(baseline[world_size]))
            print(f"  of {expected} that Gloo passes: {expected - len(lost[world_size])} pass")
            for test in lost[world_size]:
                print(f"    does not pass: {test}")
    return 1 if any(lost.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
