"""DistributedDataParallel.report(): when buckets were ready and reduced, and what of that backward had to wait for."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ddp_cases import backward, batches, bitwise_equal_everywhere, known, make_model, share
from patience import check_soon
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel
from ourddp.report import BackwardReport, BucketReport

SMALL = 0.002  # MiB: the MLP of these tests then has several buckets


def check_order(report: BackwardReport) -> None:
    assert report.buckets
    for bucket in report.buckets:
        assert bucket.first_gradient is not None
        assert 0 <= bucket.first_gradient <= bucket.last_gradient <= bucket.launched <= bucket.began <= bucket.ended
        assert bucket.ended <= report.total
        assert 0 <= bucket.exposed <= report.total - report.compute
        assert bucket.exact
    assert 0 < report.compute <= report.total
    assert report.buckets[-1].last_gradient <= report.compute
    assert report.exposed <= report.total - report.compute + 1e-6
    assert 0 <= report.hidden <= 1


def _steps(rank, world):
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=SMALL)
    reports = [model.report()]
    for step, batch in enumerate(batches(world, 3)):
        backward(model, batch, rank)
        reports.append(model.report())
        logged = model._get_ddp_logging_data()
        assert logged["backward_comm_exposed_time"] == pytest.approx(reports[-1].exposed * 1e6, abs=1)
        assert ("avg_backward_comm_exposed_time" in logged) == (
            step > 0
        )  # of sampled steps, the first of which is over
    return reports, logged


def test_times_come_in_order(rank_pool, backend):
    for rank, (reports, logged) in enumerate(rank_pool(2, backend).run(_steps)):
        empty, first, *_, last = reports
        assert (empty.iteration, empty.buckets, empty.total) == (0, (), 0)
        assert str(empty) == f"No backward has reduced gradients yet (rank {rank} of 2, {backend})."
        # The buckets of the first step are those from before they were rebuilt.
        assert (first.iteration, len(first.buckets)) == (1, 1)
        assert last.iteration == 3
        assert len(last.buckets) > 2
        for report in (first, last):
            check_order(report)
        # The first bucket is under way before the last gradient exists, and buckets are reduced in their order.
        assert last.buckets[0].launched < last.buckets[-1].last_gradient
        assert [bucket.launched for bucket in last.buckets] == sorted(bucket.launched for bucket in last.buckets)
        # Autograd reaches the last layer first.
        assert set(last.buckets[0].parameters) >= {"layers.6.weight", "layers.6.bias"}
        assert "layers.0.weight" in last.buckets[-1].parameters
        assert sum(len(bucket.parameters) for bucket in last.buckets) == 8
        assert last.size == sum(4 * p.numel() for p in make_model("mlp").parameters())
        # Each bucket begins when those before it are over, for reductions share one line.
        if backend == "ours":
            for before, after in zip(last.buckets, last.buckets[1:], strict=False):
                assert before.ended <= after.began
        assert logged["backward_comm_busy_time"] == pytest.approx(last.communication * 1e6, abs=1)
        assert len(logged["bucket_comm_times"].split(", ")) == len(last.buckets)
        assert len(logged["bucket_comm_exposed_times"].split(", ")) == len(last.buckets)


DELAY = 0.15


def _delayed(rank, world):
    """Train with a hook whose result for the last bucket comes DELAY seconds later."""

    def hook(_, bucket):
        future = torch.futures.Future()
        if bucket.is_last():
            threading.Timer(DELAY, future.set_result, [bucket.buffer()]).start()
        else:
            future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    for batch in batches(world, 2):
        backward(model, batch, rank)
    return model.report()


def test_communication_that_comes_late_is_exposed(rank_pool, backend):
    def attempt() -> float:
        """Return the seconds of the delay that the rest of backward hides, the most that a rank says in two ways."""
        hidden = []
        for report in rank_pool(2, backend).run(_delayed):
            check_order(report)
            *others, last = report.buckets
            hidden += [DELAY - last.exposed / 1e3, DELAY * report.hidden]
            assert last.exposed == pytest.approx(last.ended - max(report.compute, *(b.ended for b in others)))
            assert report.exposed >= last.exposed
        return max(hidden)

    check_soon(DELAY / 2, attempt)


@in_ranks(2, "backend")
def test_communication_behind_the_computation_is_not_exposed(rank, world):
    """Train with a hook whose first bucket is reduced while the first layer's gradient is still to be computed."""
    pending = []

    def hook(_, bucket):
        future = torch.futures.Future()
        dist.all_reduce(bucket.buffer())
        if bucket.is_last():
            future.set_result(bucket.buffer())
        else:
            pending.append((future, bucket.buffer()))
        return future

    def complete(*_):
        for future, buffer in pending:
            future.set_result(buffer)
        pending.clear()

    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    model.module.layers[1].register_full_backward_hook(complete)
    for batch in batches(world, 2):
        backward(model, batch, rank)
    report = model.report()
    check_order(report)
    # Seen long before the end of backward looked for it.
    assert report.buckets[0].ended < report.compute
    assert report.buckets[0].exposed == 0


