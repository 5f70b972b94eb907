"""The timeline of a job: what is in it, that it agrees with the reducer's own report, and what becomes of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import backend_of
from programs import job, run_file
from ranks import in_ranks, run_ranks

import ourddp
from ourddp import _C, tracing
from ourddp.report import BackwardReport

STEPS = 4


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events, also of a file whose array does not end."""
    text = path.read_text().rstrip().rstrip(",")
    return json.loads(text if text.endswith("]") else text + "]")


def make_model() -> ourddp.DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    return ourddp.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.03)


def train(rank: int, world: int, path: Path) -> BackwardReport:
    model = make_model()
    with ourddp.timeline(path):
        for _ in range(STEPS):
            model(torch.ones(4, 64)).sum().backward()
        dist.all_reduce(torch.ones(1000))
        if rank == 0:
            dist.send(torch.ones(5), 1)
        elif rank == 1:
            dist.recv(torch.ones(5), 0)
    assert not _C.timeline_is_on()
    return model.report()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_timeline_has_the_steps_and_calls_of_all_ranks(tmp_path, nodes):
    path = tmp_path / "trace.json"
    reports = run_ranks(4, train, path, nodes=nodes)
    assert path.read_text().endswith("]\n")
    events = read(path)
    for rank, report in enumerate(reports):
        mine = [event for event in events if event["pid"] == rank]

        def named(name: str, mine: list[dict[str, Any]] = mine) -> list[dict[str, Any]]:
            return [event for event in mine if event["name"] == name and event["ph"] in "XMib"]

        [title] = named("process_name")
        assert title["args"]["name"].startswith(f"rank {rank} (host ")
        assert [event["args"]["iteration"] for event in named("forward")] == [1, 2, 3, 4]
        assert [event["args"]["iteration"] for event in named("backward")] == [1, 2, 3, 4]
        layout = named("the model's buckets")[-1]["args"]
        assert [tuple(names) for names in layout.values()] == [bucket.parameters for bucket in report.buckets]
        assert any(event["args"]["bytes"] == 4000 for event in named("all_reduce"))
        assert named("wait for peers")
        assert bool(named("wire")) == (nodes > 1)
        assert bool(named("send")) == (rank == 0)
        assert bool(named("recv")) == (rank == 1)
        rates = [event["args"] for event in mine if event["ph"] == "C"]
        assert max(rate["collectives, GB/s"] for rate in rates) > 0


def begin_and_wait(rank: int, world: int, path: Path) -> None:
    with ourddp.timeline(path):
        for _ in range(20):
            dist.all_reduce(torch.ones(512), async_op=True).wait()


def test_a_collective_that_began_before_a_thread_waited_for_it_overlaps_with_the_wait(tmp_path):
    path = tmp_path / "trace.json"
    run_ranks(2, begin_and_wait, path)
    events = read(path)
    begun = [event for event in events if (event["name"], event["ph"]) == ("all_reduce", "b")]
    assert begun
    assert all(event["args"]["bytes"] == 2048 for event in begun)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            interval = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault((event["pid"], event["tid"]), []).append(interval)
    for track in tracks.values():
        open_until: list[float] = []
        for began, ended in sorted(track, key=lambda interval: (interval[0], -interval[1])):
            while open_until and open_until[-1] <= began + NANOSECONDS * 1e3:
                open_until.pop()
            assert not open_until or ended <= open_until[-1] + NANOSECONDS * 1e3
            open_until.append(ended)


NANOSECONDS = 2e-6  # as milliseconds, in floating point


