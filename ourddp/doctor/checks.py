"""Judges the facts of a job: one function for each check, which depends on nothing but its argument."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from ourddp.doctor import network_checks, node_checks, words
from ourddp.doctor.meeting import Job
from ourddp.doctor.words import OK, PROBLEM, WARNING

MOST_APART = 0.1  # seconds between clocks
BUSY = 0.5  # load for each core
MUST_AGREE = ("OURS_INTERNODE", "OURS_DEVICE_ENGINE")
MAY_DIFFER = ("OURS_NODE_ID", "OURS_INTERFACE", "OURS_PORT_RANGE", "OURS_COMM_THREAD_AFFINITY", "OURS_COMM_NICE")


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``state`` is "ok", "warning" or "problem", and ``text`` says what to do about it."""

    check: str
    state: str
    text: str


def examine(job: Job) -> list[Finding]:
    """Return what all checks found, in the order in which they are printed."""
    return [Finding(name, *check(job)) for name, check in CHECKS.items()]


def ranks(job: Job) -> tuple[str, str]:
    """Whether all ranks came, and stayed."""
    missing = [rank for rank in range(job.size) if rank not in job.facts]
    if missing:
        came = ", ".join(dict.fromkeys(each.host for each in job.facts.values()))
        return PROBLEM, (
            f"{words.ranks(missing)} did not come; those that did are on {came}. Were they started, do they reach rank "
            "0's port, or do they need more time (--timeout)?"
        )
    lost = [rank for rank in job.facts if rank not in job.trials]
    if lost:
        named = words.named(job.facts[rank] for rank in lost)
        return PROBLEM, f"{named} came and then fell silent: see what it printed"
    shape = f"on {len(job.hosts())} hosts" if len(job.hosts()) > 1 else f"on host {job.facts[0].host}"
    return OK, f"all {job.size} came, {shape}" if job.size > 1 else f"a single rank, {shape}"


def versions(job: Job) -> tuple[str, str]:
    """Whether all ranks run the same ourddp, torch and Python."""
    names = ("ourddp", "torch", "Python")
    apart = [(name, words.by_value(job, lambda each, name=name: each.versions.get(name, "none"))) for name in names]
    differing = [(what, found) for what, found in apart if len(found) > 1]
    if not differing:
        return OK, ", ".join(f"{what} {next(iter(found))}" for what, found in apart)
    state = WARNING if all(what == "Python" for what, _ in differing) else PROBLEM
    text = "; ".join(f"{what} is {words.sides(found)}" for what, found in differing)
    return state, f"{text}. Install the same on all hosts"


def options(job: Job) -> tuple[str, str]:
    """Whether all ranks have the same OURS_ options, and understand them."""
    wrong = [each for each in job.facts.values() if each.options_error]
    if wrong:
        return PROBLEM, f"{words.named(wrong)}: {wrong[0].options_error}"
    names = dict.fromkeys(name for each in job.facts.values() for name in each.options if name not in MAY_DIFFER)
    apart = {name: words.by_value(job, lambda each, name=name: each.options.get(name, "none")) for name in names}
    apart = {name: found for name, found in apart.items() if len(found) > 1}
    if not apart:
        return OK, "the same on all ranks"
    state = PROBLEM if any(name in MUST_AGREE for name in apart) else WARNING
    text = "; ".join(f"{name} is {words.sides(found)}" for name, found in apart.items())
    return state, f"{text}. Set them alike in the environment of all ranks"


def cores(job: Job) -> tuple[str, str]:
    """Whether the ranks of a host fit its cores, and use them."""
    said = []
    for host in job.hosts():
        there = len(set(itertools.chain(*(each.cores for each in host))))
        threads, share = sum(each.threads for each in host), max(1, there // len(host))
        where = f"{words.count(len(host), 'rank')} on {words.count(there, 'core')} of {host[0].host}"
        if len(host) > there:
            said.append(f"{where}: ranks wait for each other's cores; start {there} at most, or expect less of each")
        elif threads > there:
            said.append(f"{where} compute with {threads} threads: set OMP_NUM_THREADS={share}")
        elif 2 * threads <= there:
            said.append(f"{where} compute with {words.count(threads, 'thread')} only: OMP_NUM_THREADS={share} uses all")
    if said:
        return WARNING, "; ".join(said)
    first = job.hosts()[0]
    return OK, f"{words.count(first[0].threads, 'thread')} a rank, and enough cores for them"


def load(job: Job) -> tuple[str, str]:
    """Whether other programs compute on the hosts. The load is that of all cores, whichever the ranks may use."""
    busy = [host[0] for host in job.hosts() if host[0].load > BUSY * max(1, host[0].machine_cores)]
    if busy:
        shown = busy[: words.MOST_NAMED]
        each = ", ".join(f"{one.load:.1f} on {one.host} ({words.count(one.machine_cores, 'core')})" for one in shown)
        return WARNING, f"the load of the last minute is {each}: all ranks wait for those whose cores others use"
    return OK, f"at most {max((each.load for each in job.facts.values()), default=0):.1f} in the last minute"


def clock(job: Job) -> tuple[str, str]:
    """Whether the hosts' clocks agree."""
    known = {rank: each.clock for rank, each in job.trials.items() if each.clock is not None}
    if not known:
        return OK, "one host has one clock" if len(job.hosts()) == 1 else "not known"
    apart = {rank: ahead for rank, (ahead, error) in known.items() if abs(ahead) - error > MOST_APART}
    if apart:
        shown = list(apart.items())[: words.MOST_NAMED]
        each = ", ".join(f"{job.facts[rank].host} by {ahead:+.3f} s" for rank, ahead in shown)
        return (
            WARNING,
            f"clocks differ from rank 0's: {each}. Logs will be out of order: run chrony or another NTP client",
        )
    most = max(abs(ahead) + error for ahead, error in known.values())
    return OK, f"within {most * 1e3:.0f} ms of each other"


CHECKS: dict[str, Callable[[Job], tuple[str, str]]] = {
    "ranks": ranks,
    "versions": versions,
    "options": options,
    "shared memory": node_checks.shared_memory,
    "sharing": node_checks.sharing,
    "locked memory": node_checks.locked_memory,
    "descriptors": node_checks.descriptors,
    "cores": cores,
    "load": load,
    "clock": clock,
    "addresses": network_checks.addresses,
    "MTU": network_checks.mtu,
    "congestion": network_checks.congestion,
    "firewall": network_checks.firewall,
}
