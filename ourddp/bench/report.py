"""Tables, plots and files of measured times.

A report is {"machine", "torch", "runs": [{"ranks", "peers", "rows": [...]}]}; a row of a collective is
{"collective", "way", "size", "bytes", "rounds", "seconds": {peer: {"median", "low", "high"}}}. The way of calling is
one of WAYS; low and high are the 10th and 90th percentile; a peer that lacks the collective is left out of the row.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ourddp.bench.steps import VARIANTS

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
COLOURS = {
    "ours": "tab:blue",
    "gloo": "tab:orange",
    "mpi": "tab:green",
    "nccl": "tab:red",
    "floor": "tab:gray",
    "openmpi": "tab:green",
    "openmpi_sm": "tab:olive",
    "mpich": "tab:red",
    "mpich_rg": "tab:pink",
    "impi": "tab:purple",
    "deepspeed": "tab:brown",
}
MOST_RATIOS = 3  # in a table that still fits on a screen
WAYS = {
    "loop": "calls in a loop",
    "single": "single calls",
    "written": "calls in a loop, each of data that was just written",
}


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


def cases_of(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the collectives of the rows and the ways of calling them, each pair once."""
    return list(dict.fromkeys((row["collective"], row["way"]) for row in rows))


def print_collectives(run: dict[str, Any]) -> None:
    """Print a table for each collective and way of calling: medians, and how many times as fast `ours` is."""
    peers = run["peers"]
    others = [peer for peer in peers if peer != "ours"] if "ours" in peers else []
    if len(others) > MOST_RATIOS:
        others = []
    for collective, way in cases_of(run["rows"]):
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


def print_steps(row: dict[str, Any], ranks: int) -> None:
    """Print a table of a model's training steps: the median of each variant, and how it compares with `local`.

    Of a model that is nothing but many small parameters, it shows what one of them takes.
    """
    size = f"{row['bytes'] / 1e6:.1f} MB in {row['parameters']:,} parameters"
    print(f"\n{row['model']}, {size}, {ranks} ranks, median of {row['rounds']} steps")
    local = median(row, "local")
    lines = []
    for variant in row["seconds"]:
        step = median(row, variant)
        cells = [variant, show_seconds(step)]
        if local and step:
            each = (step - local) / row["parameters"] * 1e6
            cells += [f"{local / step:.0%}", show_seconds(step - local), f"{each:.2f} us"]
        lines.append(cells + ["-"] * (5 - len(cells)))
    header = ["variant", "step", "efficiency", "over local", "per parameter"]
    shown = len(header) if row["model"] == "many-small" else len(header) - 1
    print_table(header[:shown], [line[:shown] for line in lines])


def plot_all(report: dict[str, Any], path: Path) -> None:
    """Draw the collectives of one run over size, and its training steps as bars."""
    (run,) = report["runs"]
    cases = cases_of([row for row in run["rows"] if row["size"]])
    count = max(1, len(cases) + len(run["steps"]))
    columns = min(3, count)
    rows = -(-count // columns)
    title = f"{run['ranks']} ranks, medians, {source_of(report)}"
    with picture(path, title, rows, columns, 3.4) as axes:
        panels = list(axes)
        for axis in panels[len(cases) + len(run["steps"]) :]:
            axis.axis("off")
        for axis, case in zip(panels, cases, strict=False):
            draw_collective(axis, run, *case)
        for axis, row in zip(panels[len(cases) :], run["steps"], strict=False):
            draw_steps(axis, row, run["ranks"])


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


def draw_collective(axis: Any, run: dict[str, Any], collective: str, way: str) -> None:
    """Draw the times of a run's collective over size, both logarithmic."""
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


def draw_steps(axis: Any, row: dict[str, Any], ranks: int) -> None:
    """Draw the step times of a model as bars, each with its efficiency."""
    variants = list(row["seconds"])
    steps = [row["seconds"][variant]["median"] * 1e3 for variant in variants]
    bars = axis.bar(variants, steps, color=[f"C{list(VARIANTS).index(variant)}" for variant in variants])
    local = median(row, "local")
    labels = [f"{step:.1f}" + (f"\n{local * 1e3 / step:.0%}" if local else "") for step in steps]
    axis.bar_label(bars, labels, fontsize=8)
    axis.margins(y=0.2)
    axis.tick_params(axis="x", labelrotation=20, labelsize=8)
    axis.set_ylabel("milliseconds a step")
    axis.set_title(f"{row['model']}, {row['bytes'] / 1e6:.0f} MB, {ranks} ranks", fontsize=10)