def check_overlap(
    events: list[tuple[str, float, float, dict[str, Any]]], report: BackwardReport, within: float = NANOSECONDS
) -> None:
    """Compare what the events of a rank, with times in milliseconds, say of the last backward with its report."""
    last = [event for event in events if event[3].get("iteration") == report.iteration]
    [(_, began, ended, _)] = [event for event in last if event[0] == "backward"]
    [(_, _, computed, _)] = [event for event in last if event[0] == "computation of gradients"]
    reductions = [event for event in last if event[0] == "reduction"]
    assert len(reductions) == len(report.buckets)
    close = {"abs": within}
    assert ended - began == pytest.approx(report.total, **close)
    assert computed - began == pytest.approx(report.compute, **close)
    reached = computed
    for (_, first, end, facts), bucket in zip(reductions, report.buckets, strict=True):
        hidden = max(0.0, min(end, computed) - first)
        assert bucket.began is not None
        assert bucket.ended is not None
        assert hidden == pytest.approx(max(0.0, min(bucket.ended, report.compute) - bucket.began), **close)
        launched = first - facts["queued_ns"] / 1e6
        assert max(0.0, end - max(reached, launched)) == pytest.approx(bucket.exposed, **close)
        assert facts["bytes"] == bucket.size
        reached = max(reached, end)


def test_the_overlap_of_each_bucket_is_that_of_the_reducers_report(tmp_path):
    path = tmp_path / "trace.json"
    reports = run_ranks(4, train, path)
    events = read(path)
    start = min(event["ts"] for event in events if "ts" in event)
    for rank, report in enumerate(reports):
        mine = [
            (event["name"], (event["ts"] - start) / 1e3, (event["ts"] - start + event["dur"]) / 1e3, event["args"])
            for event in events
            if event["pid"] == rank and event["ph"] == "X" and event["cat"] in ("step", "bucket")
        ]
        check_overlap(mine, report)


def test_another_programs_reader_finds_the_same_overlap(tmp_path):
    parser = pytest.importorskip("hta.common.trace_parser", reason="pip install HolisticTraceAnalysis")
    from hta.configs.parser_config import ParserConfig

    path, one = tmp_path / "trace.json", tmp_path / "one.json"
    reports = run_ranks(4, train, path)
    settings = ParserConfig.get_default_cfg()
    settings.set_parse_all_args(True)
    for rank, report in enumerate(reports):  # it wants a file for each rank
        mine = [event for event in read(path) if event["pid"] == rank]
        one.write_text(json.dumps({"traceEvents": mine, "distributedInfo": {"rank": rank}}))
        _, frame, symbols = parser.parse_trace_dataframe(str(one), settings)
        frame["name"] = frame["name"].map(lambda symbol, symbols=symbols: symbols.sym_table[symbol])
        start = frame["ts"].min()
        check_overlap(
            [
                (row["name"], (row["ts"] - start) / 1e3, (row["ts"] - start + row["dur"]) / 1e3, row)
                for row in frame.to_dict("records")
            ],
            report,
            within=0.004,  # it rounds times to microseconds
        )


def test_the_benchmark_compares_steps_with_and_without_a_timeline():
    benchmark = Path(__file__).resolve().parents[2] / "benchmarks" / "timeline.py"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = run_file(benchmark, "--rounds=2", "--steps=2", "--width=16", each=job(2, store))
    output = "".join(text for _, text in ends)
    # With so small a model recording is no small part of a step.
    said = re.search(r"without a timeline ([\d.]+) ms, with one ([\d.]+) ms: ([+-][\d.]+)%", output)
    assert said, output
    off, on, cost = map(float, said.groups())
    assert cost == pytest.approx(100 * (on / off - 1), abs=0.5)
    # What it judges is what it shows.
    assert ([code for code, _ in ends] == [1, 1]) == (cost >= 2) or cost == 2
    assert re.search(r"^[1-9]\d* events a step and rank$", output, re.MULTILINE)


