"""The long round: `python -m tests.torture [SHARE] [--write]` prints a table and every fault.

SHARE of all trials is done, 1 where none is given; `--write` puts the table into `results/reliability.md`.
"""

import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from fedcli.results.render import github
from tests.torture.forks import load
from tests.torture.trials import TRIALS

PAGE = Path(__file__).parents[2] / "results" / "reliability.md"
MARKS = "<!-- trials: written by 'make torture' -->", "<!-- trials: end -->"

AT_ONCE = 2  # trials


def main() -> int:
    share = next((float(text) for text in sys.argv[1:] if re.fullmatch(r"[0-9.]+", text)), 1.0)
    load()
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(AT_ONCE, get_context("fork")) as pool:
        os.environ["FEDCLI_DATA"] = cache  # before the pool forks
        for name, (trial, whole) in TRIALS.items():
            begun, count = time.perf_counter(), max(1, round(share * whole))
            places = [count * part // AT_ONCE for part in range(AT_ONCE + 1)]
            parts = [pool.submit(trial, end - first, first) for first, end in pairwise(places) if first < end]
            results = [part.result() for part in parts]
            tried, faults = sum(one.tried for one in results), [fault for one in results for fault in one.faults]
            failed |= bool(faults)
            rows.append([name, f"{tried:,}", f"{tried - len(faults):,}"])
            print(f"{name}: {tried} in {time.perf_counter() - begun:.0f} s", flush=True)
            for fault in faults:
                print(f"  {fault}".encode(errors="backslashreplace").decode(), flush=True)
    table = "\n".join(github(["Trial", "Tried", "Survived"], rows, 1))
    print(f"\n{table}")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
