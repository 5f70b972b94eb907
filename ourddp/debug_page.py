"""A page for torch's debug server that shows which ranks wait for which, now, and who was late.

On all ranks, since each answers for itself::

    from torch.distributed.debug import start_debug_server
    from ourddp.debug_page import StragglerPage

    start_debug_server(handlers=[StragglerPage()])

The page is at ``/ours``. torch's own pages are ``default_handlers()`` of ``torch.distributed.debug._debug_handlers``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import http.client
import json
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch._C._distributed_c10d import _register_handler
from torch.distributed.debug._frontend import DebugHandler, NavLink, Route
from torch.distributed.debug._store import get_world_size, tcpstore_client

from ourddp.stragglers import Stats, all_stats, slow_links

__all__ = ["StragglerPage", "waits"]

_TIMEOUT = 10  # seconds, in which a rank has to answer

_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Who waits for whom{% endblock %}</h1>{% endblock %}
{% block content %}
{% for complaint in complaints %}<p>{{ complaint }}</p>{% endfor %}
{% for name, ranks in groups.items() %}
  <h2>Group {{ name }}</h2>
  {% for link in links[name] %}<p>{{ link }}</p>{% endfor %}
  <table>
    <tr><th align="left">Rank</th><th align="left">Now</th><th align="left">In the last minute</th></tr>
    {% for rank, now, recent in ranks %}
    <tr><td>{{ rank }}</td><td>{{ now }}</td><td>{{ recent }}</td></tr>
    {% endfor %}
  </table>
{% endfor %}
{% endblock %}
"""


def _answer(request: Any, response: Any) -> None:
    groups = {name: dataclasses.asdict(one) for name, one in all_stats(recent=True).items()}
    response.set_content(json.dumps(groups), "application/json")
    response.set_status(200)


# torch drops the handler when the process ends, after Python has: it must not be what frees the function.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
_register_handler("ours_stragglers", _answer)


def waits(ranks: Sequence[Stats]) -> dict[int, list[int]]:
    """Return for each rank that is in a call the ranks that have yet to make it, from what the ranks of a group say."""
    return {
        one.rank: [other.rank for other in ranks if other.begun <= one.ended] for one in ranks if one.begun > one.ended
    }


class StragglerPage(DebugHandler):
    """The page, as one of the ``handlers`` of ``start_debug_server``."""

    def routes(self) -> list[Route]:
        """Return where the page is."""
        return [Route("/ours", self._show)]

    def nav_links(self) -> list[NavLink]:
        """Return the link to it."""
        return [NavLink("/ours", "Who waits for whom")]

    def templates(self) -> dict[str, str]:
        """Return what it looks like."""
        return {"ours.html": _TEMPLATE}

    def dump(self) -> str:
        """Return the same as text, for the debug server's files."""
        groups, complaints = _collect()
        lines = [*complaints]
        for name, ranks in groups.items():
            lines += [
                f"group {name}",
                *_links(ranks),
                *(f"  rank {rank}: {now}; {recent}" for rank, now, recent in _rows(ranks)),
            ]
        return "\n".join(lines)

    def dump_filename(self) -> str:
        """Return how such a file's name begins."""
        return "ours"

    def _show(self, request: Any) -> bytes:
        groups, complaints = _collect()
        rows = {name: _rows(ranks) for name, ranks in groups.items()}
        links = {name: _links(ranks) for name, ranks in groups.items()}
        return request.frontend.render_template("ours.html", groups=rows, links=links, complaints=complaints)


def _collect() -> tuple[dict[str, list[Stats]], list[str]]:
    """Ask all ranks. Return what each says of its groups, and which ranks do not answer."""
    store = tcpstore_client()
    addresses = [store.get(f"rank{rank}").decode() for rank in range(get_world_size())]
    with ThreadPoolExecutor(max_workers=20) as pool:
        answers = list(pool.map(_ask, addresses))
    groups: dict[str, list[Stats]] = {}
    complaints = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            complaints.append(f"Rank {rank} does not answer: {answer}")
            continue
        for name, fields in answer.items():
            groups.setdefault(name, []).append(Stats(**fields))
    return groups, complaints


def _ask(address: str) -> Mapping[str, dict[str, Any]] | str:
    request = urllib.request.Request(f"{address}/handler/ours_stragglers", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            return json.load(response)
    except (OSError, http.client.HTTPException, ValueError) as error:  # it may die while it answers
        return f"{type(error).__name__}: {error}"


def _rows(ranks: Sequence[Stats]) -> list[tuple[int, str, str]]:
    waiting = waits(ranks)
    return [(one.rank, _now(one, waiting), str(one)) for one in sorted(ranks, key=lambda one: one.rank)]


def _links(ranks: Sequence[Stats]) -> list[str]:
    return [f"The link between ranks {a} and {b} is slow: each waits for the other." for a, b in slow_links(ranks)]


def _now(one: Stats, waiting: Mapping[int, Sequence[int]]) -> str:
    if one.rank not in waiting:
        return f"in its program, after call {one.ended}"
    awaited = ", ".join(map(str, waiting[one.rank]))
    return f"in call {one.ended + 1}, " + (f"waits for rank {awaited}" if awaited else "which all ranks have made")
