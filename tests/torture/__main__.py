"""The long round: `python -m tests.torture [SHARE] [--write]` prints a table and every fault.

SHARE of all trials is done, 1 where none is given; `--write` puts the table into `results/reliability.md`.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

from fedcli.results.render import github
from tests.torture.forks import load
from tests.torture.trials import TRIALS

PAGE = Path(__file__).parents[2] / "results" / "reliability.md"
MARKS = "<!-- trials: written by 'make torture' -->", "<!-- trials: end -->"


def main() -> int:
    share = next((float(text) for text in sys.argv[1:] if re.fullmatch(r"[0-9.]+", text)), 1.0)
    load()
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDCLI_DATA"] = cache
        for name, (trial, count) in TRIALS.items():
            begun = time.perf_counter()
            result = trial(max(1, round(share * count)))
            failed |= bool(result.faults)
            rows.append([name, f"{result.tried:,}", f"{result.tried - len(result.faults):,}"])
            print(f"{name}: {result.tried} in {time.perf_counter() - begun:.0f} s", flush=True)
            for fault in result.faults:
                print(f"  {fault}".encode(errors="backslashreplace").decode(), flush=True)
    table = "\n".join(github(["Trial", "Tried", "Survived"], rows, 1))
    print(f"\n{table}")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
