"""PyTorch's FlightRecorder: what it records about this backend's operations, also after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import errors_written, reached
from programs import job, started
from ranks import in_ranks, run_ranks

from ourddp import _C, flight_traces

pytestmark = pytest.mark.skipif(
    not _C.records_flights(), reason="torch records flights of backends other than its own from 2.15 on"
)


def entries() -> list[dict[str, Any]]:
    """Return what this process has recorded, oldest first."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    return json.loads(_dump_fr_trace_json(backend="ours")).get("entries", [])


def all_calls(rank: int, world: int) -> list[dict[str, Any]]:
    tensor, halves = torch.ones(4), [torch.ones(2), torch.ones(2)]
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    dist.all_gather(halves, torch.ones(2))
    dist.all_gather_into_tensor(tensor, torch.ones(2))
    dist.reduce_scatter(torch.ones(2), halves)
    dist.reduce_scatter_tensor(torch.ones(2), tensor)
    dist.all_to_all(halves, [torch.ones(2), torch.ones(2)])
    dist.all_to_all_single(tensor, torch.ones(4))
    dist.gather(torch.ones(2), halves if rank == 0 else None)
    dist.scatter(torch.ones(2), halves if rank == 0 else None)
    dist.barrier()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor)  # from any source
        dist.send(tensor, 0)
    return entries()


def test_every_call_is_recorded_under_a_name_that_torchs_analyser_knows():
    first, second = run_ranks(2, all_calls)
    assert [entry["profiling_name"].removeprefix("ours:") for entry in first] == [
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "_all_gather_base",
        "reduce_scatter",
        "_reduce_scatter_base",
        "all_to_all",
        "all_to_all_single",
        "gather",
        "scatter",
        "barrier",
        "send 0->1",
        "recv 0<-1",
    ]
    assert [entry["profiling_name"] for entry in second[-2:]] == ["ours:recv 1<-?", "ours:send 1->0"]
    for entry in first:
        assert entry["state"] == "completed"
        assert entry["retired"]
        assert entry["duration_ms"] >= 0
        assert entry["process_group"] == ["0", "default_pg"]
        assert entry["timeout_ms"] > 0
    gathered = first[4]
    assert (gathered["input_sizes"], gathered["output_sizes"]) == ([[2]], [[4]])
    assert gathered["input_dtypes"] == ["Float"]
    assert [entry["collective_seq_id"] for entry in first] == [*range(1, 13), 12, 12]
    assert [entry["p2p_seq_id"] for entry in first[-3:]] == [0, 1, 2]
    assert [entry["is_p2p"] for entry in first[-3:]] == [False, True, True]
    types = pytest.importorskip("torch.distributed.flight_recorder.components.types")
    for entry in (*first, *second):
        event = {**entry, "process_group": tuple(entry["process_group"])}
        types.Op(event, {"0": {0, 1}}, "0")  # raises for an unknown name


