"""A report on timelines as a picture, as a page and as scalars of TensorBoard."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

from ourddp.trace_analysis import TraceReport

__all__ = ["page", "picture", "to_tensorboard"]


def picture(report: TraceReport) -> bytes:
    """Return a PNG of how each rank spends a step; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.4 * len(report.ranks)), layout="constrained")
    axes = figure.subplots()
    names = [f"rank {one.rank}" for one in report.ranks]
    left = [0.0] * len(names)
    parts = {
        "compute": ([one.compute for one in report.ranks], "#4c72b0"),
        "wait for peers": ([one.peers for one in report.ranks], "#dd8452"),
        ("data, and other nodes" if report.several_nodes else "data"): (
            [max(0.0, one.exposed - one.peers) for one in report.ranks],
            "#c44e52",
        ),
    }
    for label, (values, colour) in parts.items():
        axes.barh(names, values, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def page(report: TraceReport) -> str:
    """Return it as HTML, with the picture if matplotlib is there."""
    try:
        drawn = f'<img alt="" src="data:image/png;base64,{base64.b64encode(picture(report)).decode()}">'
    except ImportError:
        drawn = ""  # the table says the same
    said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in report.sentences())
    titles, *rows = report.table()
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Where the time of a step goes</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:right;padding:.2em .8em}img{max-width:100%}</style>"
        f"<h1>Where the time of a step goes</h1>{said}{drawn}"
        f"<p>Milliseconds of a step:</p><table><tr>{head}</tr>{body}</table></html>\n"
    )


def to_tensorboard(report: TraceReport, folder: Path) -> None:
    """Write its numbers as scalars; ImportError without tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("ours/efficiency", report.efficiency)
        for one in report.ranks:
            for name in ("step", "compute", "exposed", "peers"):
                writer.add_scalar(f"ours/rank {one.rank}/{name} (ms)", getattr(one, name))
