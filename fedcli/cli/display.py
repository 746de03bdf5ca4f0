"""What a run shows while it goes on: a header, its progress, its headline; and the figures it leaves in its folder.

The same for a paper's table: what it costs, the progress of its runs, and the table in a terminal's width.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from rich import progress
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from fedcli.cli.describe import SELECTIONS as HEADLINES
from fedcli.cli.printing import stop
from fedcli.errors import printable
from fedcli.results import claims
from fedcli.results.claims import Answer
from fedcli.results.comparison import Comparison, heading
from fedcli.results.grids import GridPlan
from fedcli.results.jobs import Watch, execute
from fedcli.results.render import MISSING
from fedcli.results.reproduce import Cost, PlannedRun, TablePlan, bytes_kept, estimate
from fedcli.runs.config import describe_reductions
from fedcli.runs.records import RECORD, reductions_of
from fedcli.runs.rounds import Listener
from fedcli.runs.signals import exit_code

SELECTIONS = {
    "best-validation": "best on validation: round {round}",
    "best-test": "best on the test set: round {round}",
    "last": "the last round",
    "mean-last-3": "mean of the last three rounds",
}
MEASURES = {
    "server": "accuracy on the official test images",
    "clients": "accuracy on the clients' own test parts",
    "domains": "accuracy on other domains",
}
LONG = 2 * 3600  # seconds from which a run is said to take long
FIRST = 5  # batches, and seconds after the first of them, by which that is judged
HOW = {"stacked": "stacked", "branches": "as branches"}


def header(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Say what is run, as pairs of title and text."""
    config, sizes, engine = record["config"], record["partition"]["sizes"], record["engine"]
    smaller = describe_reductions(reductions_of(record))
    reduced = f", reduced: {smaller}" if smaller else ""
    together, threads = engine["clients_per_chunk"], record["hardware"]["threads"]
    engine_mode = "one client after the other" if together == 1 else f"{together} clients {HOW[engine['way']]}"
    if engine["device"] == "cpu" and threads > 1:
        engine_mode = f"{threads} threads, in each {engine_mode}"
    if (workers := engine.get("workers", 1)) > 1:
        engine_mode = f"{workers} workers, {engine_mode}"
    chosen = f" ({engine['chosen']})" if engine.get("chosen") else ""
    epochs = f"{config['local_epochs']} local epoch{'s' * (config['local_epochs'] > 1)}"
    return [
        ("method", f"{record['method']}, protocol {record['protocol']}"),
        ("data set", f"{record['dataset']}, {sum(sizes):,} training images on {len(sizes)} clients{reduced}"),
        ("partition", f"{record['partition']['flag']}, {min(sizes):,} to {max(sizes):,} images a client"),
        ("network", f"{record['model']['backbone']}, {record['model']['parameters']:,} parameters"),
        ("clients", f"{config['num_clients']}, of which {config['cohort_size']} in each of {config['rounds']} rounds"),
        (
            "training",
            f"{config['optimizer']}, rate {config['lr']:g}, {epochs}, batches of {config['batch_size']}",
        ),
        ("headline", f"{MEASURES[record['evaluation']]}, {HEADLINES[record['summary']['selection']]}"),
        ("machine", f"{engine['device']}, {engine['precision']}, {engine_mode}{chosen}"),
        ("seed", str(record["seed"])),
        ("folder", str(folder)),
    ]


def metrics(entry: dict[str, Any]) -> list[str]:
    """Write what is shown of a round: accuracies where it was evaluated, and the terms of the objective."""
    accuracies = {"test": entry["test_accuracy"], "validation": entry["validation_accuracy"]}
    shown = [f"{name} {100 * value:.2f} %" for name, value in accuracies.items() if value is not None]
    return [*shown, *(f"{name} {value:.4g}" for name, value in entry["terms"].items())]


