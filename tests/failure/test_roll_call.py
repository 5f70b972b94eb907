"""The errors that late or different ranks cause say where those are in their programs."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from probes import backend_of, backend_over, reached
from programs import warm_python
from ranks import run_ranks

from ourddp import whereabouts

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "roll_call.py"
TIMEOUT = 2  # seconds of the group


def place(function: Callable[..., object], text: str) -> str:
    """Return what an error says of a rank that is in this line of a function."""
    lines, first = inspect.getsourcelines(function)
    [found] = [first + i for i, line in enumerate(lines) if text in line]
    return f"is at {inspect.getsourcefile(function)}:{found} in {function.__name__}"


def test_a_late_rank_is_found_however_it_is_late():
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", str(BENCHMARK)]
    result = subprocess.run(
        [*command, "--trials=1", "--limit=30"], capture_output=True, text=True, timeout=110, check=False
    )
    right = re.findall(r"^(\w+) +right 1 of 1", result.stdout, re.MULTILINE)
    assert right == ["sleep", "lock", "loop", "stop"], result.stdout + result.stderr
    assert result.returncode == 0


def call_late(rank: int, world: int, call: str) -> str:
    """Let rank 1 come too late to a call of the others. Return the error, if any."""
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(6))
    if rank == 1:
        store.get("may go on")  # the late line
    try:
        if call == "recv" and rank != 1:
            dist.recv(torch.empty(4), 1)
        elif call == "monitored_barrier":
            backend_of().monitored_barrier(datetime.timedelta(seconds=TIMEOUT))
        else:
            dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        if rank == 0:
            store.set("may go on", "")
        return str(error)
    return ""


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("call", ["all_reduce", "recv", "monitored_barrier"])
def test_all_ranks_hear_where_a_late_rank_is(call, nodes):
    texts = run_ranks(2, call_late, call, nodes=nodes, pg_timeout=TIMEOUT)
    place_of_1 = place(call_late, "the late line")
    assert f"Rank 1 {place_of_1}; its only call was all_reduce number 1 (6 x Float, default_pg)" in texts[0]
    if call != "monitored_barrier" and nodes == 1:
        # There rank 1 has an error of its own, and between nodes it has all it needs.
        assert place_of_1 in texts[1]


def wait_in_forked_children(rank: int, world: int, ended: Path) -> None:
    """Let the children of both ranks make a group in which rank 1 makes no call. Write the error to ``ended``."""
    dist.all_reduce(torch.ones(6))
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        return
    signal.alarm(40)
    status = 1
    try:
        group = backend_over(dist.FileStore(str(ended.with_name("store")), world), world, rank, 30)
        if rank == 1:
            assert reached(ended.exists)
        else:
            with pytest.raises(RuntimeError) as error:
                group.monitored_barrier(datetime.timedelta(seconds=TIMEOUT))
            ended.with_name("text").write_text(str(error.value))
            ended.with_name("text").rename(ended)
        status = 0
    finally:
        os._exit(status)


def test_a_forked_child_does_not_take_its_parents_calls_for_its_own(tmp_path):
    run_ranks(2, wait_in_forked_children, tmp_path / "ended")
    text = (tmp_path / "ended").read_text()
    assert re.search(r"Rank 1 is at \S+ in reached; it has made no call", text), text


def wait_in_another_group(rank: int, world: int, timeout: int) -> tuple[str, int]:
    """Let rank 0 wait for rank 1, which waits for rank 2 in a group of their own. Return the error and the pid."""
    others = dist.new_group([1, 2], timeout=datetime.timedelta(seconds=timeout))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    text = ""
    try:
        if rank == 0:
            dist.recv(torch.empty(4), 1)
        elif rank == 1:
            dist.all_reduce(torch.ones(4), group=others)
    except dist.DistBackendError as error:
        text = str(error)
    if rank == 0:
        store.set("rank 0 has raised", "")
    store.get("rank 0 has raised")
    if rank == 2:
        with contextlib.suppress(dist.DistBackendError):  # the group may have failed
            dist.all_reduce(torch.ones(4), group=others)  # ends the wait of rank 1
    return text, os.getpid()


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    ("timeout", "words"), [(1, "; a group of it has just failed: "), (5, "; it waits for ")], ids=["failed", "waits"]
)
def test_a_late_rank_says_for_whom_it_waits_in_another_group(timeout, words, nodes):
    results = run_ranks(3, wait_in_another_group, timeout, nodes=nodes, pg_timeout=3)
    text, pid_of_2 = results[0][0], results[2][1]
    assert words in text, text
    assert f"pid {pid_of_2})" in text.split(words)[1], text


def call_something_else(rank: int, world: int) -> str:
    try:
        if rank == 1:
            dist.broadcast(torch.ones(4), 0)  # the different line
        else:
            dist.all_reduce(torch.ones(4))  # the common line
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the call succeeded")


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_mismatch_shows_the_line_of_each_call(nodes):
    common, different = place(call_something_else, "the common line"), place(call_something_else, "the different line")
    texts = run_ranks(3, call_something_else, nodes=nodes)
    right = [
        re.search(rf"(Rank [02]|Each of ranks 0, 2) {re.escape(common)}\b", text) is not None
        and re.search(rf"Rank 1 {re.escape(different)}\b", text) is not None
        for text in texts
    ]
    # Between nodes, pairs of ranks find that they differ, the last ones when others have gone on.
    assert all(right) if nodes == 1 else any(right), texts
    for text in texts:
        assert re.search(r"\nRank 1 is at .*; its only call was broadcast number 1 \(4 x Float", text), text


def stay_away(rank: int, world: int) -> str:
    """Let one rank of the second node stop, or come too late, while the others reduce."""
    dist.barrier()
    if rank == 2:
        time.sleep(TIMEOUT + 1)  # the sleep
    try:
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the call succeeded")


def test_ranks_on_another_node_hear_where_a_late_rank_is():
    for text in run_ranks(4, stay_away, nodes=2, pg_timeout=TIMEOUT):
        assert f"Rank 2 {place(stay_away, '# the sleep')}" in text


def receive_late(rank: int, world: int) -> str:
    """Let the ranks of the second node be numbered otherwise there than in the group."""
    dist.barrier()
    if rank == 3:
        time.sleep(TIMEOUT + 1)  # the pause
    try:
        if rank == 2:
            dist.recv(torch.empty(4), 3)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_a_rank_hears_where_one_of_its_node_is_whose_message_is_late():
    text = run_ranks(4, receive_late, nodes=2, pg_timeout=TIMEOUT)[2]
    assert f"Rank 3 {place(receive_late, '# the pause')}" in text


def keep_the_lock(rank: int, world: int) -> str:
    """Let rank 1 be late in a native function that does not give up the interpreter's lock."""
    dist.barrier()
    if rank == 1:
        # PyDLL keeps the lock during the call.
        import ctypes

        ctypes.PyDLL(None).usleep(int((TIMEOUT + 1.5) * 1e6))
    try:
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the call succeeded")


