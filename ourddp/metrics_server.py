"""Serves what :func:`ourddp.stats` knows to Prometheus, in its text format: :func:`serve_metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ourddp.stragglers import Stats, all_stats

__all__ = ["render", "serve_metrics"]

_Samples = Callable[[Stats], Iterator[tuple[str, float]]]  # further labels, and a value

# Names, what they mean, and the samples of a group. All are counters, which begin with the group.
_METRICS: tuple[tuple[str, str, _Samples], ...] = (
    ("calls_total", "Collectives of CPU tensors that this rank has finished.", lambda s: _alone(s.calls)),
    ("bytes_total", "Bytes of this rank's tensors in them.", lambda s: _alone(s.bytes)),
    ("seconds_total", "Time from the first to the end of the last.", lambda s: _alone(s.seconds)),
    ("waited_seconds_total", "Time in which the program waited for them.", lambda s: _alone(s.waited)),
    ("late_seconds_total", "Time that this rank lost because another was late.", lambda s: _by_rank(s.late)),
    ("last_total", "Calls to which a rank came last.", lambda s: _by_rank(s.last)),
)


def _alone(value: float) -> Iterator[tuple[str, float]]:
    yield "", value


def _by_rank(values: tuple[float, ...]) -> Iterator[tuple[str, float]]:
    for rank, value in enumerate(values):
        yield f',late_rank="{rank}"', value


def render() -> str:
    """Return the metrics of all groups of this process in Prometheus' text format."""
    groups = all_stats(recent=False)
    lines = []
    for name, meaning, samples in _METRICS:
        lines += [f"# HELP ours_{name} {meaning}", f"# TYPE ours_{name} counter"]
        for group, one in groups.items():
            labels = f'group="{_escaped(group)}",rank="{one.rank}"'
            lines += [f"ours_{name}{{{labels}{more}}} {value}" for more, value in samples(one)]
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds; a visitor who says nothing would keep a thread and a descriptor

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "The metrics are at /metrics")
            return
        body = render().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass  # a line for each visit would flood the program's output


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def serve_metrics(port: int, address: str = "127.0.0.1") -> int:
    """Serve the metrics of this process at ``http://address:port/metrics`` for as long as it runs. Return the port.

    Port 0 takes any. The ranks of a node need a port each. With an address of a network, ``0.0.0.0`` for all of them,
    anybody there can read the metrics. Raises OSError if the address cannot be used, because the port is taken, for
    example.
    """
    server = _Server((address, port), _Handler)
    threading.Thread(target=server.serve_forever, name="ours_metrics", daemon=True).start()
    return server.server_address[1]
