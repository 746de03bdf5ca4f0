"""The long round of all trials: prints a table and every fault.

`python -m tests.torture [SHARE] [--write]` does SHARE of all trials, 1 where none is given; `--write` puts the table
into `results/reliability.md`.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer

from fedcli import registry
from tests.torture.command_lines import fuzz_command_line
from tests.torture.crafted_states import read_crafted_file_of_any_kind
from tests.torture.damaged_files import damage_run
from tests.torture.fake_cuda_branches import WAYS, train_in_branches
from tests.torture.faults import faults_of, found_faults
from tests.torture.kills import kill_repeatedly
from tests.torture.lost_folders import lose_folder
from tests.torture.mutated_records import read_mutated_record
from tests.torture.named_code import name_file_of_code
from tests.torture.processes import import_commands
from tests.torture.swapped_buffers import swap_buffers
from tests.torture.wild_texts import put_wild_text

PAGE = Path(__file__).parents[2] / "results" / "reliability.md"
BEGIN_MARK = "<!-- trials: written by 'make torture' -->"
END_MARK = "<!-- trials: end -->"


class Trial(NamedTuple):
    """A kind of misfortune, and how often it is tried in the long round."""

    name: str
    action: Callable[[int], str | None]
    times: int
    has_own_process: bool = False  # for which a worker of the pool would wait at its end


TRIALS = (
    Trial("a run killed four times at random moments, over 12 methods", kill_repeatedly, 84),
    Trial("flipped bits, cut and exchanged files of seven kinds of runs", damage_run, 500),
    Trial("fuzzed command lines", fuzz_command_line, 1000),
    Trial("hostile records", put_wild_text, 260),
    Trial("mutated parts of real records", read_mutated_record, 5000),
    Trial("mutated checkpoints and client states with right digests", read_crafted_file_of_any_kind, 2400),
    Trial(
        "records and tuned options that name a file of code, over all commands that read them", name_file_of_code, 840
    ),
    Trial("folders moved, removed or replaced while a run writes in them", lose_folder, 72),
    Trial("networks whose buffers change, or are swapped", swap_buffers, 300),
    Trial(
        "clients in branches on a fake CUDA device, of every method",
        train_in_branches,
        len(WAYS) * len(registry.methods()),
        has_own_process=True,
    ),
)


class Result(NamedTuple):
    """The results of the trials of a kind."""

    trial: Trial
    count: int
    faults: list[str]


def run_trials(trial: Trial, share: float, pool: ProcessPoolExecutor) -> Result:
    """Does a share of the trials of a kind, in the pool unless they have a process of their own."""
    count = max(1, round(share * trial.times))
    if trial.has_own_process:
        faults = faults_of(trial.action, count)
    else:
        faults = found_faults(pool.map(trial.action, range(count)))
    return Result(trial, count, faults)


def table_of(results: list[Result]) -> str:
    """Returns a Markdown table of how many trials of each kind were survived."""
    lines = ["| Trial | Tried | Survived |", "| --- | ---: | ---: |"]
    for result in results:
        num_survived = result.count - len(result.faults)
        lines.append(f"| {result.trial.name} | {result.count:,} | {num_survived:,} |")
    return "".join(f"{line}\n" for line in lines)


def write_table(table: str) -> None:
    """Puts the table between the marks of its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    PAGE.write_text(f"{before}{BEGIN_MARK}\n\n{table}\n{END_MARK}{after}")


def main(
    share: Annotated[float, typer.Argument(help="Of all trials, from 0 to 1.")] = 1.0,
    write: Annotated[bool, typer.Option("--write", help="Put the table into results/reliability.md.")] = False,
) -> None:
    """Does all trials, or a share of them, and prints a table and every fault; fails where there is one."""
    import_commands()
    results = []
    with TemporaryDirectory() as cache, ProcessPoolExecutor(2, get_context("fork")) as pool:
        os.environ["FEDCLI_DATA"] = cache  # before the pool forks
        for trial in TRIALS:
            result = run_trials(trial, share, pool)
            print(f"{trial.name}: {result.count}", flush=True)
            for fault in result.faults:
                print(f"  {fault!a}", flush=True)
            results.append(result)
    table = table_of(results)
    print(f"\n{table}")
    if write:
        write_table(table)
    if any(result.faults for result in results):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
