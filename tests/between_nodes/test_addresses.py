"""The addresses and connections between nodes: ports, and congestion control."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts import bytes_sent, linked_hosts, why_no_hosts
from probes import tcp_connections, total
from ranks import run_ranks


def listening_ports(rank: int, world: int) -> list[int]:
    """Return the ports at which this process listens."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the descriptor that lists them
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:  # 0A means that it listens
                ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    total()
    return ports


def free_range(count: int) -> tuple[int, int]:
    """Return the ends of a range of ports that are free now."""
    for first in range(21_000, 60_000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return first, first + count - 1
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")


def ports_of_many_groups(rank: int, world: int) -> list[int]:
    """Return the ports at which a process with several groups listens."""
    for group in [dist.new_group() for _ in range(3)]:
        total(group)
    return listening_ports(rank, world)


def test_ranks_listen_at_ports_of_the_range_one_for_all_groups():
    first, last = free_range(2)
    environment = {"OURS_PORT_RANGE": f"{first}-{last}", "OURS_INTERFACE": "127.0.0.1"}
    ports = run_ranks(2, ports_of_many_groups, env=environment, nodes=2)
    assert sorted(ports) == [[first], [last]]
    assert run_ranks(2, listening_ports, env=environment) == [[], []], "ranks of one node need no ports"


def connections() -> list[tuple[str, str]]:
    """Return the congestion control and the peer's address of each TCP connection of this process."""
    found = []
    for one in tcp_connections():
        control = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        found.append((control, one.getpeername()[0]))
    return found


def controls(rank: int, world: int, address: str | None = None) -> set[str]:
    """Return the congestion controls of this process's TCP connections; of those to a host, if it is given."""
    dist.all_reduce(torch.ones(100_000))
    return {control for control, peer in connections() if address in (None, peer)}


def test_connections_use_the_congestion_control_of_the_option():
    path = Path("/proc/sys/net/ipv4")
    usual = (path / "tcp_congestion_control").read_text().strip()
    others = set((path / "tcp_allowed_congestion_control").read_text().split()) - {usual}
    if not others:
        pytest.skip(f"this system allows no congestion control but {usual}")
    for other in others:
        for found in run_ranks(2, controls, env={"OURS_TCP_CONGESTION": other}, nodes=2):
            assert other in found
    for found in run_ranks(2, controls, env={"OURS_TCP_CONGESTION": usual}, nodes=2):
        assert found == {usual}


def test_near_hosts_do_not_use_bbr_by_default():
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    with linked_hosts(2, congestion_controls=["bbr"]) as hosts:
        if hosts[0].congestion_control != "bbr":
            pytest.skip("this system does not allow bbr")
        # Rank 0's only connections to the other host are those of the group.
        found = run_ranks(2, controls, hosts[1].address, nodes=hosts)[0]
        assert found <= {"cubic", "reno"}, found
        assert found
        asked = {"OURS_TCP_CONGESTION": "bbr"}
        assert run_ranks(2, controls, hosts[1].address, nodes=hosts, env=asked)[0] == {"bbr"}


def sent_by_interface(rank: int, world: int, count: int) -> list[int]:
    """Return the bytes that leave this rank's host by eth0, and by eth1, for an all-reduce of ``count`` numbers."""
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    dist.barrier()
    before = [bytes_sent("eth0"), bytes_sent("eth1")]
    dist.barrier()
    dist.all_reduce(tensor)
    dist.barrier()
    sent = [bytes_sent("eth0") - before[0], bytes_sent("eth1") - before[1]]
    dist.barrier()
    assert tensor.eq(world**2).all()
    return sent


@pytest.mark.parametrize("local", [1, 2])
def test_named_interfaces_share_the_data(local):
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    count, world = 2_000_000, 2 * local
    with linked_hosts(2, links=2) as hosts:
        for named, streams in (("eth0,eth1", "0"), ("eth1,eth0", "0"), ("eth0,eth1", "1"), ("eth0", "0"), ("^lo", "2")):
            environment = {"OURS_INTERFACE": named, "OURS_TCP_STREAMS": streams}
            both = "," in named and (streams == "0" or local == 2)
            for first, second in run_ranks(world, sent_by_interface, count, env=environment, nodes=hosts):
                assert first + second >= 4 * count, "each host sends half of its data, and half of the result"
                least, most = sorted((first, second))
                assert (least > 0.4 * most) if both else (least < 0.02 * most), (named, streams, first, second)


@pytest.mark.parametrize("how", ["down", "unplugged"])
def test_an_interface_that_leads_nowhere_is_left_out(how):
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    with linked_hosts(2, links=2) as hosts:
        if how == "down":
            hosts[1].set_link("down", "eth1")
        else:
            hosts[1].unplug("eth1")
        found = run_ranks(2, sent_by_interface, 100_000, env={"OURS_INTERFACE": "eth1,eth0"}, nodes=hosts)
        assert all(first > 400_000 and second < 10_000 for first, second in found), found