def test_a_rank_that_cannot_answer_is_said_to_be_silent():
    for text in run_ranks(2, keep_the_lock, pg_timeout=TIMEOUT):
        assert "Rank 1 did not say within 300 ms where it is (a native function may keep Python's global lock)" in text


PROGRAM = """
import datetime, time
import ourddp, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("ours", timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(4)
    dist.all_reduce(torch.ones(4))

main()
"""


def test_the_error_files_of_torchrun_say_where_a_late_rank_is(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.lstrip())
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run(
        [*command, f"--log-dir={tmp_path}", str(program)], capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode != 0
    [file] = tmp_path.glob("*/attempt_0/0/error.json")
    assert f"Rank 1 is at {program}:10 in main" in json.loads(file.read_text())["message"]["message"]


# --- the place in the program ----------------------------------------------------------------------------------------


def test_the_place_is_a_line_of_the_program_and_that_of_a_library_which_it_has_called():
    waits = threading.Event()
    thread = threading.Thread(target=lambda: waits.wait(60))
    thread.start()
    try:
        assert thread.ident is not None
        assert reached(lambda: "in wait" in whereabouts.describe(thread.ident))
        text = whereabouts.describe(thread.ident)
        assert re.fullmatch(rf"is at {re.escape(__file__)}:\d+ in <lambda> \(in \S+threading\.py:\d+ in wait\)", text)
    finally:
        waits.set()
        thread.join()


def test_a_thread_that_has_ended_stands_for_the_main_thread():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    text = whereabouts.describe(thread.ident)
    assert text.startswith(f"is at {__file__}:") or f"({os.path.dirname(whereabouts.__file__)}" in text
    assert " in test_a_thread_that_has_ended_stands_for_the_main_thread" in text
