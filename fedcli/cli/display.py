"""What a run shows while it goes on: a header, its progress, its headline; and the figures it leaves in its folder."""

import gc
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

from fedcli.cli.printing import say
from fedcli.declarations import SELECTIONS
from fedcli.errors import first_line, printable
from fedcli.registry import find_method
from fedcli.run_files import CURVE_CHART, PARTITION_CHART, RECORD
from fedcli.runs.options import inactive_term
from fedcli.runs.progress import ProgressListener
from fedcli.runs.schema import Record, RoundEntry
from fedcli.runs.settings_text import reductions


def header_texts(record: Record, folder: Path) -> dict[str, str]:
    """Describe a run, in texts by their titles; a text is empty where its title does not apply."""
    config = record["config"]
    partition = record["partition"]
    sizes = partition["sizes"]
    idle = ", ".join(map(str, partition.get("idle", [])))
    network = record["model"]
    frozen = "".join(f", {part['parameters']:,} frozen" for part in network.get("frozen", []))
    return {
        "method": f"{record['method']}, protocol {record['protocol']}",
        "inactive": inactive_term(config, find_method(record["method_source"])),
        "data set": f"{record['dataset']}, {sum(sizes):,} training images on {len(sizes)} clients",
        "reduced": ", ".join(reductions(record).values()),
        "made from": record.get("dataset_source", ""),
        "partition": f"{partition['flag']}, {min(sizes):,} to {max(sizes):,} images a client",
        "unused": _unused_text(partition, record["class_names"]),
        "idle": f"clients {idle}, which have too few images for a step" if idle else "",
        "network": f"{network['backbone']}, {network['parameters']:,} parameters{frozen}",
        "training": f"{config['rounds']} rounds of {config['cohort_size']} clients, {config['optimizer']}, rate "
        f"{config['lr']:g}, local epochs {config['local_epochs']}, batches of {config['batch_size']}",
        "machine": _machine_text(record["engine"]),
        "folder": f"{folder}, seed {record['seed']}",
        "resumed": f"after {len(record['rounds'])}/{config['rounds']} rounds" if record["rounds"] else "",
    }


def _machine_text(engine: dict[str, Any]) -> str:
    """Describe on which device a run trains, and how many clients together."""
    parts = [engine["device"], engine["precision"]]
    if engine.get("workers", 1) > 1:
        parts.append(f"{engine['workers']} workers")
    if engine["processes"] > 1:
        parts.append(f"one client in each of {engine['processes']} processes")
    elif engine["clients_per_chunk"] == 1:
        parts.append("one client after the other")
    else:
        parts.append(f"{engine['clients_per_chunk']} clients {engine['way']}")
    if engine.get("chosen"):
        parts.append(engine["chosen"])
    return ", ".join(parts)


def plot_run(record: Record, folder: Path) -> None:
    """Plot a run's learning curve and its partition into its folder, as PNG for a screen.

    A figure that fails is a warning, since the run has ended well.
    """
    # Else each search for garbage goes through all that PyTorch has, while Matplotlib is imported and while it plots.
    gc.freeze()
    # Here, since they import Matplotlib.
    from fedcli.figures.line_charts import learning_curves
    from fedcli.figures.names import describe_runs
    from fedcli.figures.partitions import partition_chart
    from fedcli.figures.saving import write_page_figure

    try:
        write_page_figure(folder / CURVE_CHART, learning_curves, [record])
        counts = np.array(record["partition"]["class_counts"])
        title = describe_runs([record], f"seed {record['partition']['seed']}")
        write_page_figure(folder / PARTITION_CHART, partition_chart, counts, record["class_names"], title)
    except Exception as error:  # of many kinds, as matplotlib depends on fonts and settings of the machine
        say(f"warning: the run's figures could not be drawn ({first_line(error)}).", err=True)


def duration_text(record: Record) -> str:
    """Write the time that a run has taken as hours, minutes and seconds."""
    return str(timedelta(seconds=round(record["seconds_total"])))


