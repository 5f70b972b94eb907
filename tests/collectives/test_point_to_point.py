"""Sends and receives: tags, any source, batches, pipelines, and messages that do not fit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collective_cases import ring_in_a_batch, tags_in_any_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probes import backend_of
from ranks import in_ranks

import ourddp


def test_tags_are_received_in_any_order(rank_pool, nodes):
    rank_pool(3, nodes=nodes).run(tags_in_any_order)


@pytest.mark.parametrize("world", [2, 4])
@in_ranks(None, "nodes")
def test_a_receive_from_any_source_reports_the_sender(rank: int, world: int) -> None:
    if rank == 0:
        senders = []
        for _ in range(2 * (world - 1)):
            tensor = torch.empty(3)
            sender = dist.recv(tensor)
            assert tensor[0].item() == sender
            senders.append(sender)
        assert sorted(senders) == sorted(2 * list(range(1, world)))
        tensor = torch.empty(1)
        work = dist.irecv(tensor, tag=7)
        work.wait()
        assert work._source_rank() == 1
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(rank)), 0)
        if rank == 1:
            dist.send(torch.ones(1), 0, tag=7)


@pytest.mark.parametrize("count", [0, 1, 5_000, 3_000_000])
@in_ranks(3, "nodes")
def test_messages_of_any_size_may_cross(rank: int, world: int, count: int) -> None:
    """All ranks send before any posts a receive: that would deadlock if sends needed their receivers' attention."""
    sends = [dist.isend(torch.full((count,), float(rank)), peer) for peer in range(world) if peer != rank]
    received = {peer: torch.empty(count) for peer in range(world) if peer != rank}
    receives = [dist.irecv(tensor, peer) for peer, tensor in received.items()]
    for work in sends + receives:
        work.wait()
        assert work.is_completed()
    assert all(torch.equal(tensor, torch.full((count,), float(peer))) for peer, tensor in received.items())


@in_ranks(2, "nodes")
def test_strides_and_scalars(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.arange(12.0).view(3, 4).t(), 1)
        dist.send(torch.tensor(5.0), 1)
    elif rank == 1:
        wide = torch.zeros(4, 6)
        dist.recv(wide[:, ::2], 0)
        assert torch.equal(wide[:, ::2], torch.arange(12.0).view(3, 4).t())
        assert wide[:, 1::2].sum() == 0
        scalar = torch.empty(())
        dist.recv(scalar, 0)
        assert scalar.item() == 5.0


@pytest.mark.parametrize("world", [2, 4])
def test_batch_isend_irecv(rank_pool, world, nodes):
    rank_pool(world, nodes=nodes).run(ring_in_a_batch)


@in_ranks(2, "nodes", fresh=True)
def test_an_unfinished_batch_does_not_affect_the_next(rank: int, world: int) -> None:
    call, tensor = (dist.isend, torch.ones(4)) if rank == 0 else (dist.irecv, torch.zeros(4))
    with pytest.raises((RuntimeError, ValueError)):
        dist.batch_isend_irecv([dist.P2POp(call, tensor.to_sparse(), 1 - rank)])
    for work in dist.batch_isend_irecv([dist.P2POp(call, tensor, 1 - rank)]):
        work.wait()
    assert tensor.tolist() == [1.0] * 4


@pytest.mark.parametrize("world", [2, 4])
@in_ranks(None, "nodes")
def test_pipeline_traffic_does_not_deadlock(rank: int, world: int) -> None:
    """Run the traffic of the 1F1B pipeline schedule: neighbours send in both directions during collectives."""
    batches, width = 8, 20_000
    last = rank == world - 1
    forward, backward, works = 0, 0, []

    def receive_activation() -> torch.Tensor:
        tensor = torch.empty(width)
        if rank > 0:
            dist.recv(tensor, rank - 1, tag=1)
        return tensor if rank > 0 else torch.full((width,), float(forward))

    def run_forward() -> None:
        nonlocal forward
        tensor = receive_activation()
        assert tensor[0].item() == forward + rank
        if not last:
            works.append(dist.isend(tensor + 1, rank + 1, tag=1))
        forward += 1

    def run_backward() -> None:
        nonlocal backward
        gradient = torch.full((width,), float(backward))
        if not last:
            dist.recv(gradient, rank + 1, tag=2)
        assert gradient[0].item() == backward
        if rank > 0:
            works.append(dist.isend(gradient, rank - 1, tag=2))
        works.append(dist.all_reduce(torch.ones(10), async_op=True))
        backward += 1

    for _ in range(min(world - rank - 1, batches)):
        run_forward()
    while forward < batches:
        run_forward()
        run_backward()
    while backward < batches:
        run_backward()
    for work in works:
        work.wait()