def cut_off(rank: int, world: int, path: Path) -> None:
    for i in range(50):
        dist.all_reduce(torch.ones(100_000))
        if rank == 1 and i == 40:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_timeline_is_valid_after_a_crash(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(AssertionError):
        run_ranks(2, cut_off, path, env={"OURS_TIMELINE": str(path)})
    # Rank 0 writes all it has when the group fails.
    calls = [event for event in read(path) if event["pid"] == 0 and event["name"] == "all_reduce"]
    assert len(calls) >= 41


def start_with_subgroups(rank: int, world: int) -> None:
    assert not _C.timeline_is_on()  # the group of all ranks is Gloo's
    for one in range(world):
        dist.new_group([one], backend="ours")
    assert not _C.timeline_is_on()
    whole = dist.new_group(backend="ours")
    assert _C.timeline_is_on()
    dist.all_reduce(torch.ones(1), group=whole)
    dist.new_group(backend="ours")  # goes on with that timeline
    _C.stop_timeline()


def test_a_timeline_of_the_whole_job_begins_with_a_group_of_all_ranks(tmp_path):
    path = tmp_path / "trace.json"
    run_ranks(2, start_with_subgroups, backend="gloo", env={"OURS_TIMELINE": str(path)})
    assert {event["pid"] for event in read(path) if event["name"] == "all_reduce"} == {0, 1}


def start_without_ranks(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle/{rank}", dist.distributed_c10d._get_reconfigure_handle())
    handles = [store.get(f"handle/{other}").decode() for other in range(world)]
    dist.distributed_c10d._reconfigure(uuid=1, handles=handles).wait()
    dist.new_group(backend="ours")  # another rank may record already
    dist.all_reduce(torch.ones(1))
    assert not _C.timeline_is_on()


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "_reconfigure"), reason="torch has reconfigure() from 2.15 on")
def test_a_group_whose_ranks_come_later_starts_no_timeline(tmp_path):
    path = tmp_path / "trace.json"
    run_ranks(2, start_without_ranks, env={"OURS_TIMELINE": str(path)}, enable_reconfigure=True)
    assert not path.exists()


@in_ranks(2, fresh=True)
def test_a_timeline_is_refused_on_all_ranks_if_it_cannot_be_written(rank: int, world: int) -> None:
    refusal = r"cannot be written to /nowhere/trace.json: rank 0: .*No such file"
    with pytest.raises(RuntimeError, match=refusal), ourddp.timeline("/nowhere/trace.json"):
        pass
    assert not _C.timeline_is_on()


@in_ranks(2)
def test_a_rank_that_does_not_find_the_file_stops_the_timeline_of_all(rank: int, world: int, tmp_path: Path) -> None:
    folder = tmp_path / str(rank)  # as containers do with one machine, but file systems of their own
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        refusal = r"cannot be written to trace.json: rank 1: .*No such file"
        with pytest.raises(RuntimeError, match=refusal), ourddp.timeline("trace.json"):
            pass
    assert not _C.timeline_is_on()


@in_ranks(2, fresh=True)
def test_only_one_timeline_is_recorded_at_a_time(rank: int, world: int, tmp_path: Path) -> None:
    second = ourddp.timeline(tmp_path / "b.json")
    with ourddp.timeline(tmp_path / "a.json"), pytest.raises(ValueError, match="recorded already"), second:
        pass
    assert not (tmp_path / "b.json").exists()


def on_two_machines(rank: int, world: int, path: Path) -> int:
    """Let the ranks believe that they are on machines of which the second's clock is an hour behind."""
    tracing._machine = lambda: f"machine {rank}"  # type: ignore[assignment]
    behind = 3_600_000_000_000 * rank
    true = tracing.time.monotonic_ns
    tracing.time = type("Clock", (), {"monotonic_ns": staticmethod(lambda: true() - behind)})  # type: ignore[assignment]
    with ourddp.timeline(path):
        dist.all_reduce(torch.ones(1))
    return tracing._offset(backend_of(), ["machine 0", "machine 1"])


def test_each_machine_has_a_file_with_times_by_the_first_ones_clock(tmp_path):
    offsets = run_ranks(2, on_two_machines, tmp_path / "trace.json")
    assert offsets[0] == 0
    assert offsets[1] == pytest.approx(-3_600_000_000_000, abs=50_000_000)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.json", "trace.node1.json"]
    assert {event["pid"] for event in read(tmp_path / "trace.node1.json") if event["name"] == "all_reduce"} == {1}