def _unused_text(partition: dict[str, Any], class_names: Sequence[str]) -> str:
    """Count the images that no client holds, and name the classes of which none is held; empty where all are used."""
    unused = partition.get("unused")
    if not unused:
        return ""
    text = f"{unused:,} of {partition['images']:,} images, which no client holds"
    held = np.sum(partition["class_counts"], axis=0)
    absent = [name for name, count in zip(class_names, held, strict=True) if count == 0]
    if absent:
        text += f"; none of the classes {', '.join(absent)}"
    return text


def print_line(consoles: Iterable[Console], *parts: str | tuple[str, str]) -> None:
    """Print a line of texts, or texts with their styles, on each console, and do not break it; see `printing.say`."""
    line = Text()
    for part in parts:
        text, style = (part, None) if isinstance(part, str) else part
        line.append(printable(text), style)
    for console in consoles:
        console.print(line, soft_wrap=True)


class Display(ProgressListener):
    """Show a run: a live bar on a terminal, one line a round elsewhere. Rounds are counted from 1."""

    def __init__(self, terminal: Console, *log_files: Console):
        """Make a display whose bar is on the terminal, and its lines on all."""
        self._terminal = terminal
        self._consoles = (terminal, *log_files)

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """Print the header and show the bar, on a terminal only."""
        super().start(record, folder, samples_per_round, first_round)
        self._print(header_texts(record, folder))
        self.bar = Progress(console=self._terminal, disable=not self._terminal.is_terminal)
        self._task = self.bar.add_task("", total=record["config"]["rounds"])
        self.bar.start()

    def note(self, text: str) -> None:
        """Show what the user has to know of how the run goes."""
        self._print({"note": text})

    def show(self) -> None:
        """Move the bar."""
        position = self.position()
        texts = ", ".join(position.texts[:2])
        self.bar.update(self._task, completed=position.rounds, description=escape(printable(texts)))

    def round(self, entry: RoundEntry) -> None:
        """Show what a round came to."""
        super().round(entry)
        round_, *numbers = self.position().texts
        without_bar = [console for console in self._consoles if not console.is_terminal]
        print_line(without_bar, f"{round_}: {', '.join(numbers)}")

    def finish(self, record: Record) -> None:
        """Stop the bar; print the headline of a run that has gone through, then draw its figures."""
        self.bar.stop()
        if record["status"] != "finished":
            return
        summary = record["summary"]
        selection = SELECTIONS[summary["selection"]]
        words = selection.words
        if selection.best_by is not None:
            words += f", {summary['selected_round'] + 1}/{summary['rounds']}"
        texts = {"headline": f"{100 * summary['selected']:.2f} % (the {words})"}
        (selected,) = [entry for entry in record["rounds"] if entry["round"] == summary["selected_round"]]
        global_accuracy = selected.get("global_accuracy")
        if global_accuracy is not None:
            texts["global"] = f"{100 * global_accuracy:.2f} % (the global model; above, the clients' own)"
        texts["last round"] = f"{100 * summary['last']:.2f} %"
        if "post" in record:
            post = record["post"]
            texts[f"after {post['name']}"] = f"{100 * post['test_accuracy']:.2f} %"
        assert self.folder is not None  # `start` has set it
        texts["time"] = duration_text(record)
        texts["record"] = f"{self.folder / RECORD}, with {CURVE_CHART} and {PARTITION_CHART}"
        self._print(texts)
        plot_run(record, self.folder)

    def skip(self, record: Record, folder: Path) -> None:
        """Print that a run is left out, as it has ended before."""
        end = "finished" if record["status"] == "finished" else "diverged"
        self._print({"skipped": f"{folder}, which has {end}"})

    def _print(self, texts: dict[str, str]) -> None:
        for title, text in texts.items():
            if text:
                print_line(self._consoles, (f"{title:<12}", "bold"), text)
