"""Any type, shape, layout and order of collectives, compared with a model."""

from __future__ import annotations

import torch
from checked_calls import run_async, run_movement, run_reduction
from collective_model import COMPLEX, FLOATS, INTEGERS, MOVABLE, UNSIGNED, ops_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    st.integers(1, 70_000).map(lambda n: (n,)),
)

LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "offset"])


@PROPERTY
@given(data=st.data())
def test_reductions_equal_the_model(rank_pool, data, nodes):
    dtype = data.draw(st.sampled_from([torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, *COMPLEX]))
    op = data.draw(st.sampled_from(ops_of(dtype)))
    if dtype in (torch.uint64,) and op in ("AVG", "MIN", "MAX"):
        op = "SUM"  # the model has no unsigned division
    call = data.draw(st.sampled_from(["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]))
    world = data.draw(st.sampled_from([1, 2, 3, 4]))
    shape = data.draw(SHAPES)
    rank_pool(world, nodes=nodes).run(
        run_reduction, call, dtype, op, shape, data.draw(LAYOUTS), data.draw(st.integers(0, 99))
    )


@PROPERTY
@given(data=st.data())
def test_movement_keeps_every_bit(rank_pool, data, nodes):
    call = data.draw(st.sampled_from(["broadcast", "all_gather", "gather", "scatter", "all_to_all", "send"]))
    world = data.draw(st.sampled_from([1, 2, 3, 4]))
    dtype = data.draw(st.sampled_from(MOVABLE))
    shape = data.draw(SHAPES)
    rank_pool(world, nodes=nodes).run(
        run_movement, call, dtype, shape, data.draw(LAYOUTS), data.draw(st.integers(0, 99))
    )


@PROPERTY
@given(data=st.data())
def test_asynchronous_calls_may_be_waited_for_in_any_order(rank_pool, data, nodes):
    call = st.tuples(
        st.sampled_from(["all_reduce", "all_reduce sync", "broadcast", "all_gather"]),
        st.sampled_from([0, 1, 3, 1000, 30_000, 200_000]),
    )
    calls = data.draw(st.lists(call, min_size=1, max_size=8))
    waits = data.draw(st.lists(st.integers(0, 100), min_size=8, max_size=8))
    rank_pool(data.draw(st.sampled_from([2, 3])), nodes=nodes).run(run_async, calls, waits)
