"""Ranks that ``ourddp.launch()`` and ``ourddp launch`` start: results, errors, interrupts, jobs side by side."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import ROOT, environment, run_file, run_module, started, warm_python

import ourddp
from ourddp import launching, processes
from ourddp.__main__ import main

TIMEOUT = 120
pytestmark = pytest.mark.usefixtures("quick_starts")


# --- a function ------------------------------------------------------------------------------------------------------


def summed(more: int) -> tuple[int, int, int, str]:
    tensor = torch.tensor([dist.get_rank() + more])
    dist.all_reduce(tensor)
    return dist.get_rank(), int(tensor), torch.get_num_threads(), dist.get_backend()


def places() -> tuple[int, int, int, int]:
    found = ourddp.rank(), ourddp.size(), ourddp.local_rank(), ourddp.local_size()
    ourddp.shutdown()
    return found


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the culprit")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave() -> None:
    sys.exit(0)


def wait_for_ever(path: str) -> None:
    Path(path, str(os.getpid())).touch()
    threading.Event().wait()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())  # of ranks that other tests keep
    yield
    assert set(multiprocessing.active_children()) <= before


def test_results_come_by_rank():
    assert ourddp.launch(summed, (10,), ranks=2, threads=3) == [(rank, 21, 3, "ours") for rank in range(2)]


def test_ranks_know_their_places_and_may_leave_the_group():
    assert ourddp.launch(places) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_the_first_error_is_raised_with_its_rank_and_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1: .*Traceback.*in fail_on_one\n.*KeyError: 'the culprit'$"):
        ourddp.launch(fail_on_one)
    with pytest.raises(RuntimeError, match=r"^rank 1 died of SIGKILL$"):
        ourddp.launch(die_on_one, backend="gloo")
    with pytest.raises(RuntimeError, match=r"^rank 0 left no result that can be read"):
        ourddp.launch(leave, ranks=1)


def test_too_long_a_run_is_ended(tmp_path):
    with pytest.raises(TimeoutError, match=r"the 1 ranks took more than 0\.1 s and were ended"):
        ourddp.launch(wait_for_ever, (str(tmp_path),), ranks=1, timeout=0.1)


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
sys.path[:0] = [{root!r}, {here!r}]
import ourddp, multiprocessing
from test_launching import wait_for_ever
def interrupt(folder):
    while len(os.listdir(folder)) < 2:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
if __name__ == "__main__":
    threading.Thread(target=interrupt, args=(sys.argv[1],), daemon=True).start()
    try:
        ourddp.launch(wait_for_ever, (sys.argv[1],))
    except KeyboardInterrupt:
        print("interrupted", multiprocessing.active_children())
"""


def test_an_interrupt_ends_all_ranks(tmp_path):
    script, started = tmp_path / "script.py", tmp_path / "started"
    support = f"{ROOT}/tests/support"
    here = str(Path(__file__).parent)
    script.write_text(f"import sys\nsys.path.insert(0, {support!r})\n" + INTERRUPTED.format(root=str(ROOT), here=here))
    started.mkdir()
    line = [sys.executable, str(script), str(started)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted []\n"), done.stderr
    for pid in os.listdir(started):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize("numbers", [{"ranks": 0}, {"threads": 0}, {"timeout": 0}])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="has to be greater than 0"):
        ourddp.launch(summed, (1,), **numbers)


def without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: Any) -> Any:
        if name == "cloudpickle":
            raise ImportError(name)
        return original(name, *arguments)

    original = launching.importlib.import_module
    monkeypatch.setattr(launching.importlib, "import_module", refuse)


def test_what_cannot_be_pickled_needs_cloudpickle(monkeypatch):
    assert launching._pickler(summed, (1,)) is pickle.dumps
    own = 5
    dumps = launching._pickler(lambda: own, ())
    assert pickle.loads(dumps(lambda: own))() == 5
    with pytest.raises(ValueError, match=r"cannot be sent to other processes: .*Make what cannot be pickled"):
        launching._pickler(summed, (threading.Lock(),))
    without_cloudpickle(monkeypatch)
    assert launching._pickler(summed, (1,)) is pickle.dumps
    with pytest.raises(
        ValueError, match=r"<lambda> cannot be sent .*pip install cloudpickle\), or move it into a file"
    ):
        launching._pickler(lambda: own, ())


