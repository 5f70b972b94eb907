"""Draws the pictures of docs/how-it-works.md: python docs/site/draw.py writes docs/drawings/*.svg.

A picture is a list of SVG elements on white, so that it can be read in a dark page as well. Lengths are in pixels.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "drawings"
COLOURS = ("#4c6ef5", "#12b886", "#f59f00", "#e64980")  # of slices, rails and buckets
INK, GREY, PALE = "#212529", "#868e96", "#e9ecef"


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1, edge: str = "#fff") -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
    return f'<rect {place} fill="{fill}" fill-opacity="{opacity:g}" stroke="{edge}"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 1.5, ends: str = "end") -> str:
    heads = {"end": 'marker-end="url(#head)"', "both": 'marker-start="url(#head)" marker-end="url(#head)"', "": ""}
    place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width:g}" {heads[ends]}/>'


def rank(x: float, y: float, number: int) -> list[str]:
    return [f'<circle cx="{x:g}" cy="{y:g}" r="15" fill="#fff" stroke="{INK}"/>', text(x, y + 5, str(number))]


def picture(width: int, height: int, title: str, elements: list[str]) -> str:
    """Return a whole SVG file; ``title`` is what a screen reader says."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="9" '
        f'markerHeight="9" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
    )
    style = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" role="img"'
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n<title>{title}</title>\n<defs>{head}</defs>\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def ring() -> str:
    """Draw four ranks in a ring, and how many ranks' numbers each slice of each rank has after each step."""
    ranks, cell, top = 4, 28, 70
    places = [(75, 60), (135, 120), (75, 180), (15 + 10, 120)]
    parts = [line(92, 72, 124, 103), line(124, 137, 92, 168), line(58, 168, 34, 138), line(34, 102, 58, 72)]
    for number, (x, y) in enumerate(places):
        parts += rank(x, y, number)
    parts.append(text(78, 225, "each rank sends", 12, colour=GREY))
    parts.append(text(78, 241, "to the next one only", 12, colour=GREY))
    for step in range(ranks + 1):
        left = 200 + step * (ranks * cell + 32)
        last = step == ranks
        heading = ["start", "step 1", "step 2", "step 3", "steps 4 to 6"][step]
        parts.append(text(left + ranks * cell / 2, 40, heading))
        for row in range(ranks):
            y = top + row * (cell + 8)
            if step == 0:
                parts.append(text(left - 8, y + 19, f"rank {row}", 11, "end", GREY))
            for column in range(ranks):
                sums = ranks if last else step + 1 if column == (row - step) % ranks else 1
                fresh = last or sums > 1
                colour = COLOURS[column] if fresh else PALE
                parts.append(box(left + column * cell, y, cell - 2, cell, colour, 0.25 + 0.75 * sums / ranks))
                parts.append(text(left + column * cell + cell / 2 - 1, y + 19, str(sums), colour=INK))
        if not last:
            parts.append(line(left + ranks * cell + 4, 138, left + ranks * cell + 24, 138, GREY))
    middle = 200 + 2 * (ranks * cell + 32) + ranks * cell / 2
    parts.append(text(middle - 72, 225, "reduce-scatter: a slice goes around, and each rank adds its own numbers"))
    parts.append(text(900 - 62, 225, "all-gather", 13))
    parts.append(text(900 - 62, 241, "sums go around", 12, colour=GREY))
    parts.append(text(middle - 72, 243, "the number in a cell says how many ranks' numbers are in it", 12, colour=GREY))
    return picture(930, 256, "A ring all-reduce of four ranks, step by step", parts)


def hierarchy() -> str:
    """Draw two nodes of four ranks: what happens in a node, and what goes over the network."""
    parts = []
    for node, left in enumerate((20, 480)):
        parts.append(box(left, 30, 300, 250, "#f8f9fa", edge=GREY))
        parts.append(text(left + 150, 52, f"node {'AB'[node]}: one memory", 14))
        for place in range(4):
            x = left + 48 + place * 68
            parts += rank(x, 90, node * 4 + place)
            parts.append(line(x, 106, x, 134))
            for piece in range(4):
                parts.append(box(x - 26 + piece * 13, 138, 12, 22, COLOURS[piece], 0.35))
            parts.append(line(x, 164, x, 192, COLOURS[place]))
            parts.append(box(x - 26, 196, 52, 26, COLOURS[place], 0.85))
            parts.append(text(x, 214, f"slice {place}", 11, colour="#fff"))
        parts.append(text(left + 150, 248, "1. every rank adds up one slice of all ranks of its node", 11))
        parts.append(text(left + 150, 266, "3. every rank reads all slices of the result", 11))
    for place in range(4):
        y = 110 + place * 36
        parts.append(line(326, y, 474, y, COLOURS[place], 3, "both"))
        parts.append(text(400, y - 6, f"rail {place}: ranks {place} and {place + 4}", 11))
    parts.append(text(400, 246, "2. ranks of equal place", 11))
    parts.append(text(400, 262, "add up their slice", 11))
    parts.append(text(400, 278, "over the network", 11))
    return picture(800, 300, "A hierarchical all-reduce over two nodes of four ranks", parts)


def overlap() -> str:
    """Draw a backward with one bucket, and with three: what of the communication is exposed."""
    parts = []
    layers = [("layer 6", 70), ("layer 5", 70), ("layer 4", 70), ("layer 3", 70), ("layer 2", 70), ("layer 1", 70)]

    def lanes(top: float, heading: str, buckets: list[tuple[int, str, int]], note: str) -> None:
        parts.append(text(20, top, heading, 14, "start"))
        parts.append(text(104, top + 36, "backward", 12, "end", GREY))
        parts.append(text(104, top + 76, "communication", 12, "end", GREY))
        end = 116.0
        for name, width in layers:
            parts.append(box(end, top + 18, width, 28, PALE, edge=GREY))
            parts.append(text(end + width / 2, top + 36, name, 11))
            end += width
        free = 0.0
        for number, (after, label, width) in enumerate(buckets):
            ready = 116 + 70 * after
            begin = max(ready, free)
            parts.append(line(ready, top + 46, ready, top + 60, COLOURS[number], 2))
            parts.append(box(begin, top + 60, width, 28, COLOURS[number], 0.85))
            parts.append(text(begin + width / 2, top + 78, label, 11, colour="#fff"))
            free = begin + width
        parts.append(line(end, top + 10, end, top + 112, GREY, 1, ""))
        parts.append(line(free, top + 56, free, top + 112, GREY, 1, ""))
        parts.append(line(end, top + 104, free, top + 104, "#e03131", 2, "both"))
        parts.append(text(free + 10, top + 108, note, 12, "start", "#e03131"))

    lanes(24, "One bucket for all gradients", [(6, "bucket 0", 300)], "exposed")
    buckets = [(2, "bucket 0", 100), (4, "bucket 1", 100), (6, "bucket 2", 100)]
    lanes(164, "Three buckets: what is ready is reduced while backward goes on", buckets, "exposed")
    parts.append(text(20, 304, "Time runs to the right. Backward computes the last layer first.", 12, "start", GREY))
    return picture(930, 318, "Buckets hide communication behind the computation of backward", parts)


DRAWINGS = {"ring.svg": ring, "hierarchy.svg": hierarchy, "overlap.svg": overlap}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw())
