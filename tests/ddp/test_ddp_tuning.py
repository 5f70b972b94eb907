"""``bucket_cap_mb="auto"``: training goes on as with a fixed size, and all ranks settle on one."""

from __future__ import annotations

import copy
import logging
import pickle
import re

import pytest
import torch
from ddp_cases import assert_same, backward, batches, gradients, make_model, skip_sparse_over_gloo, train_and_compare
from ranks import in_ranks
from torch import nn

from ourddp import _C, DistributedDataParallel

KIB = 1024
AUTO = {"bucket_cap_mb": "auto"}


OPTIONS = {
    "plain": ("mlp", {}),
    "view": ("mlp", {"gradient_as_bucket_view": True}),
    "cnn": ("cnn", {}),
    "static": ("checkpoint_twice", {"static_graph": True}),
    "static_unused": ("branches", {"static_graph": True, "gradient_as_bucket_view": True}),
    "unused": ("branches", {"find_unused_parameters": True}),
    "unused_view": ("branches", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "sparse": ("sparse", {}),
    "mixed": ("mixed", {}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_gradients_equal_one_process(rank_pool, backend, case):
    name, options = OPTIONS[case]
    skip_sparse_over_gloo(backend, name)
    results = rank_pool(2, backend).run(train_and_compare, name, {**options, **AUTO}, 6)
    for result in results:
        logged = result["logged"]
        assert logged["bucket_cap_auto"] == 1
        assert logged["bucket_cap_bytes"] == 64 * KIB  # the whole model fits into the smallest
        assert logged["comm_latency_time"] > 0 or logged["comm_bytes_per_second"] > 0
        assert result["buckets"] == results[0]["buckets"]


class Deep(nn.Module):
    """Layers of 256 KiB, to be filled into buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))

    def forward(self, x):
        return self.layers(x)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))


def _settle(rank, world, options):
    """Train with a chosen and with a fixed size; tell what was chosen when, and what was logged."""
    kept, logger = Kept(), logging.getLogger("ourddp")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        torch.manual_seed(0)
        module = Deep()
        fixed = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=0.3, **options)
        model = DistributedDataParallel(module, **options, **AUTO)
        history = []
        for step in range(6):
            torch.manual_seed(step * world + rank)
            batch = torch.randn(4, 256)
            for each in (model, fixed):
                each.zero_grad()
                each(batch).square().mean().backward()
            assert_same(gradients(model), gradients(fixed), f"rank {rank} step {step}")
            history.append(model.report())
        indices = model.reducer._get_backward_times().parameters
        sizes = [[p.nbytes for p in module.parameters()][i] for bucket in indices for i in bucket]
        return history, len(indices), sizes, model.bucket_bytes_cap, kept.records, model._get_ddp_logging_data()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_all_ranks_settle_on_one_size_and_say_so(rank_pool, backend, options):
    at_once = "find_unused_parameters" in options
    results = rank_pool(2, backend).run(_settle, options)
    choices = set()
    for rank, (history, buckets, sizes, cap, records, logged) in enumerate(results):
        tunings = [report.tuning for report in history]
        assert [tuning.cap > 0 for tuning in tunings] == [at_once] * 3 + [True] * 3
        if not at_once:
            assert [tuning.backwards_left for tuning in tunings[:3]] == [2, 1, 0]
            assert "to be chosen after 2 more backwards" in str(history[0])
        final = tunings[-1]
        assert final.cap >= 64 * KIB
        assert final.cap & (final.cap - 1) == 0
        assert final.latency >= 0
        assert final.bandwidth > 0
        assert 0 <= final.slowdown <= 1
        assert logged["comm_slowdown_percent"] == round(100 * final.slowdown)
        assert cap == final.cap == logged["bucket_cap_bytes"]
        # The buckets are those that this size gives, in whatever order gradients came.
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        expected = _C.assign_parameters(tensors, [final.first_cap, final.cap], [])
        assert buckets == len(expected) == len(history[-1].buckets)
        said = [message for level, message in records if level == "INFO" and "auto" in message]
        assert said == ([str(final)] if rank == 0 else [])
        assert re.search(
            r'bucket_cap_mb="auto": [\d.]+ MiB \(first: [\d.]+ MiB\); a reduction takes \d+ us .*by \d+% of that time',
            str(final),
        )
        # The table shows the hidden share once, as the last backward measured it.
        table = str(history[-1])
        assert str(final) in table
        assert re.findall(r"(\d+)% of them hidden", table) == [f"{100 * history[-1].hidden:.0f}"]
        assert table.count("hidden") == 1
        choices.add(final)
    assert len(choices) == 1


def _uneven(rank, world):
    model = DistributedDataParallel(make_model("mlp"), **AUTO)
    steps = list(batches(world, 6))
    with model.join():
        for batch in steps[: 2 if rank == 0 else 6]:
            backward(model, batch, rank)
    backward(model, steps[0], rank)
    tuning = model.report().tuning
    return tuning.cap, tuning.first_cap, model.reducer._get_backward_times().parameters


def test_a_rank_without_input_settles_with_the_others(rank_pool, backend):
    # Rank 0 chooses, though it has run out of input before that.
    first, second = rank_pool(2, backend).run(_uneven)
    assert first == second
    assert first[0] == 64 * KIB


@in_ranks(1)
def test_other_texts_are_refused(rank, world):
    with pytest.raises(ValueError, match=r"^bucket_cap_mb is a number of MiB or \"auto\", not 'big'\.$"):
        DistributedDataParallel(make_model("mlp"), bucket_cap_mb="big")
    with pytest.raises(ValueError, match="leave bucket_cap_mb_list out"):
        DistributedDataParallel(make_model("mlp"), bucket_cap_mb="auto", bucket_cap_mb_list=[1, 2])


@in_ranks(2)
def test_a_copy_chooses_anew(rank, world):
    model = pickle.loads(pickle.dumps(DistributedDataParallel(make_model("mlp"), **AUTO)))
    for batch in batches(world, 4):
        backward(model, batch, rank)
    assert model.report().tuning.cap == 64 * KIB