@in_ranks(2, "nodes")
def test_objects_and_futures(rank: int, world: int) -> None:
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], dst=1)
        future = dist.isend(torch.ones(4), 1).get_future()
        future.wait()
    elif rank == 1:
        objects = [None, None]
        dist.recv_object_list(objects, src=0)
        assert objects == [{"a": 1}, "text"]
        tensor = torch.empty(4)
        doubled = dist.irecv(tensor, 0).get_future().then(lambda future: future.value()[0] * 2)
        assert torch.equal(doubled.wait(), torch.full((4,), 2.0))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_of_messages_arrives(rank_pool, data, nodes):
    message = st.tuples(
        st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 1, 100, 50_000, 300_000])
    )
    messages = [m for m in data.draw(st.lists(message, max_size=12)) if m[0] != m[1]]
    rank_pool(3, nodes=nodes).run(exchange, messages, data.draw(st.booleans()))


def exchange(rank: int, world: int, messages: list[tuple[int, int, int, int]], receive_first: bool) -> None:
    works, checks = [], []

    def post(sending: bool) -> None:
        for number, (source, target, tag, count) in enumerate(messages):
            if sending and source == rank:
                works.append(dist.isend(torch.full((count,), float(number)), target, tag=tag))
            elif not sending and target == rank:
                tensor = torch.empty(count)
                works.append(dist.irecv(tensor, source, tag=tag))
                checks.append((tensor, number))

    post(sending=not receive_first)
    post(sending=receive_first)
    for work in reversed(works):
        work.wait()
    for tensor, number in checks:
        assert torch.equal(tensor, torch.full_like(tensor, float(number)))


@in_ranks(2, "nodes")
def test_a_wait_that_times_out_leaves_the_receive_alive(rank: int, world: int) -> None:
    if rank == 0:
        tensor = torch.empty(1)
        work = dist.irecv(tensor, 1)
        with pytest.raises(dist.DistBackendError, match=r"Operation timed out.*recv"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        dist.send(torch.ones(1), 1)
        work.wait()
        assert tensor.item() == 3
    else:
        dist.recv(torch.empty(1), 0)
        dist.send(torch.full((1,), 3.0), 0)


@in_ranks(2, "nodes")
def test_invalid_arguments_of_messages(rank: int, world: int) -> None:
    backend = backend_of()
    for peer, tag, text in [
        (world, 0, rf"peer is rank {world}"),
        (rank, 0, "another rank"),
        (1 - rank, -1, "tag is -1"),
    ]:
        with pytest.raises(ourddp.MisuseError, match=text):
            backend.send([torch.ones(1)], peer, tag)
    with pytest.raises(ourddp.MisuseError):
        backend.recv([torch.ones(1), torch.ones(1)], 1 - rank, 0)
    with pytest.raises(ValueError, match="share memory"):
        backend.recv([torch.zeros(1).expand(3)], 1 - rank, 0)
    dist.barrier()


@pytest.mark.parametrize(("size", "dtype", "shown"), [(5, torch.float32, "5 x float32"), (4, torch.int32, "4 x int32")])
@in_ranks(2, "nodes", fresh=True)
def test_a_message_that_does_not_fit_fails_with_both_sizes(rank: int, world: int, size, dtype, shown) -> None:
    if rank == 0:
        dist.send(torch.zeros(4), 1)
    else:
        with pytest.raises(dist.DistBackendError, match=shown) as error:
            dist.recv(torch.empty(size, dtype=dtype), 0)
        assert "4 x float32" in str(error.value)