@in_ranks(2, "backend")
def test_a_step_without_reduction_leaves_the_report(rank, world):
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=SMALL)
    steps = list(batches(world, 3))
    with model.no_sync():
        backward(model, steps[0], rank)
    assert model.report().iteration == 0
    backward(model, steps[1], rank)
    reduced = model.report()
    check_order(reduced)
    assert reduced.iteration == 1  # no_sync does not count
    with model.no_sync():
        backward(model, steps[2], rank)
    assert model.report() == reduced


def _report_of(rank, world, name, steps, options):
    model = DistributedDataParallel(make_model(name), **options)
    for batch in batches(world, steps):
        backward(model, batch, rank)
    return model.report()


UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}


def test_buckets_of_unused_parameters_count_as_ready_with_the_first_gradient(rank_pool, backend):
    for report in rank_pool(2, backend).run(_report_of, "branches", 2, UNUSED):
        check_order(report)
        assert {name for bucket in report.buckets for name in bucket.parameters} >= {"never.weight", "left.weight"}


def test_buckets_of_unused_parameters_can_be_skipped(rank_pool, backend):
    options = known({**UNUSED, "skip_all_reduce_unused_params": True})
    for report in rank_pool(2, backend).run(_report_of, "branches", 2, options):
        for bucket in report.buckets:
            used = {name.split(".")[0] for name in bucket.parameters} & {"stem", "left"}
            assert (bucket.launched is not None) == bool(used), bucket
        skipped = [bucket for bucket in report.buckets if bucket.launched is None]
        assert skipped
        for bucket in skipped:
            assert (bucket.ended, bucket.bandwidth, bucket.exposed, bucket.duration) == (None, None, 0, 0)
        assert " - " in str(report)


def test_the_first_step_of_a_static_graph_is_reported(rank_pool, backend):
    for report in rank_pool(2, backend).run(_report_of, "checkpoint_twice", 1, {"static_graph": True}):
        check_order(report)
        # Nothing is reduced before the whole graph is known.
        assert min(bucket.launched for bucket in report.buckets) >= report.compute
        assert report.hidden == pytest.approx(0, abs=1e-6)


def test_sparse_gradients_are_reported(rank_pool):
    for report in rank_pool(2).run(_report_of, "sparse", 2, {}):
        check_order(report)
        assert ("table.weight",) in [bucket.parameters for bucket in report.buckets]


def test_the_table_shows_all_numbers():
    buckets = (
        BucketReport(("b", "c"), 3 << 20, 1.0, 2.0, 2.25, 2.5, 4.5, True, 0.0),
        BucketReport(("a",), 1 << 20, 3.0, 3.0, 3.125, 3.25, 7.25, False, 2.25),
        BucketReport(("d",), 16, None, None, None, None, None, False, 0.0),
    )
    report = BackwardReport(7, 1, 4, "gloo", 5.0, 7.5, 4.75, buckets)
    assert str(report).splitlines() == [
        "Backward of iteration 7 (rank 1 of 4, gloo); times in ms since backward began",
        "bucket  params   MiB  first grad  last grad  launched  began  ended  GB/s  exposed",
        "     0       2  3.00        1.00       2.00      2.25   2.50   4.50  1.57     0.00",
        "     1       1  1.00        3.00       3.00      3.12   3.25  ~7.25  0.26     2.25",
        "     2       1  0.00           -          -         -      -      -     -     0.00",
        " total       4  4.00                                                 0.88     2.25",
        "computation until 5.00, all done at 7.50; 4.75 ms of reductions, 53% of them hidden behind the computation",
        "~: no later than this; the backend does not tell when a reduction ended",
    ]


