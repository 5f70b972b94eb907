"""Tables, plots and files of the benchmarks' results.

A report is {"machine", "torch", "runs": [{"ranks", "peers", "rows": [...]}]}; a row of benchmarks/collectives.py is
{"collective", "way", "size", "bytes", "rounds", "seconds": {peer: {"median", "low", "high"}}}. The way of calling is
one of WAYS; low and high are the 10th and 90th percentile; a peer that lacks the collective is left out of the row.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
COLOURS = {"ours": "tab:blue", "gloo": "tab:orange", "mpi": "tab:green", "floor": "tab:gray"}
WAYS = {"loop": "calls in a loop", "single": "single calls"}


def parse_size(text: str) -> int:
    """Return the bytes in "4", "64K", "25 MiB" or "1G" (binary units); ValueError for anything else."""
    found = re.fullmatch(r"(\d+) ?([KMG]?)(?:I?B)?", text.strip().upper())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write bytes as 4, 64K, 25M or 1G")
    return int(found[1]) * UNITS[found[2]]


def show_size(size: int) -> str:
    """Return a size as parse_size reads it, with the largest unit that divides it."""
    for unit in "GMK":
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


def show_seconds(seconds: float | None) -> str:
    """Return a duration in microseconds below 1 ms, otherwise in milliseconds; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.1f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.2f} ms"


def summary(times: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return median, low and high (10th and 90th percentile) of `times`, each multiplied by `scale`."""
    ordered = sorted(times)
    last = len(ordered) - 1
    low, high = ordered[round(last * 0.1)], ordered[round(last * 0.9)]
    return {"median": statistics.median(ordered) * scale, "low": low * scale, "high": high * scale}


def median(row: dict[str, Any], peer: str) -> float | None:
    """Return the peer's median seconds in a row, or None where it has none."""
    seconds = row["seconds"].get(peer)
    return seconds["median"] if seconds else None


def print_table(header: list[str], lines: list[list[str]]) -> None:
    """Print columns, all but the first right-aligned."""
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    for line in [header, *lines]:
        cells = [
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def _cases(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["collective"], row["way"]) for row in rows))


def print_collectives(run: dict[str, Any]) -> None:
    """Print a table for each collective and way of calling: medians, and how many times as fast `ours` is."""
    peers = run["peers"]
    others = [peer for peer in peers if peer != "ours"] if "ours" in peers else []
    for collective, way in _cases(run["rows"]):
        print(f"\n{collective}, {run['ranks']} ranks, {WAYS[way]}")
        lines = []
        for row in run["rows"]:
            if (row["collective"], row["way"]) != (collective, way):
                continue
            ours = median(row, "ours")
            medians = {peer: median(row, peer) for peer in peers}
            ratios = [f"{medians[peer] / ours:.2f}x" if ours and medians[peer] else "-" for peer in others]
            lines.append([show_size(row["size"]), *(show_seconds(medians[peer]) for peer in peers), *ratios])
        print_table(["size", *peers, *(f"{peer}/ours" for peer in others)], lines)


def plot_collectives(report: dict[str, Any], path: Path) -> None:
    """Draw time over size, both logarithmic, one panel for each number of ranks, collective and way of calling."""
    # A single size, such as barrier's, makes no curve.
    panels = [(run, case) for run in report["runs"] for case in _cases([row for row in run["rows"] if row["size"]])]
    columns = min(4, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    with picture(path, f"Median time of a collective, {source_of(report)}", rows, columns, 3.4) as axes:
        for axis in axes[len(panels) :]:
            axis.axis("off")
        for axis, (run, case) in zip(axes, panels, strict=False):
            _draw(axis, run, *case)


def source_of(report: dict[str, Any]) -> str:
    """Return what a report was measured on."""
    return f"{report['machine']}, torch {report['torch']}"


@contextlib.contextmanager
def picture(path: Path, title: str, rows: int, columns: int, height: float) -> Iterator[Any]:
    """Yield the panels of a picture, row by row, and write it to `path` when they have been drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, height * rows), squeeze=False)
    yield axes.flat
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, run: dict[str, Any], collective: str, way: str) -> None:
    rows = [row for row in run["rows"] if (row["collective"], row["way"]) == (collective, way)]
    for peer in run["peers"]:
        found = [(row["size"], row["seconds"][peer]) for row in rows if peer in row["seconds"]]
        if found:
            sizes = [size for size, _ in found]
            colour = COLOURS.get(peer)
            axis.plot(sizes, [s["median"] * 1e6 for _, s in found], marker="o", ms=3, label=peer, color=colour)
            low, high = ([s[end] * 1e6 for _, s in found] for end in ("low", "high"))
            axis.fill_between(sizes, low, high, alpha=0.15, color=colour)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [1 << power for power in range(2, 31, 6)]
    axis.set_xticks(ticks, [show_size(tick).replace(" ", "").replace("iB", "") for tick in ticks])
    if rows:
        axis.set_xlim(min(row["size"] for row in rows) / 1.5, max(row["size"] for row in rows) * 1.5)
    axis.set_title(f"{collective}, {run['ranks']} ranks, {WAYS[way]}", fontsize=10)
    axis.set_ylabel("microseconds", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write a report, making its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
