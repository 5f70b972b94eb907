"""The ledger of who was late: stats(), the metrics for Prometheus, and the page of torch's debug server."""

from __future__ import annotations

import dataclasses
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ddp_cases import make_model
from programs import free_port, job, run_file
from ranks import in_ranks

import ourddp
from ourddp import DistributedDataParallel, metrics_server
from ourddp.stragglers import Stats, slow_links

LATE = 0.25  # seconds; on a busy machine, other ranks are late by less
STEPS = 5

EVEN = Stats(
    rank=0,
    seconds=10,
    calls=100,
    bytes=400,
    waited=2,
    late=(0.2, 0.2, 0.1),
    last=(40, 40, 20),
    begun=9,
    ended=9,
)


def training(late: int, rank: int, step) -> Stats:
    """Return the statistics of steps to which rank ``late`` comes late."""
    dist.barrier()
    before = ourddp.stats(recent=False)
    for _ in range(STEPS):
        if rank == late:
            time.sleep(LATE)
        step()
    return ourddp.stats(recent=False) - before


@in_ranks(3, "nodes")
def test_all_ranks_name_the_late_one(rank, world):
    data = torch.ones(1000)
    stats = training(1, rank, lambda: dist.all_reduce(data))
    assert stats.slowest == 1
    assert stats.last[1] >= STEPS - 2
    assert STEPS * LATE / 2 < stats.late[1] <= stats.seconds
    assert stats.saving == stats.late[1] / stats.seconds
    assert "without the lateness of rank 1: " in str(stats)
    assert (stats.calls, stats.bytes) == (STEPS, STEPS * data.nbytes)
    assert stats.begun == stats.ended
    if rank != 1:
        assert stats.waited > STEPS * LATE / 2


@in_ranks(2)
def test_a_sparse_tensor_counts_with_its_values(rank, world):
    values = torch.ones(3, 5)
    sparse = torch.sparse_coo_tensor([[0, 2, 4]], values, (6, 5))
    before = ourddp.stats(recent=False)
    dist.all_reduce(sparse)
    stats = ourddp.stats(recent=False) - before
    assert (stats.calls, stats.bytes) == (1, values.nbytes)


@in_ranks(2)
def test_a_delay_of_all_buckets_is_counted_once(rank, world):
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002)
    inputs = torch.ones(4, 8)
    model(inputs).sum().backward()
    stats = training(0, rank, lambda: model(inputs).sum().backward())
    assert stats.calls >= 2 * STEPS  # several buckets in each
    assert stats.slowest == 0
    # Once for each bucket, it would be more than there was time.
    assert STEPS * LATE / 2 < stats.late[0] <= stats.seconds, stats


@in_ranks(2)
def test_groups_are_counted_for_themselves(rank, world):
    group = dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=group)
    assert ourddp.stats(group).calls == 3
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="does not serve CPU tensors in this group"):
        ourddp.stats(gloo)


def test_only_a_rank_that_costs_clearly_more_than_the_others_is_named():
    assert EVEN.slowest is None
    assert EVEN.saving == 0
    assert str(EVEN).endswith("no rank held up the others")
    late = dataclasses.replace(EVEN, late=(0.2, 0.1, 1.5), last=(20, 10, 70))
    assert late.slowest == 2
    assert late.saving == 0.15
    assert dataclasses.replace(late, last=(20, 78, 2)).slowest is None  # it may not happen again
    assert dataclasses.replace(late, seconds=200).slowest is None


def test_two_ranks_that_name_each_other_have_a_slow_link():
    ranks = [
        dataclasses.replace(EVEN, rank=rank, late=late, last=(50, 50, 50))
        for rank, late in enumerate([(0, 2, 0.1), (2, 0, 0.2), (1, 1, 0)])
    ]
    assert [one.slowest for one in ranks] == [1, 0, None]
    assert slow_links(ranks) == [(0, 1)]
    assert slow_links(ranks[1:]) == []


def test_statistics_of_different_ranks_are_not_subtracted():
    with pytest.raises(ValueError, match="of the same rank and group"):
        EVEN - dataclasses.replace(EVEN, rank=1)
    with pytest.raises(ValueError, match="earlier statistics"):
        EVEN - dataclasses.replace(EVEN, seconds=11)


@in_ranks(2)
def test_prometheus_reads_the_metrics(rank, world):
    dist.all_reduce(torch.ones(4))
    url = f"http://127.0.0.1:{ourddp.serve_metrics(0)}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = response.read().decode().splitlines()
    name = dist.distributed_c10d._get_default_group().group_name
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(samples[f'ours_calls_total{{group="{name}",rank="{rank}"}}']) == ourddp.stats(recent=False).calls
    assert f'ours_late_seconds_total{{group="{name}",rank="{rank}",late_rank="1"}}' in samples
    assert sum(line.startswith("# TYPE ours_") for line in lines) == len(metrics_server._METRICS)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url, timeout=30)


@in_ranks(2)
def test_a_visitor_who_says_nothing_is_not_waited_for(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_server._Handler, "timeout", 0.1)
        with socket.create_connection(("127.0.0.1", ourddp.serve_metrics(0)), timeout=30) as visitor:
            assert visitor.recv(1) == b""


DEBUGGED = """
import sys, time, urllib.request, torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server
from ourddp import debug_page
from ourddp.debug_page import StragglerPage

del debug_page._answer  # as when Python ends; only torch has it now

if __name__ == "__main__":
    port = int(sys.argv[1])
    dist.init_process_group("ours")
    store = dist.distributed_c10d._get_default_store()
    start_debug_server(port=port, handlers=[StragglerPage()], start_method="spawn")
    dist.barrier()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        page, end = "", time.monotonic() + 60
        while "waits for rank 1" not in page and time.monotonic() < end:
            try:
                page = urllib.request.urlopen(f"http://localhost:{port}/ours", timeout=10).read().decode()
            except OSError as error:  # the server is still starting
                page = str(error)
        print(page, StragglerPage().dump(), sep="\\n-----\\n")
        store.set("seen", "")
        work.wait()
        stop_debug_server()
    else:
        store.wait(["seen"])
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""


def test_the_debug_server_shows_who_waits_for_whom(tmp_path):
    pytest.importorskip("tabulate")  # torch's server wants it
    program = tmp_path / "debugged.py"
    program.write_text(DEBUGGED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_file(program, str(free_port()), each=job(2, store))
    assert [code for code, _ in results] == [0, 0], results
    page, text = results[0][1].split("-----")
    assert "<td>in call 2, waits for rank 1</td>" in page
    assert "<td>in its program, after call 1</td>" in page
    assert "  rank 0: in call 2, waits for rank 1; rank 0 waited" in text


@in_ranks(1)
@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.0 200 OK\r\n\r\n{", "JSONDecodeError"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_a_rank_that_dies_while_it_answers_the_page_is_named(rank, world, answer, complaint):
    from ourddp import debug_page

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while b"\r\n\r\n" not in connection.recv(4096):
                pass
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as rank:
        served = rank.submit(serve, server)
        assert str(debug_page._ask(f"http://127.0.0.1:{server.getsockname()[1]}")).startswith(complaint)
        served.result(timeout=30)
