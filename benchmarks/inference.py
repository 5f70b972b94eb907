"""Times tensor-parallel inference: the tokens a second of examples/tensor_parallel_inference.py over either backend.

    python benchmarks/inference.py --ranks 2,4

The program starts its own ranks. Every variant has processes of its own; they all run at once and take turns of some
tokens each. `alone` is one process that has the whole model, on one thread, while the other ranks sleep. A token takes
two short all-reduces a layer, so what differs between the backends is their latency. All variants have to write the
same tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import scaffold
import torch
import turns

from ourddp.bench import harness
from ourddp.bench import report as reports

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import tensor_parallel_inference as inference

VARIANTS = ("alone", "gloo", "ours")
TOKENS = 8  # in a turn
TARGET = 1.5  # times the tokens a second of Gloo, for --check
LEAST_ROUNDS = 5


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=20, of=", per number of ranks")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, as 2,4")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="make one graph of the model first"
    )
    parser.add_argument("--rounds", type=int, default=100, help="most turns of a variant")
    parser.add_argument(
        "--check", action="store_true", help=f"exit 1 unless ours is {TARGET} times as fast as gloo or more"
    )
    args = parser.parse_args()
    scaffold.require_known(parser, args.variants, VARIANTS)
    return args


def rank_main() -> None:
    """Write tokens whenever it is this job's turn; rank 0 reports which they were."""
    with harness.StartedRanks() as ranks:
        variant, layers, compiles = ranks.plan
        shape = inference.Shape(layers=layers)
        part = inference.Part() if variant == "alone" else inference.Part(ranks.rank, ranks.size, ranks.group(variant))
        tokens: list[int] = []

        def write() -> None:
            tokens[:] = inference.write(model, torch.arange(1), TOKENS)[0].tolist()

        if variant != "alone" or ranks.rank == 0:
            model = inference.Llama(shape, part, 0)
            if compiles:
                model = inference.compiled(model)
            write()
            turns.take_turns(ranks, write)
        else:
            turns.take_turns(ranks, lambda: None)
        ranks.report = tokens


def measure(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one number of ranks."""
    plans = {variant: (variant, args.layers, args.compile) for variant in args.variants.split(",")}
    least = min(LEAST_ROUNDS, args.rounds)
    jobs, times = turns.run_in_turns(
        [__file__], plans, ranks, budget=args.time_budget, least=least, most=args.rounds, timeout=600
    )
    if len({tuple(tokens) for tokens in jobs.values()}) > 1:
        raise RuntimeError(f"the variants have written different tokens: {jobs}")
    seconds = {variant: reports.summary([turn / TOKENS for turn in column]) for variant, column in times.items()}
    return {"ranks": ranks, "rounds": len(next(iter(times.values()))), "seconds": seconds}


def main() -> int:
    """Measure, and print a table."""
    args = parse_arguments()
    rows = [measure(int(ranks), args) for ranks in args.ranks.split(",")]
    missed = False
    for row in rows:
        print(f"\n{row['ranks']} ranks, median of {row['rounds']} turns of {TOKENS} tokens")
        gloo = reports.median(row, "gloo")
        lines = []
        for variant in row["seconds"]:
            token = reports.median(row, variant)
            ratio = f"{gloo / token:.2f}" if gloo else "-"
            lines.append([variant, reports.show_seconds(token), f"{1 / token:.0f}", ratio])
            missed = missed or (variant == "ours" and gloo is not None and gloo / token < TARGET)
        reports.print_table(["variant", "a token", "tokens a second", "times gloo"], lines)
    if args.json:
        scaffold.write_json({"machine": args.machine, "torch": torch.__version__, "rows": rows}, args.json)
    return int(args.check and missed)


if __name__ == "__main__":
    scaffold.start(main, rank_main)