def _best_cap(sizes, arrivals, cost):
    """Choose as csrc/reducer/bucket_tuning.cpp does; for gradients in the order of arrival."""
    best_cap, best, cap = 0, 0.0, 1 << 16
    while True:
        ended, computed, busy, in_bucket, buckets = 0.0, 0.0, 0.0, 0, 0
        for index, size in enumerate(sizes):
            in_bucket, computed = in_bucket + size, max(computed, arrivals[index])
            if in_bucket >= min(1 << 20 if buckets == 0 else cap, cap) or index == len(sizes) - 1:
                took = cost.latency_ns + in_bucket * cost.ns_per_byte
                ended, busy, in_bucket, buckets = max(ended, computed) + took, busy + took, 0, buckets + 1
        exposed = max(0.0, ended - computed)
        added = exposed + cost.slowdown * (busy - exposed) + buckets * cost.latency_ns
        if best_cap == 0 or added <= 1.02 * best:
            best_cap, best = cap, added if best_cap == 0 else min(best, added)
        if cap >= sum(sizes):
            return best_cap
        cap *= 2


def _prepared_by_hand(rank, world, lightning):
    """Steps as pipelines and training loops of libraries make them, which call ``prepare_for_backward`` themselves."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model = DistributedDataParallel(module, bucket_cap_mb="auto")
    reports = [model.report()]
    profiles = []
    for step in range(5):
        inputs = torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        with model.no_sync():
            loss = model(inputs).square().mean()
        if lightning:
            model.reducer._rebuild_buckets()
        before = time.monotonic_ns()
        model.reducer.prepare_for_backward([])
        profiles.append(model.reducer.get_backward_stats())
        loss.backward()
        took = (time.monotonic_ns() - before) / 1e6
        report = model.report()
        check_order(report)
        assert 0 < report.compute <= report.total <= took
        assert report.size == sum(p.nbytes for p in module.parameters())
        for name, parameter in module.named_parameters():
            assert any(name in bucket.parameters for bucket in report.buckets)
            assert bitwise_equal_everywhere(parameter.grad)
        reports.append(report)
    logged = model._get_ddp_logging_data()
    assert logged["backward_comm_busy_time"] / 1e6 == pytest.approx(reports[-1].communication)
    assert [report.iteration for report in reports] == list(range(6))
    tunings = [report.tuning for report in reports]
    assert [tuning.backwards_left for tuning in tunings] == [3, 2, 1, 0, 0, 0]
    assert [tuning.cap > 0 for tuning in tunings] == [False] * 4 + [True] * 2
    # The third backward decides, as rank 0 observed it.
    sizes = [p.nbytes for p in module.parameters()]
    order = sorted(range(len(sizes)), key=lambda index: profiles[3][index])
    cost = model.reducer._get_bucket_tuning().cost
    cap = _best_cap([sizes[i] for i in order], [profiles[3][i] for i in order], cost)
    chosen = min(1 << 20, cap), cap
    return chosen, (tunings[-1].first_cap, tunings[-1].cap)


@pytest.mark.parametrize("lightning", [False, True])
def test_a_backward_that_is_prepared_by_hand_is_reported_and_tuned_as_any(rank_pool, lightning):
    (chosen, used), (_, other) = rank_pool(2).run(_prepared_by_hand, lightning)
    assert used == other == chosen


@in_ranks(2)
def test_each_backward_that_reduces_counts_once(rank, world):
    model = DistributedDataParallel(make_model("mlp"))
    for count, by_hand in enumerate((False, True, True, False), 1):
        inputs = share(next(batches(world, 1)), rank)
        if by_hand:
            with model.no_sync():
                loss = model(inputs).sum()
            model.reducer.prepare_for_backward([])
        else:
            loss = model(inputs).sum()
        loss.backward()
        assert model.report().iteration == count