def headline(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Say at the end what a run came to, as pairs of title and text."""
    summary = record["summary"]
    rule = SELECTIONS[summary["selection"]].format(round=f"{summary['selected_round'] + 1}/{summary['rounds']}")
    post = record.get("post")
    return [
        ("selected", f"{100 * summary['selected']:.2f} % ({rule})"),
        ("last round", f"{100 * summary['last']:.2f} %"),
        *([(f"after {post['name']}", f"{100 * post['test_accuracy']:.2f} %")] if post else []),
        ("time", _clock(record["seconds_total"])),
        ("record", str(folder / RECORD)),
        ("figures", "curve and partition beside it, .png and .pdf"),
    ]


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw a run's learning curve and its partition into its folder, as PNG and PDF."""
    from fedcli.figures import bubbles, curves, plots  # late: it takes a second

    partition = record["partition"]
    title = f"{record['dataset']}, {partition['flag']}, seed {partition['seed']}"
    plots.write(folder / "curve", curves.learning_curves, [record])
    given = np.array(partition["class_counts"]), record["class_names"], title
    plots.write(folder / "partition", bubbles.partition_figure, *given)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class _Pace(progress.ProgressColumn):
    """Samples trained a second and time left, by all that the run has done since its start or resumption."""

    def render(self, task: progress.Task) -> Text:
        elapsed, seconds = max(task.elapsed, 1e-9), _seconds_left(task)
        left = "-:--:--" if seconds is None else _clock(seconds)
        return Text(f"{task.fields['samples'] / elapsed:,.0f} samples/s, {left} left", no_wrap=True)


def _seconds_left(task: progress.Task) -> float | None:
    """Seconds that the rounds to come take if they go on like those so far; None before the first batch.

    Several methods begin a round with public images, which are not counted as samples. So in the first round what came
    before the first batch stands for as much in every round, and only the batches after it tell how fast training is.
    """
    done, rounds = task.completed - task.fields["first"], task.total - task.fields["first"]
    if not done:
        return None
    elapsed, (before, at) = max(task.elapsed, 1e-9), task.fields["begun"]
    if at < done < 1:  # in the first round, after a second batch
        return (before + (elapsed - before) / (done - at)) * rounds - elapsed
    return elapsed / done * (rounds - done)


class _Bar(progress.Progress):
    """The bar of a run, and below it what the last round came to."""

    def get_renderables(self) -> Iterator[Any]:
        yield from super().get_renderables()
        last = [entry for task in self.tasks for entry in task.fields["entries"][-1:]]
        yield from (Text("   ".join(metrics(entry))) for entry in last)


class Display(Listener):
    """Show a run: a live bar on a terminal, one line a round elsewhere. Rounds are counted from 1.

    Attributes:
        folder: Folder of the run that goes on; None where none does.
        record: Its record.
        bar: Its progress in rounds, drawn on a terminal only.
    """

    def __init__(self, console: Console, *logs: Console):
        """Makes a display on a console, whose lines go to `logs` too."""
        self.console, self._consoles = console, (console, *logs)
        self.folder: Path | None = None
        self.record: dict[str, Any] = {}

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Print the header and start the clock."""
        self.record, self.folder, self._expected, self._batches = record, folder, max(samples_per_round, 1), 0
        self._judged = False
        rounds, self._in_round, hidden = record["config"]["rounds"], 0, not self.console.is_terminal
        self._print(header(record, folder))
        if first_round:
            self._print([("resumed", f"after {first_round}/{rounds} rounds")])
        line = progress.BarColumn(None, table_column=Column(ratio=1))
        columns = "round {task.fields[number]}/{task.total}", line, _Pace(Column(no_wrap=True))
        self.bar = _Bar(*columns, console=self.console, disable=hidden, expand=True, get_time=time.perf_counter)
        self.bar.add_task("", total=rounds, first=first_round, samples=0, begun=(0.0, 0.0), entries=record["rounds"])
        self.samples(0)
        self.bar.start()

    def samples(self, count: int) -> None:
        """Move the bar to the rounds done, the one that goes on by its samples."""
        (task,), done = self.bar.tasks, len(self.record["rounds"])
        self._in_round += count
        completed, number = (min(at, task.total) for at in (done + self._in_round / self._expected, done + 1))
        self.bar.update(task.id, completed=completed, number=number, samples=task.fields["samples"] + count)
        self._batches += count > 0
        if self._batches == 1:
            self.bar.update(task.id, begun=(task.elapsed, completed - task.fields["first"]))
        elif not self._judged and self._batches >= FIRST and task.elapsed - task.fields["begun"][0] >= FIRST:
            self._judged = True
            self._say_if_long(task.elapsed + _seconds_left(task))

    def _say_if_long(self, seconds: float) -> None:
        """Tell what makes a run smaller that will take so many seconds, if these are many."""
        if seconds >= LONG:
            text = (
                f"about {seconds / 3600:,.0f} hours here; lower --rounds, --local-epochs or --train-examples, or a "
                "smaller --backbone, make it less, and the record is then labelled reduced"
            )
            self._print([("time", text)])

    def note(self, text: str) -> None:
        """Show what the engine has to say."""
        self._print([("engine", text)])

    def round(self, entry: dict[str, Any]) -> None:
        """Show what a round came to."""
        self._in_round = 0
        self.samples(0)
        place = f"round {entry['round'] + 1}/{self.record['config']['rounds']}"
        numbers = ", ".join([*metrics(entry), _Pace().render(self.bar.tasks[0]).plain])
        for console in self._consoles:
            if not console.is_terminal:
                console.print(f"{place}: {numbers}", soft_wrap=True, markup=False, highlight=False)

    def finish(self, record: dict[str, Any]) -> None:
        """Stop the bar; for a run that has gone through, draw its figures and print its headline."""
        self.bar.stop()
        if record["status"] == "finished":
            draw(record, self.folder)
            self._print(headline(record, self.folder))
            self.console.print()
            self.folder = None

    def log(self, text: str) -> None:
        """Write a line into the logs only."""
        for console in self._consoles[1:]:
            console.print(text, soft_wrap=True, markup=False, highlight=False)

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """Says that a run has ended before, and draws its figures where a kill came before them."""
        whole = {file.stem for file in folder.glob("*.png")} & {file.stem for file in folder.glob("*.pdf")}
        if record["status"] == "finished" and not {"curve", "partition"} <= whole:
            draw(record, folder)
        self._print(
            [("skipped", f"{folder}, which has {'finished' if record['status'] == 'finished' else 'diverged'}")]
        )

    def _print(self, pairs: list[tuple[str, str]]) -> None:
        for title, text in pairs:
            line = Text.assemble((f"{title:<12}", "bold"), printable(text))
            for console in self._consoles:
                console.print(line, soft_wrap=True, highlight=False)


# A paper's table


def cost(plan: TablePlan, records_only: bool = False) -> list[tuple[str, str]]:
    """Say what running a table takes, as pairs of title and text; disk where models that are kept take some."""
    todo, states = plan.to_run, [run.state for run in plan.runs]
    begun = sum(run.record is not None for run in todo)
    counts = {
        "finished": states.count("finished"),
        "diverged": states.count("diverged"),
        "to go on with": begun,
        "to start": len(todo) - begun,
        "left out": sum(run.to_do for run in plan.runs) - len(todo),
    }
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    lines = [("table", plan.title)]
    if plan.limits:
        lines.append(("reduced", f"{plan.reduction}; not the paper's setting"))
    lines.append(("runs", f"{len(plan.runs)}, seeds {', '.join(map(str, plan.seeds))}: {shown}"))
    costs = estimate(plan)
    if costs:
        lines.append(("time", _time(list(costs.values())) + ", one run after the other"))
    if len(costs) > 1:
        lines += [("", f"{heading(column)}: {_time([one])}") for column, one in costs.items()]
    if not records_only and (kept := bytes_kept(plan) / 2**30) >= 1:
        there = next(place for place in (plan.folder, *plan.folder.absolute().parents) if place.is_dir())
        free = disk_usage(there).free / 2**30
        text = f"{kept:,.0f} GiB or more for the models that the runs leave, {free:,.0f} GiB are free"
        lines.append(("disk", f"{text}; --records-only leaves none"))
    if todo:
        lines.append(("data sets", ", ".join(sorted({name for run in todo for name in run.data}))))
    lines += [("left out", lack) for lack in (*plan.missing_data.values(), *plan.damaged)]
    shared = f"; finished runs in {' and '.join(map(str, plan.search))} count too" if plan.search else ""
    return [*lines, ("folder", f"{plan.folder}{shared}")]


def _time(costs: list[Cost]) -> str:
    """Say what is known of the time that the runs to do of some columns take."""
    runs, known = sum(one.runs for one in costs), sum(one.known for one in costs)
    count = f"{runs} run{'s' * (runs > 1)}" if known in (0, runs) else f"{known} of {runs} runs"
    if not known:
        return f"not known for {count}, none like them was timed"
    seconds = sum(one.seconds for one in costs)
    hours, minutes = seconds / 3600, max(1, round(seconds / 60))
    text = f"{hours:,.1f} hours" if hours >= 1.5 else f"{minutes} minute{'s' * (minutes > 1)}"
    rest = ", not known for the others" if known < runs else ""
    by = sorted(set().union(*(one.by for one in costs)))
    return f"about {text} for {count}{rest}" + (f" ({', '.join(by)})" if by else "")


def say(console: Console, pairs: list[tuple[str, str]]) -> None:
    """Print pairs of title and text, the text wrapped beside the title."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=11, style="bold")
    grid.add_column(overflow="fold")
    for title, text in pairs:
        grid.add_row(title, Text(printable(text)))
    console.print(grid)


class TableDisplay(Watch):
    """Show the runs of a table or a grid: a bar for all and one for each that goes on; lines where no terminal is.

    Attributes:
        ended: Number of runs that have ended.
        total: Number of runs to do.
    """

    def __init__(self, console: Console, plan: TablePlan | GridPlan, *logs: Console):
        """Makes a display on a console, whose lines go to `logs` too."""
        self._consoles, self.ended, self.total = (console, *logs), 0, len(plan.to_run)
        self._left = {run.folder: run.setup.run.rounds - run.rounds_done for run in plan.to_run}
        self._work = {run.folder: run.round_work * self._left[run.folder] for run in plan.to_run}
        self._done: dict[Path, float] = {}  # work, by folder
        self._begun: dict[Path, float] = {}
        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[place]}", markup=False),
        )
        self._bars = progress.Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._all = self._bars.add_task("all runs", total=sum(self._work.values()), place="")
        self._tasks: dict[Path, progress.TaskID] = {}

    def __enter__(self) -> "TableDisplay":
        self._start = time.perf_counter()
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.stop()

    def begin(self, run: PlannedRun) -> None:
        """Add the run's bar."""
        self._begun[run.folder] = time.perf_counter()
        self._tasks[run.folder] = self._bars.add_task(_label(run), total=run.setup.run.rounds, place="")
        self.advance(run, run.rounds_done)
        text = "starts" if run.record is None else f"goes on after {run.rounds_done} rounds"
        for console in self._consoles:
            if not console.is_terminal:
                console.print(f"{_label(run)}: {text}", soft_wrap=True, markup=False)

    def advance(self, run: PlannedRun, rounds: float) -> None:
        """Move the run's bar and that of all runs."""
        share = (rounds - run.rounds_done) / max(self._left[run.folder], 1)
        self._done[run.folder] = self._work[run.folder] * min(max(share, 0), 1)
        place = f"{int(rounds)}/{run.setup.run.rounds} rounds"
        self._bars.update(self._tasks[run.folder], completed=rounds, place=place)
        self._bars.update(self._all, completed=sum(self._done.values()), place=self._place())

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """Remove the run's bar and say what has become of it."""
        self.ended += 1
        self._bars.remove_task(self._tasks.pop(run.folder))
        self._done[run.folder] = self._work[run.folder]
        self._bars.update(self._all, completed=sum(self._done.values()), place=self._place())
        seconds = time.perf_counter() - self._begun[run.folder]
        if error:
            self._line(run, f"failed: {error}", "red")
        else:
            self._line(run, f"{100 * record['summary']['selected']:.2f} % in {_clock(seconds)}")

    def _line(self, run: PlannedRun, text: str, style: str = "") -> None:
        number = f"[{self.ended}/{self.total}] "
        for console in self._consoles:
            console.print(Text(f"{number}{_label(run)}: {printable(text)}", style), soft_wrap=True, highlight=False)

    def _place(self) -> str:
        done, total = sum(self._done.values()), sum(self._work.values())
        elapsed = time.perf_counter() - self._start
        left = _clock(elapsed / done * (total - done)) if done else "-:--:--"
        return f"{self.ended}/{self.total} runs, {left} left"


