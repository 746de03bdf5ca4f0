"""What a paper's table or a grid shows: what it costs, and how its runs go on.

It imports pandas, which a single run does not need.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fedcli.cli.display import duration_text, print_line
from fedcli.cli.options import ONE_BY_ONE, Placement
from fedcli.cli.printing import say, stop_interrupted
from fedcli.results import durations, jobs
from fedcli.results.grids import describe_protocols
from fedcli.results.plans import Plan, PlannedRun, TablePlan
from fedcli.runs.schema import Record


def cost_rows(plan: TablePlan) -> list[tuple[str, str]]:
    """List what running a table takes, as pairs of title and text."""
    outcomes = Counter(run.outcome for run in plan.runs)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    seeds = ", ".join(map(str, plan.seeds))
    lines = [
        ("table", plan.title),
        ("runs", f"{len(plan.runs)}, seeds {seeds}: {counts}; {len(plan.startable_runs)} to run"),
    ]
    if plan.reduction:
        lines.append(("reduced", f"{plan.reduction}; not the paper's setting"))
    times = durations.estimate_plan(plan)
    if times:
        lines.append(("time", f"{durations.describe_time(times)}, one run after the other"))
    data_sets: set[str] = set()
    for run in plan.startable_runs:
        data_sets.update(run.setup.data_sets)
    if data_sets:
        lines.append(("data sets", ", ".join(sorted(data_sets))))
    lines += [("left out", lacking) for lacking in plan.missing_data.values()]
    lines.append(("new runs", f"are written to {plan.folder}"))
    return lines


class TableDisplay(jobs.PlanListener):
    """Show the runs of a table or a grid: a bar of their rounds on a terminal, and a line for each that ends."""

    def __init__(self, consoles: Sequence[Console], plan: Plan):
        """Make a display whose bar is on the first console, and its lines on all."""
        self.ended = 0
        self.total = len(plan.startable_runs)
        self._terminal, *_ = consoles
        self._consoles = consoles
        self._plan = plan
        self._rounds = {run.folder: run.rounds_done for run in plan.startable_runs}
        self.bar = Progress(console=self._terminal, disable=not self._terminal.is_terminal, transient=True)
        self._task = self.bar.add_task("", total=sum(run.setup.config.rounds for run in plan.startable_runs))

    def begin(self, run: PlannedRun) -> None:
        """Print that a run starts or goes on."""
        self.note(run, "starts" if run.record is None else f"goes on after {run.rounds_done} rounds")

    def advance(self, run: PlannedRun, rounds: int) -> None:
        """Move the bar."""
        self._rounds[run.folder] = rounds
        self.bar.update(self._task, completed=sum(self._rounds.values()), description=f"{self.ended}/{self.total} runs")

    def note(self, run: PlannedRun, text: str, counter: str = "") -> None:
        """Print a note of a run, its engine or a logger."""
        print_line(self._consoles, f"{counter}{run.title}, seed {run.setup.config.seed}: {text}")

    def end(self, run: PlannedRun, record: Record | None, error: str) -> None:
        """Print how a run has ended."""
        self.ended += 1
        self.advance(run, run.setup.config.rounds)
        if error or record is None:
            text = f"failed: {error}"
        else:
            text = f"{self._plan.format_accuracy(record)} in {duration_text(record)}"
        self.note(run, text, f"[{self.ended}/{self.total}] ")
        if error and self._terminal.quiet:
            say(f"error: {run.title}, seed {run.setup.config.seed}: {error}", err=True)


def warn_of_protocols(plan: Plan) -> None:
    """Warn of a comparison whose methods run under different protocols."""
    text = describe_protocols(plan.runs)
    if text:
        say(f"warning: {text}.", err=True)


def run_plan(
    plan: Plan,
    consoles: Sequence[Console],
    again: str = "the same command",
    loggers: Sequence[Any] = (),
    *,
    placement: Placement = ONE_BY_ONE,
    records_only: bool = False,
) -> dict[Path, str]:
    """Run what is to do of a plan, and show it; after an interruption print the command that goes on.

    Args:
        plan: The runs.
        consoles: What they are shown on, the terminal first.
        again: The command that goes on.
        loggers: Of each run in this process.
        placement: Where the runs are trained.
        records_only: Keep no models of a run that has ended.

    Returns:
        The errors of failed runs, by their folders.
    """
    display = TableDisplay(consoles, plan)
    try:
        with display.bar:
            return jobs.execute(
                plan, display, placement.jobs, placement.cluster, loggers=loggers, records_only=records_only
            )
    except KeyboardInterrupt as error:  # outside: its bar, which goes, would take the line with it
        text = f"{str(error) or 'interrupted'} at {display.ended}/{display.total} runs; resume by {again}."
        stop_interrupted(text, error)
