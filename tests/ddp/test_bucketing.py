"""Bucket assignment: a pure function, tested for what must hold of any model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ourddp import _C

gradient = st.builds(
    dict,
    bytes=st.integers(0, 5000),
    dtype=st.integers(0, 2),
    device_index=st.integers(-1, 1),
    sparse=st.booleans(),
)
models = st.lists(gradient, min_size=0, max_size=40)
caps = st.lists(st.integers(1, 4000), min_size=1, max_size=4)


def assign(gradients, caps, order=()):
    return _C.assign_buckets([_C.GradientInfo(**gradient) for gradient in gradients], list(caps), list(order))


def key(gradient):
    return gradient["dtype"], gradient["device_index"]


@st.composite
def ordered_models(draw):
    gradients = draw(models)
    return gradients, draw(st.permutations(range(len(gradients))))


@given(ordered_models(), caps)
def test_every_gradient_is_in_one_bucket_of_its_own_kind(model, caps):
    gradients, order = model
    buckets, used_caps = assign(gradients, caps, order)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(gradients)))
    assert len(used_caps) == len(buckets)
    for bucket in buckets:
        assert len({key(gradients[index]) for index in bucket}) == 1
        assert len(bucket) == 1 or not any(gradients[index]["sparse"] for index in bucket)


@given(ordered_models(), caps)
def test_buckets_close_at_their_cap_and_no_later(model, caps):
    gradients, order = model
    buckets, used_caps = assign(gradients, caps, order)
    open_buckets = set()
    for bucket, cap in zip(buckets, used_caps, strict=True):
        if cap == 0:
            assert [gradients[index]["sparse"] for index in bucket] == [True]
            continue
        sizes = [gradients[index]["bytes"] for index in bucket]
        assert sum(sizes[:-1]) < cap
        if sum(sizes) < cap:
            # At most one bucket of each kind may stay below its cap: the last.
            assert key(gradients[bucket[0]]) not in open_buckets
            open_buckets.add(key(gradients[bucket[0]]))


@given(ordered_models(), caps)
def test_caps_are_used_in_turn_and_the_last_repeats(model, caps):
    gradients, order = model
    buckets, used_caps = assign(gradients, caps, order)
    seen: dict[tuple[int, int], list[int]] = {}
    for bucket, cap in zip(buckets, used_caps, strict=True):
        if cap:
            seen.setdefault(key(gradients[bucket[0]]), []).append(cap)
    for used in seen.values():
        assert used == [caps[min(turn, len(caps) - 1)] for turn in range(len(used))]


@given(ordered_models(), caps)
def test_gradients_keep_the_given_order(model, caps):
    gradients, order = model
    position = {index: place for place, index in enumerate(order)}
    for bucket in assign(gradients, caps, order)[0]:
        places = [position[index] for index in bucket]
        assert places == sorted(places)


@given(models, caps)
def test_without_an_order_buckets_follow_their_first_parameter(gradients, caps):
    buckets, _ = assign(gradients, caps)
    firsts = [bucket[0] for bucket in buckets]
    assert firsts == sorted(firsts)
    assert all(bucket == sorted(bucket) for bucket in buckets)


@given(ordered_models(), caps)
def test_buckets_survive_the_way_to_other_ranks(model, caps):
    gradients, order = model
    buckets, _ = assign(gradients, caps, order)
    code = _C.encode_buckets(buckets, len(gradients))
    assert len(code) == 1 + 2 * len(gradients)
    assert _C.decode_buckets(code, len(gradients)) == buckets


def test_small_first_bucket():
    gradients = [{"bytes": 600}] * 6
    buckets, used_caps = assign(gradients, [1000, 2000], [5, 4, 3, 2, 1, 0])
    assert buckets == [[5, 4], [3, 2, 1, 0]]
    assert used_caps == [1000, 2000]


@pytest.mark.parametrize(
    ("code", "count"),
    [([1, 2, 0, 0, 0], 2), ([1, 1, 0, 0, 1], 2), ([3, 1, 1, 0, 1], 2), ([-1, 0, 0, 0, 0], 2), ([0], 2), ([1, 9, 9], 1)],
)
def test_a_damaged_order_is_refused(code, count):
    with pytest.raises(ValueError, match=r"bucket order|model of 2 parameters"):
        _C.decode_buckets(code, count)


def test_a_wrong_order_is_refused():
    with pytest.raises(ValueError, match="occurs twice"):
        assign([{"bytes": 1}] * 2, [10], [1, 1])
    with pytest.raises(ValueError, match="does not exist"):
        assign([{"bytes": 1}] * 2, [10], [0, 2])
    with pytest.raises(ValueError, match="at least one bucket size"):
        assign([{"bytes": 1}], [])
