"""The long round: `python -m tests.torture [SHARE] [--write]` prints a table and every fault.

SHARE of all trials is done, 1 where none is given; `--write` puts the table into `results/reliability.md`.
"""

import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.torture.commands import load
from tests.torture.trials import TRIALS

PAGE = Path(__file__).parents[2] / "results" / "reliability.md"
MARKS = "<!-- trials: written by 'make torture' -->", "<!-- trials: end -->"


def main() -> int:
    share = next((float(text) for text in sys.argv[1:] if re.fullmatch(r"[0-9.]+", text)), 1.0)
    load()
    lines, failed = ["| Trial | Tried | Survived |", "| --- | ---: | ---: |"], False
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(2, get_context("fork")) as pool:
        os.environ["FEDCLI_DATA"] = cache  # before the pool forks
        for name, (trial, often) in TRIALS.items():
            start, count = time.perf_counter(), max(1, round(share * often))
            faults = [fault for fault in pool.map(trial, range(count)) if fault]
            failed |= bool(faults)
            lines.append(f"| {name} | {count:,} | {count - len(faults):,} |")
            print(f"{name}: {count} in {time.perf_counter() - start:.0f} s", flush=True)
            for fault in faults:
                print(f"  {fault}".encode(errors="backslashreplace").decode(), flush=True)
    table = "\n".join(lines)
    print(f"\n{table}")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
