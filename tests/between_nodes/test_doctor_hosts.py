"""``ourddp doctor`` between hosts: connections that a route drops, interfaces that differ, and healthy ones."""

from __future__ import annotations

import os
import subprocess

from hosts import Host
from ranks import run_ranks

from ourddp import joining
from ourddp.doctor.checks import CHECKS, examine
from ourddp.doctor.meeting import meet, open_store
from ourddp.doctor.words import OK, PROBLEM, WARNING


def examination(rank: int, world: int) -> dict[str, tuple[str, str]] | None:
    place = joining.find(os.environ)
    job = meet(open_store(place, 20), place, 20)
    return None if job is None else {each.check: (each.state, each.text) for each in examine(job)}


def examined(hosts: list[Host], ranks: int) -> dict[str, tuple[str, str]]:
    found, *others = run_ranks(ranks, examination, backend=None, nodes=hosts)
    assert others == [None] * (ranks - 1)
    return found


def ip(host: Host, *arguments: str) -> None:
    subprocess.run(["ip", "-n", host.space, *arguments], check=True, timeout=20)


def test_hosts_that_reach_each_other_are_well(network):
    found = examined(network(2), 4)
    assert list(found) == list(CHECKS)
    assert found["ranks"] == (OK, "all 4 came, on 2 hosts")
    assert found["firewall"] == (OK, "all 2 connections between hosts were made")
    assert found["addresses"] == (OK, "host0 eth0 10.199.0.1, host1 eth0 10.199.0.2")
    assert found["MTU"] == (OK, "1500 bytes on each host")
    assert found["clock"][0] == OK  # hosts of one machine have one clock
    assert found["clock"][1].startswith("within ")


def test_a_pair_of_hosts_that_drops_connections_is_named(network):
    hosts = network(3)
    ip(hosts[1], "route", "add", "blackhole", hosts[2].address)
    try:
        state, text = examined(hosts, 3)["firewall"]
    finally:
        ip(hosts[1], "route", "del", "blackhole", hosts[2].address)
    assert state == PROBLEM
    there, back = text.split("; ")
    assert there.startswith("rank 1 (host host1, pid ")
    assert "does not reach rank 2 (host host2, pid " in there
    assert back.startswith("rank 2 (host host2, pid ")
    assert "does not reach rank 1 (host host1, pid " in back
    assert "(10.199.0.2: no answer within 3 s)" in back
    assert "rank 0" not in text


def test_another_mtu_is_named(network):
    hosts = network(2)
    ip(hosts[1], "link", "set", "eth0", "mtu", "1400")
    try:
        state, text = examined(hosts, 2)["MTU"]
    finally:
        ip(hosts[1], "link", "set", "eth0", "mtu", "1500")
    assert state == WARNING
    assert text.startswith("the MTU is 1400 on eth0 10.199.0.2 of host1, 1500 on eth0 10.199.0.1 of host0: ")