def _label(run: PlannedRun) -> str:
    return f"{run.label}, seed {run.setup.run.seed}"


def run_plan(
    plan: TablePlan | GridPlan, consoles: Sequence[Console], again: str = "the same command", **where: Any
) -> dict[Path, str]:
    """Run what is to do of a plan, and show it; after an interruption say what goes on."""
    display = TableDisplay(consoles[0], plan, *consoles[1:])
    try:
        with display:
            return execute(plan, display, **where)
    except KeyboardInterrupt as error:  # outside: its bars, which go, would take the line with them
        stop(
            f"{str(error) or 'interrupted'} after {display.ended} of {display.total} runs; {again} goes on.",
            exit_code(error),
        )


STYLES = {"best": "bold", "": ""}
WIDEST, GAP = 26, 2  # of a column of a table, in characters; between two


def drawn(comparison: Comparison, width: int) -> Group:
    """Lay out a comparison in blocks of as many columns as fit, the best of ours bold where it stands out."""
    parts: list[Any] = [Text(comparison.title, "bold")]
    if comparison.reduced:
        parts.append(Text(f"Reduced: {comparison.reduced}. Not the paper's setting.", "bold yellow"))
    for columns in _blocks(comparison, width):
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        table.add_column("Method", max_width=WIDEST)
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(Text(heading(column)), justify="right", max_width=WIDEST)
        for row in comparison.rows:
            for number, line in enumerate(lines := comparison.lines(row, columns)):
                cells = [Text(text, STYLES[mark]) for text, mark in line]
                table.add_row(*cells, style="" if line[1][0].startswith("ours") else "dim" if number else "")
            if lines:
                table.add_row()
        parts += [Text(), table]
    notes = Table.grid(padding=(0, 1))
    for note in comparison.notes:
        notes.add_row("-", Text(note))
    return Group(*parts, notes)


