"""Checks of what lies between hosts: addresses, packets, congestion control, firewalls."""

from __future__ import annotations

import ipaddress

from ourddp.doctor import words
from ourddp.doctor.facts import Facts
from ourddp.doctor.meeting import Job
from ourddp.doctor.words import OK, PROBLEM, WARNING


def addresses(job: Job) -> tuple[str, str]:
    """Which addresses other hosts would connect to."""
    several = len(job.hosts()) > 1
    without = [each for each in job.facts.values() if each.addresses_error or not each.addresses]
    if without:
        why = without[0].addresses_error or "it has none"
        return PROBLEM if several else WARNING, f"{words.named(without)} has no address for other hosts: {why}"
    closed = [each for each in job.facts.values() if not each.ports]
    if closed:
        return PROBLEM if several else WARNING, (
            f"{words.named(closed)} can listen at none of its addresses: {closed[0].ports_error}. Are there free ports "
            "in OURS_PORT_RANGE?"
        )
    firsts = [host[0] for host in job.hosts()]
    inside = [each for each in firsts if all(ipaddress.ip_address(one).is_loopback for one in each.addresses)]
    if several and inside:
        return PROBLEM, (
            f"{words.named(inside)} would wait for other hosts at {inside[0].addresses[0]}, which they cannot reach: "
            "set MASTER_ADDR to an address of the network, or name an interface with OURS_INTERFACE"
        )
    named = firsts[: words.MOST_NAMED]
    shown = ", ".join(f"{each.host} {words.interface(each, each.addresses[0])}" for each in named)
    more = f" and {len(firsts) - words.MOST_NAMED} more" if len(firsts) > words.MOST_NAMED else ""
    return OK, f"{shown}{more}" + ("" if several else "; not needed, since all ranks are on one host")


def mtu(job: Job) -> tuple[str, str]:
    """Whether the hosts' interfaces send packets of the same size."""
    found: dict[int, list[Facts]] = {}
    for host in job.hosts():
        size = host[0].mtu(host[0].addresses[0]) if host[0].addresses else None
        if size is not None:
            found.setdefault(size, []).append(host[0])
    if len(found) > 1:
        each = ", ".join(
            f"{size} on {words.interface(hosts[0], hosts[0].addresses[0])} of {words.hosts(hosts)}"
            for size, hosts in sorted(found.items())
        )
        return WARNING, (
            f"the MTU is {each}: large packets may be dropped on the way, which looks like a hang. Set it alike: "
            "ip link set DEVICE mtu N"
        )
    return OK, f"{next(iter(found))} bytes on each host" if found else "no interface but loopback is used"


def congestion(job: Job) -> tuple[str, str]:
    """Which TCP congestion control is in force."""
    refused = [each for each in job.facts.values() if each.congestion_error]
    if refused:
        one = refused[0]
        return PROBLEM, (
            f"{words.named(refused)} may not use OURS_TCP_CONGESTION={one.options.get('OURS_TCP_CONGESTION', '')}: "
            f"{one.congestion_error}. Allowed are: {one.congestion_allowed or 'none'}"
        )
    found = words.by_value(job, lambda each: each.options.get("OURS_TCP_CONGESTION") or each.congestion)
    if len(found) > 1:
        return WARNING, f"TCP's congestion control is {words.sides(found)}: those with another share links unfairly"
    one = job.facts[min(job.facts)]
    name = next(iter(found))
    if name.startswith("bbr") and not one.congestion_near:
        return WARNING, (
            f"{name} is in force, which is slow between near hosts, and neither cubic nor reno is allowed "
            f"({one.congestion_allowed}): sysctl net.ipv4.tcp_allowed_congestion_control"
        )
    near = f", and {one.congestion_near} to near hosts" if one.congestion_near not in ("", name) else ""
    return OK, f"{name}{near}; allowed: {one.congestion_allowed}"


def firewall(job: Job) -> tuple[str, str]:
    """Whether each host reaches each other one's TCP ports."""
    failed = [
        (job.facts[rank], job.facts[peer], why)
        for rank, each in sorted(job.trials.items())
        for peer, why in each.network.items()
        if why
    ]
    if failed:
        shown = failed[: words.MOST_NAMED]
        each = "; ".join(f"{one.name()} does not reach {other.name()} ({why})" for one, other, why in shown)
        more = f"; and {len(failed) - words.MOST_NAMED} pairs more" if len(failed) > words.MOST_NAMED else ""
        return PROBLEM, (
            f"{each}{more}. Is the network up, and does a firewall drop connections? Open TCP ports between the hosts "
            "(OURS_PORT_RANGE says which), or name another network with OURS_INTERFACE"
        )
    pairs = sum(len(each.network) for each in job.trials.values())
    return OK, f"all {pairs} connections between hosts were made" if pairs else "all ranks are on one host"