@in_ranks(2, fresh=True)
def test_an_operation_that_waits_for_a_peer_is_recorded_as_started(rank: int, world: int) -> None:
    """Let rank 1 come after rank 0 has read its own entries."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["looked"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 0:
        assert reached(lambda: [entry["state"] for entry in entries()] == ["started"])
        (entry,) = entries()
        assert not entry["retired"]
        assert "duration_ms" not in entry
        store.set("looked", "1")
    work.wait()


def many_groups(rank: int, world: int) -> dict[str, Any]:
    from torch._C._distributed_c10d import _dump_fr_trace_json

    dist.all_reduce(torch.ones(1))
    for _ in range(100):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    return json.loads(_dump_fr_trace_json(backend="ours"))


def test_groups_that_are_gone_are_forgotten_with_their_last_entry():
    for dump in run_ranks(2, many_groups, env={"TORCH_FR_BUFFER_SIZE": "20"}):
        assert len(dump["entries"]) == 20
        assert len(dump["pg_config"]) < 80
        assert len(dump["pg_status"]) < 80
        assert {entry["process_group"][0] for entry in dump["entries"]} < {*dump["pg_config"]}
        assert "0" in dump["pg_config"]  # the default group, which still is there


def overflowing(rank: int, world: int) -> list[dict[str, Any]]:
    for size in range(1, 21):
        dist.all_reduce(torch.ones(size))
    return entries()


def test_the_newest_entries_are_kept():
    recorded, _ = run_ranks(2, overflowing, env={"TORCH_FR_BUFFER_SIZE": "8"})
    assert [entry["input_sizes"] for entry in recorded] == [[[size]] for size in range(13, 21)]
    assert {entry["state"] for entry in recorded} == {"completed"}


def test_nothing_is_recorded_if_the_user_switches_it_off():
    assert run_ranks(2, overflowing, env={"TORCH_FR_BUFFER_SIZE": "0"}) == [[], []]


@in_ranks(2, fresh=True)
def test_a_reset_forgets_earlier_entries(rank: int, world: int) -> None:
    from torch._C._distributed_c10d import _reset_fr_trace

    dist.all_reduce(torch.ones(1))
    _reset_fr_trace("ours")
    dist.all_reduce(torch.ones(2))
    assert [(entry["input_sizes"], entry["state"]) for entry in entries()] == [([[2]], "completed")]


@in_ranks(2, fresh=True)
def test_a_hook_of_torch_does_not_double_the_entries(rank: int, world: int) -> None:
    """Torch attaches its hook if another backend of the group cannot record itself."""
    from torch._C._distributed_c10d import FlightRecorderHook

    group = dist.new_group([0, 1])
    hook = FlightRecorderHook.attach(group, [0, 1])
    for _ in range(2):
        dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(1))
    assert [entry["input_sizes"] for entry in entries()] == [[[3]], [[3]], [[1]]]
    assert {entry["state"] for entry in entries()} == {"completed"}
    hook.remove()


def failing(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(5 if rank == 0 else 6))


def failing_with_a_trace(rank: int, world: int) -> dict[str, Any]:
    failing(rank, world)
    path = Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}")
    traces: list[dict[str, Any]] = []

    def is_written() -> bool:  # by a thread of its own
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            traces.append(pickle.loads(path.read_bytes()))
        return bool(traces)

    assert reached(is_written)
    return traces[0]


def test_a_failure_writes_the_trace_to_a_file(tmp_path):
    traces = run_ranks(2, failing_with_a_trace, env={"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_"})
    for trace, size in zip(traces, (5, 6), strict=True):
        good, bad = trace["entries"]
        assert good["state"] == "completed"
        assert bad["state"] != "completed"
        assert bad["input_sizes"] == [[size]]
        assert any(frame["name"] == "failing" for frame in bad["frames"])


def failing_unprepared(rank: int, world: int) -> tuple[dict[str, Any], str]:
    def refuse() -> None:
        raise ImportError("a module is gone")

    flight_traces.keep_compiler_out = refuse
    with errors_written() as errors:
        trace = failing_with_a_trace(rank, world)
    return trace, errors()


def test_a_trace_is_written_even_if_it_cannot_be_prepared(tmp_path):
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_"}
    for trace, errors in run_ranks(2, failing_unprepared, env=env):
        assert len(trace["entries"]) == 2
        assert "the function around the dump of a trace raised: ImportError: a module is gone" in errors


def test_a_trace_does_not_load_the_compiler(tmp_path):
    """Otherwise that would hold up the ranks that are left, for seconds on a busy machine."""
    code = """
        import os, sys, time
        import torch
        import torch.distributed as dist

        def is_written():
            return os.path.exists(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"])

        dist.init_process_group("ours")
        assert "torch._inductor" not in sys.modules
        try:
            dist.all_reduce(torch.ones(5 + dist.get_rank()))
        except RuntimeError:
            deadline = time.monotonic() + 60
            while (not is_written() or "_inductor" in vars(torch)) and time.monotonic() < deadline:
                time.sleep(0.01)
        assert is_written()
        assert "torch._inductor" not in sys.modules
        assert torch._inductor.config is sys.modules["torch._inductor.config"]  # when it is needed, it comes
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [{**env, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_"} for env in job(2, store)]
    command = [sys.executable, "-c", textwrap.dedent(code)]  # the Python of other tests has loaded the compiler
    with started([command] * 2, each) as ranks:
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors


def test_no_file_is_written_if_the_user_does_not_want_it(tmp_path):
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_", "TORCH_FR_DUMP_ON_TIMEOUT": "0"}
    run_ranks(2, failing, env=env)
    assert list(tmp_path.iterdir()) == []


def failing_with_a_health_check(rank: int, world: int) -> None:
    from torch._C._distributed_c10d import _get_handler, _Request, _Response

    class Response(_Response):
        def set_content(self, content: str, content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            self.status = status

    def health() -> dict[str, Any]:
        response = Response()
        _get_handler("c10d_health_check")(_Request(), response)
        assert response.status == 200
        return json.loads(response.content)

    assert health()["healthy"]
    failing(rank, world)
    assert reached(lambda: not health()["healthy"])
    assert health()["unhealthy_backends"] == ["ours"]


def test_torchs_health_check_names_the_backend_of_a_group_that_failed():
    from torch._C._distributed_c10d import _get_handler_names

    if "c10d_health_check" not in _get_handler_names():
        pytest.skip("this torch has no health check of backends")
    run_ranks(2, failing_with_a_health_check)


@in_ranks(1, fresh=True)
def test_calls_of_several_threads_have_numbers_of_their_own(rank: int, world: int) -> None:
    def call() -> None:
        for _ in range(150):
            dist.all_reduce(torch.ones(4))

    sys.setswitchinterval(1e-6)  # so that threads often overtake each other
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [entry["collective_seq_id"] for entry in entries()]
    assert sorted(numbers) == list(range(1, 1201))
