"""Fuzz the parsers of what comes from the network, the store, files and the environment, and print a table.

Each is run from the inputs in ``seeds/``, with libFuzzer where there is a clang that has it, and otherwise with the
small program here that mutates the seeds blindly. An input that is a finding, and the log, lie in ``build/fuzz``:

    make fuzz RUNS=100000
    python tests/fuzz/fuzz.py --parser frames --seconds 60
    python tests/fuzz/fuzz.py --write-seeds      # after a message has changed
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT / "tests" / "fuzz" / "seeds"
RESULTS = ROOT / "build" / "fuzz"
# A length that is beyond any machine is refused, as it is without sanitizers, and does not end the program. What an
# input leaves to threads that end later is no leak.
SANITIZERS = {
    "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@dataclass
class Outcome:
    """What came of fuzzing a parser."""

    executions: int
    seconds: float
    finding: Path | None


def has_libfuzzer(compiler: str) -> bool:
    """Return whether the compiler can link a program with libFuzzer."""
    if shutil.which(compiler) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.cpp"
        source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
        command = [compiler, "-fsanitize=fuzzer,address", str(source), "-o", f"{folder}/program"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build(compiler: str) -> Path:
    """Build the program that has all parsers, and return its path."""
    variables = ["SAN=address"]
    if has_libfuzzer(compiler):
        # Another compiler than the project's may warn about more.
        variables = ["SAN=fuzz", f"CXX={compiler}", "OURS_WERROR=0"]
    else:
        print(f"{compiler} has no libFuzzer here: inputs are mutated blindly")
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--no-print-directory", f"-j{jobs}", "-f", "tests/cpp/Makefile", "fuzz", *variables]
    output = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return ROOT / output.split("\n")[-2]


def fuzz(program: Path, parser: str, runs: int, seconds: int, longest: int) -> Outcome:
    """Run one parser. It stops at the first finding."""
    folder = RESULTS / parser
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*-*"):
        old.unlink()
    limits = [f"-runs={runs}", f"-max_total_time={seconds}", f"-max_len={longest}", "-timeout=60"]
    command = [str(program), *limits, "-print_final_stats=1", str(corpus), str(SEEDS / parser)]
    environment = os.environ | SANITIZERS | {"OURS_TEST_PARSER": parser}
    began = time.monotonic()
    with (folder / "log").open("w") as log:
        code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False).returncode
    took = time.monotonic() - began
    text = (folder / "log").read_text(errors="replace")
    counts = re.findall(r"number_of_executed_units: (\d+)|^Done (\d+) runs", text, re.MULTILINE)
    executions = max((int(count) for pair in counts for count in pair if count), default=0)
    found = sorted(folder.glob("*-*"))
    return Outcome(executions, took, (found or [folder / "log"])[0] if code != 0 else None)


def main() -> int:
    """Fuzz the chosen parsers. Return 1 if there are findings."""
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--runs", type=int, default=100_000, help="executions of each parser (default: %(default)s)")
    command.add_argument("--seconds", type=int, default=0, help="the most for each parser; 0: no limit")
    longest = "the most bytes of an input, with libFuzzer (default: %(default)s)"
    command.add_argument("--longest", type=int, default=8192, help=longest)
    command.add_argument("--parser", action="append", help="only this one; may be repeated")
    command.add_argument("--cxx", default="clang++", help="the compiler to try (default: %(default)s)")
    command.add_argument("--write-seeds", action="store_true", help="write the inputs to start from, and end")
    arguments = command.parse_args()
    program = build(arguments.cxx)
    if arguments.write_seeds:
        return subprocess.run([str(program), "--seeds", str(SEEDS)], cwd=ROOT, check=False).returncode
    listed = subprocess.run([str(program), "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    unknown = set(arguments.parser or []) - set(listed)
    if unknown:
        command.error(f"there is no parser {', '.join(sorted(unknown))}; there are {', '.join(listed)}")
    print(f"{'parser':14} {'executions':>12} {'a second':>10}  findings")
    findings = 0
    for parser in arguments.parser or listed:
        outcome = fuzz(program, parser, arguments.runs, arguments.seconds, arguments.longest)
        findings += outcome.finding is not None
        rate = outcome.executions / max(outcome.seconds, 1e-3)
        print(f"{parser:14} {outcome.executions:12,} {rate:10,.0f}  {outcome.finding or 0}", flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