VERDICT_STYLES = {"reproduced": "green", "contradicted": "red", "undecided": "yellow"}


def drawn_claims(found: Sequence[Answer]) -> Group:
    """Lay out claims, the verdict before each sentence and the numbers below it, in 80 characters."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Claim, the paper's difference and ours")
    for one in found:
        for number, line in enumerate(one.evidence):
            parts = [] if number or one.paper is None else [f"paper {one.metric.signed(one.paper)}"]
            parts += [f"ours {one.ours(line)}"] if one.ours(line) != MISSING else []
            parts += [f"last tenth {claims.difference_text(one.metric, line.tail)}"] if line.tail is not None else []
            about = ", ".join(part for part in (line.why, line.size) if part not in ("", MISSING)) or one.command
            text = Text("" if number else one.claim.text)
            text.append("" if number else f" {one.claim.name}\n", "dim")
            text.append(", ".join(parts) + (f"; {about}" if about else ""), "dim")
            table.add_row(Text(line.verdict, VERDICT_STYLES.get(line.verdict, "")), text)
    notes = Table.grid(padding=(0, 1))
    for note in claims.NOTES:
        notes.add_row("-", Text(note))
    return Group(table, Text(), Text(claims.counted(found), "bold"), notes)


def _blocks(comparison: Comparison, width: int) -> Iterator[list[str]]:
    """Divide the columns into portions that fit."""
    first = min(max(map(len, comparison.rows)), WIDEST) + len("ours, reduced") + 2 * GAP
    block: list[str] = []
    room = width - first
    for column in comparison.columns:
        texts = [line[2][0] for row in comparison.rows for line in comparison.lines(row, [column])]
        needed = min(max(map(len, [*texts, *heading(column).split()])), WIDEST) + GAP
        if block and needed > room:
            yield block
            block, room = [], width - first
        block.append(column)
        room -= needed
    yield block
