"""The long round: `python -m tests.torture [SHARE] [--write]` prints a table and every fault.

SHARE of all trials is done, 1 where none is given; `--write` puts the table into `results/reliability.md`.
"""

import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.torture.commands import load
from tests.torture.trials import TRIALS

PAGE = Path(__file__).parents[2] / "results" / "reliability.md"
MARKS = "<!-- trials: written by 'make torture' -->", "<!-- trials: end -->"


def main() -> int:
    share = float(next((text for text in sys.argv[1:] if text != "--write"), 1))
    load()
    table, failed = "| Trial | Tried | Survived |\n| --- | ---: | ---: |\n", False
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(2, get_context("fork")) as pool:
        os.environ["FEDCLI_DATA"] = cache  # before the pool forks
        for name, (trial, often) in TRIALS.items():
            count = max(1, round(share * often))
            faults = list(filter(None, pool.map(trial, range(count))))
            failed |= bool(faults)
            table += f"| {name} | {count:,} | {count - len(faults):,} |\n"
            print(f"{name}: {count}", *map(ascii, faults), sep="\n  ", flush=True)
    print(f"\n{table}")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