def test_a_function_of_a_notebook_needs_cloudpickle(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    monkeypatch.setattr(summed, "__module__", "__main__")
    assert launching._pickler(summed, (1,)) is not pickle.dumps
    without_cloudpickle(monkeypatch)
    with pytest.raises(ValueError, match="summed cannot be sent to other processes: it is defined in a notebook"):
        launching._pickler(summed, (1,))


CELL = """
import torch, torch.distributed as dist, ourddp

class Result:
    def __init__(self, value):
        self.value = value

def work(more):
    tensor = torch.tensor([dist.get_rank() + more])
    dist.all_reduce(tensor)
    return Result(int(tensor))

results = ourddp.launch(work, (1,), ranks=2)
print([isinstance(one, Result) and one.value for one in results])
"""


def test_a_cell_of_a_notebook_starts_ranks_of_its_own_function(monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("cloudpickle")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3").execute()
    (output,) = [one for one in notebook.cells[0].outputs if one.output_type == "stream" and one.name == "stdout"]
    assert output.text == "[3, 3]\n"


def test_the_example_of_the_documents_runs(tmp_path):
    page = (ROOT / "docs" / "launch.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ourddp.launch(" in code]
    (tmp_path / "example.py").write_text(example)
    assert run_file(tmp_path / "example.py") == [(0, "[21, 21]\n")]


# --- a program -------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, pathlib, sys, time, torch, torch.distributed as dist, ourddp
place = ourddp.init()
ones = torch.ones(1)
dist.all_reduce(ones)
shared = pathlib.Path(sys.argv[1])
(shared / f"{sys.argv[2]}-{place.rank}").touch()
while len(list(shared.iterdir())) < 4:  # until both jobs are here
    time.sleep(0.01)
dist.all_reduce(ones)
sys.stdout.write(f"{place.rank} {int(ones)} {os.environ['OMP_NUM_THREADS']} {sys.argv[2:]}" + chr(10))
dist.destroy_process_group()
"""


def test_two_jobs_at_the_same_time_do_not_disturb_each_other(tmp_path):
    program, shared = tmp_path / "a program.py", tmp_path / "shared"
    program.write_text(PROGRAM)
    shared.mkdir()
    line = [warm_python(), "-m", "ourddp", "launch", "-n", "2", str(program), str(shared)]
    with started([[*line, name, "--ranks", "7"] for name in ("a", "b")], [{}] * 2) as jobs:
        outputs = [job.communicate(timeout=TIMEOUT) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    share = processes.threads_for(2)
    for name, (out, _) in zip("ab", outputs, strict=True):
        assert sorted(out.splitlines()) == [f"{rank} 4 {share} ['{name}', '--ranks', '7']" for rank in range(2)]


def test_a_failing_rank_is_named_and_gives_1(tmp_path):
    (tmp_path / "fails.py").write_text("import os, sys\nsys.exit(3 * int(os.environ['RANK']))\n")
    done = run_module("ourddp", "launch", "-n", "2", str(tmp_path / "fails.py"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "rank 1 exited with 3, and the others were ended"
    assert "Traceback" not in done.stderr


def test_a_module_is_started_too(tmp_path):
    (tmp_path / "own_module.py").write_text("import os, sys\nprint(os.environ['RANK'], *sys.argv[1:], flush=True)\n")
    done = run_module("ourddp", "launch", "-n", "1", "-m", "own_module", "-x", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (done.returncode, done.stdout) == (0, "0 -x\n"), done.stderr


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path, which):
    program, ranks = tmp_path / "waits.py", tmp_path / "ranks"
    program.write_text(
        "import os, pathlib, sys, threading\n"
        "pathlib.Path(sys.argv[1], str(os.getpid())).touch()\nos.write(1, b'here ')\nthreading.Event().wait()\n"
    )
    ranks.mkdir()
    line = [warm_python(), "-m", "ourddp", "launch", "-n", "2", str(program), str(ranks)]
    with started([line], [{}]) as [job]:
        assert job.stdout.read(10) == "here here "
        job.send_signal(which)
        _, errors = job.communicate(timeout=TIMEOUT)
        assert job.returncode == 128 + which, errors
        assert errors.splitlines()[-1] == f"interrupted by {which.name}, and all ranks with it"
        for pid in os.listdir(ranks):
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


RUNS_TWO = """
import os, sys
from ourddp import processes
waits = "import os, pathlib, sys, threading; pathlib.Path(sys.argv[1], str(os.getpid())).touch();" \\
    "os.write(1, b'here '); threading.Event().wait()"
processes.run_all([[sys.executable, "-c", waits, sys.argv[1]]] * 2, [os.environ] * 2)
"""


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_a_command_has_started(tmp_path, which):
    line = [sys.executable, "-c", RUNS_TWO, str(tmp_path)]
    with started([line], [{}]) as [command]:
        assert command.stdout.read(10) == "here here "
        command.send_signal(which)
        _, errors = command.communicate(timeout=TIMEOUT)
        code = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM}[which]
        assert command.returncode == code, errors
        for pid in os.listdir(tmp_path):
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("no-such-file.py",), "there is no file no-such-file.py; -m"), (("-n", "0", __file__), "--ranks must be")],
)
def test_impossible_arguments_are_refused(arguments, complaint, capsys):
    assert main(["launch", *arguments]) == 1
    assert capsys.readouterr().err.startswith(complaint)
