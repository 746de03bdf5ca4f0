"""What `import fedcli` gives: `run`, `tune` and `load`, and the runs that they return, which a notebook shows."""

import base64
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fedcli.declarations import flag_of
from fedcli.errors import UserError
from fedcli.keywords import in_keywords, keywords_for_flags
from fedcli.runs import begin, resume, rounds
from fedcli.runs.ended import EndedRun
from fedcli.runs.identity import settings_text
from fedcli.runs.lock import locked
from fedcli.runs.progress import Progress
from fedcli.runs.record import RECORD, read_record
from fedcli.runs.trackers import Loggers
from fedcli.userfiles import is_from_file

# The columns of a table's CSV that a run shows.
SHOWN = [
    "method", "protocol", "dataset", "config.partition", "seed", "status", "rounds_done", "selection", "selected",
    "last", "folder",
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Run(EndedRun):
    """A run that has ended.

    Attributes:
        record: The content of its `record.json`, where rounds count from 0.
        state: The method's server state after the last round; None for a run that had ended before.
        path: Its folder.
    """

    @classmethod
    def of(cls, ended: EndedRun) -> "Run":
        """The same run, with what a notebook needs of it."""
        return cls(record=ended.record, state=ended.state, path=ended.path, files=ended.files)

    model = in_keywords()(EndedRun.model)

    @property
    def history(self) -> Any:
        """A `pandas.DataFrame` with a row for each round; `round` counts from 1, accuracies are in percent."""
        from fedcli.results.frame import rounds_of  # late: pandas takes half a second

        return rounds_of(self.record)

    @property
    def clients(self) -> Any:
        """A `pandas.DataFrame` with the `accuracy` of each `client` in percent in each `round` that the record has.

        Those are the selected round, the last, and with `per_client_every` every n-th.
        """
        from fedcli.results.frame import client_rounds_of

        return client_rounds_of(self.record)

    def plot(self, x: str = "round", y: str = "accuracy", **look: Any) -> Any:
        """Draws the learning curve; see `Runs.plot`."""
        return Runs([self]).plot(x, y, **look)

    @in_keywords()
    def data(self, part: str = "test", client: int | None = None) -> Any:
        """Returns images as `model()` takes them, `[N, channels, H, W]` from 0 to 1, and their labels `[N]`.

        Args:
            part: "train", "validation" or "test".
            client: Whose images; of all clients in turn if None.

        Raises:
            UserError: If there is no such part or client, or the run's data or files have changed.
        """
        from fedcli.measure.predictions import images_of

        return images_of(self, part, client)

    @in_keywords()
    def predict(self, images: Any, client: int | None = None, round: str = "selected") -> Any:
        """Returns the class of each image `[N]` by the headline's model, or by that of `client` or of the last round.

        Where the headline is measured by the nearest prototype, this is the class of the nearest one.

        Raises:
            UserError: If the run has no such model, or the images are not as `data` gives them.
        """
        from fedcli.measure.predictions import predictions

        by_prototypes = "classifier_accuracy" in self.record["rounds"][-1]
        return predictions(self.model(client, round, prototypes=by_prototypes), images)

    @in_keywords()
    def confusion(self, client: int | None = None, round: str = "selected") -> Any:
        """Counts what the test images of each class are taken for, `[C, C]`, the true class by the predicted one.

        By the headline's models, unless `round="last"`; with models or test images of single clients summed over them.

        Raises:
            UserError: If the run has no such model, or its data or files have changed.
        """
        from fedcli.measure.predictions import confusion

        return confusion(self, round, client)

    @in_keywords()
    def per_class(self, client: int | None = None, round: str = "selected") -> Any:
        """Returns a `pandas.DataFrame`, a row a class: `images`, and `accuracy`, `precision`, `f1` in percent."""
        from fedcli.measure.predictions import per_class

        return per_class(self.confusion(client, round), self.record["class_names"])

    def __repr__(self) -> str:
        record = self.record
        summary = record["summary"]
        accuracy = f"{summary['selected'] or math.nan:.2%} ({summary['selection']})"
        return f"Run({record['method']} on {record['dataset']}, seed {record['seed']}: {accuracy}, in {self.path})"

    def _repr_html_(self) -> str:
        return Runs([self])._repr_html_()


class Runs(list[Run]):
    """Several runs, as of `fedcli.run(..., seeds=[0, 1])`."""

    def __add__(self, others: list[Run]) -> "Runs":  # type: ignore[override]  # what is no run is not added
        return Runs([*self, *others])

    def plot(self, x: str = "round", y: str = "accuracy", **look: Any) -> Any:
        """Draws their learning curves; several seeds are a line with a band. A notebook shows the figure.

        Args:
            x: The horizontal axis: `round`, `floats` or `seconds`.
            y: `accuracy`, `validation`, `global`, or of runs with `per_class` `macro-f1` or `balanced-accuracy`.
            **look: As the options of `fedcli plot`: `title`, `size=(3.4, 2.3)` in inches, `font_size`, `style`,
                `colors={"fedavg": "#0072B2"}`, `labels={"fedavg": "FedAvg"}`, `legend`.

        Returns:
            A `matplotlib.figure.Figure`, which can be changed further and saved.
        """
        from matplotlib import rc_context

        from fedcli.figures.line_charts import learning_curves
        from fedcli.figures.look import Look
        from fedcli.figures.saving import small_png
        from fedcli.figures.warn import warnings_in_words

        with in_keywords():
            chosen = Look(**look)
        with rc_context(chosen.parameters()), in_keywords(), warnings_in_words(keywords_for_flags):
            figure = learning_curves([run.record for run in self], x, y, look=chosen)
        # A notebook shows a figure by this method, also without pyplot.
        figure._repr_png_ = lambda: small_png(figure)  # type: ignore[attr-defined]  # notebooks look for it
        return figure

    def frame(self, *metrics: str) -> Any:
        """Returns a `pandas.DataFrame`, a row a run: the options, the seed, accuracies in percent and any `metrics`."""
        from fedcli.results.tables import numbers_of_records

        return numbers_of_records([{**run.record, "folder": run.path} for run in self], metrics)

    def table(
        self, *metrics: str, format: str | None = None, columns: str | Sequence[str] = (), digits: int | None = None,
        label: str = "",
    ) -> Any:  # fmt: skip
        r"""Returns the table that `fedcli table` shows of them.

        Args:
            *metrics: More columns, as of `fedcli table --metric`.
            format: "latex", "markdown" or "csv" for a text; a `pandas.DataFrame` of texts, a row a setting, if None.
            columns: The columns and their order, by the names that the table shows, as `["Method", "Selected"]`.
            digits: Decimals of percent and plain numbers.
            label: LaTeX's `\label`, as "tab:main"; by default it has the protocol and the data set.

        Raises:
            UserError: If a metric, a column or the format is not known, or there can be no such label.
        """
        import pandas as pd

        from fedcli.results.columns import Layout
        from fedcli.results.formats import write_tables
        from fedcli.results.tables import sheet

        records = [{**run.record, "folder": run.path} for run in self]
        with in_keywords():
            layout = Layout(columns, digits)
            if format is not None:
                return write_tables(records, metrics, format, layout, label)
            if label:
                raise UserError(f"label='{label}' is for format=\"latex\" (got no format); give it, or leave it out.")
            shown = sheet(records, metrics, leads=True, layout=layout)
        return pd.DataFrame(shown.lines, columns=shown.columns)

    def _repr_html_(self) -> str:
        """A table of the runs, a column each, and their curves."""
        import pandas as pd

        from fedcli.results.tables import numbers_of

        table = pd.DataFrame({**numbers_of(run.record), "folder": run.path} for run in self)
        with pd.option_context("display.max_colwidth", None):
            page = table[SHOWN].T.to_html(header=False, float_format="{:,.2f}".format)
        with suppress(UserError):  # nothing was evaluated
            picture = base64.b64encode(self.plot()._repr_png_()).decode()
            page += f'<img alt="learning curves" style="max-width: 100%" src="data:image/png;base64,{picture}">'
        return page


def run(  # noqa: PLR0913  # those of `fedcli.run`, which have their defaults there
    method: str | Path, options: dict[str, Any], *, out: str | Path | None, seeds: Iterable[int] | None, tuned: Any,
    continue_: bool | None, log: Any, exist_ok: bool, progress: rounds.Listener | None, jobs: int,
    set: Mapping[str, Mapping[str, Any]],
) -> Run | Runs:  # fmt: skip
    """Runs one method or several; see `fedcli.run`."""
    names = str(method).split(",")
    with in_keywords():
        options = _plain_values(options)
        set = _plain_method_options(set)
        seeds = _plain_seeds(seeds)
    is_grid = any(isinstance(value, tuple) for value in options.values())
    old_runs = nullcontext() if out is None or not exist_ok else _set_aside(Path(out))
    with in_keywords(), old_runs:
        if progress is None and _is_notebook():
            progress = Progress()
        tuned = None if tuned is None else os.fspath(tuned)
        experiment = {"out": out, "seeds": seeds, "tuned": tuned, "continue_": continue_}
        if len(names) > 1 or is_grid or jobs > 1:
            return _run_grid(names, options, jobs=jobs, log=log, set=set, **experiment)
        (name,) = names
        if set:
            from fedcli.results.method_options import options_by_method

            options |= options_by_method(names, set)[name]
        ended = begin.run_method(name, progress=Loggers(progress, log), **experiment, **options)
    if isinstance(ended, list):
        return Runs(Run.of(run) for run in ended)
    return Run.of(ended)


def _is_notebook() -> bool:
    """Whether a notebook runs this program."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def _run_grid(
    names: list[str], options: dict[str, Any], *, jobs: int, log: Any, set: Mapping[str, Mapping[str, Any]],
    **experiment: Any,
) -> Runs:  # fmt: skip
    """Runs all methods with all combinations of values and all seeds; warns of the runs that fail."""
    from fedcli.results.jobs import PlanListener, execute
    from fedcli.results.plans import plan_grid, protocols_text

    if log is not None and jobs > 1:
        raise UserError(f"--log is for runs one after the other (got --jobs {jobs}); leave one of them out.")
    plan = plan_grid(names, options, method_options=set, **experiment)
    mixed = protocols_text(plan.runs)
    if mixed:
        warnings.warn(keywords_for_flags(mixed), stacklevel=4)
    listener = PlanListener()
    listener.log = log
    errors = execute(plan, listener, jobs=jobs)
    for folder, error in errors.items():
        warnings.warn(f"the run '{folder}' has failed: {error}", stacklevel=4)
    files = [name for name in names if is_from_file(name)]
    return Runs(_open(planned.folder, files) for planned in plan.runs)


@dataclass(frozen=True, repr=False)
class Tuned:
    """What `fedcli.tune` has chosen; give it to `fedcli.run` as `tuned`.

    Attributes:
        folder: Of the trials.
        trials: A `pandas.DataFrame`, a row a trial, each method's best first: `method`, `options`, the validation
            `accuracies` of its runs as fractions, and their mean, `accuracy`.
        options: The chosen options by the name of the method.
    """

    folder: Path
    trials: Any
    options: dict[str, dict[str, Any]]

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        chosen = "; ".join(f"{method}: {settings_text(options)}" for method, options in self.options.items())
        return f"Tuned({chosen}; in '{self.folder}')"


def tune(  # noqa: PLR0913  # those of `fedcli.tune`, likewise
    method: str | Path, options: dict[str, Any], *, grid: Mapping[str, Iterable[Any]] | Sequence[str],
    out: str | Path | None, seeds: Iterable[int] | None, trials: int | None, jobs: int,
    set: Mapping[str, Mapping[str, Any]],
) -> Tuned:  # fmt: skip
    """Tunes one method or several; see `fedcli.tune`."""
    from fedcli.results import tune as tuning
    from fedcli.results.jobs import PlanListener, execute
    from fedcli.results.method_options import find_methods
    from fedcli.results.plans import protocols_text

    with in_keywords():
        options = _plain_values(options)
        set = _plain_method_options(set)
        texts = _grid_texts(grid)
        seeds = _plain_seeds(seeds)
        plan = tuning.plan_trials(
            str(method), grid=texts, trials=trials, out=out, seeds=seeds, method_options=set, **options
        )
        for text in filter(None, [protocols_text(plan.runs), *tuning.samples(plan)]):
            warnings.warn(keywords_for_flags(text), stacklevel=3)
        errors = execute(plan, PlanListener(), jobs=jobs, records_only=True)
        ranked = tuning.rank_and_write_best(plan, errors)
        for text in tuning.edges(find_methods(str(method).split(",")), plan.grids, ranked):
            warnings.warn(keywords_for_flags(f"{text}; try values beyond"), stacklevel=3)
    best = ranked.groupby("method", sort=False)["options"].first()
    return Tuned(plan.folder, ranked, best.to_dict())


def _grid_texts(grid: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """The values to try, as `--grid` has them."""
    if not isinstance(grid, Mapping):
        return list(grid)
    texts = []
    for name, values in _plain_values(grid).items():
        listed = values if isinstance(values, tuple) else (values,)
        texts.append(f"{name}={','.join(map(str, listed))}")
    return texts


def _plain_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, as they are typed, a tuple for several values; refuses an empty one.

    None counts as not given.
    """
    plain = {name: _plain(value) for name, value in options.items() if value is not None}
    for name, value in plain.items():
        if value == ():
            raise UserError(f"{flag_of(name)} has no value (got {options[name]!r}); give one or several.")
    return plain


def _plain_method_options(method_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of single methods, likewise; what are no options of a method stays, to be refused."""
    return {
        name: _plain_values(options) if isinstance(options, Mapping) else options
        for name, options in method_options.items()
    }


def _plain_seeds(seeds: Any) -> list[Any] | None:
    """The seeds of several runs, likewise; None for those of a single one."""
    if seeds is None:
        return None
    plain = _plain(seeds)
    if not isinstance(plain, Iterable):
        raise UserError(f"--seeds must be several (got {plain!r}); write seed={plain!r}, or seeds=range({plain!r}).")
    return list(plain)


def _plain(value: Any) -> Any:
    """A number of NumPy or PyTorch as Python's, and a list, tuple, range or array as a tuple of such."""
    if hasattr(value, "tolist"):  # also of pandas
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return tuple(entry.tolist() if hasattr(entry, "tolist") else entry for entry in value)
    return value


def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> Run | Runs:
    """Opens a run, or all runs below a folder; see `fedcli.load`."""
    folder = Path(path)
    if not folder.is_dir() or (folder / RECORD).is_file():
        return _open(folder, method)
    folders = sorted(file.parent for file in folder.rglob(RECORD))
    if not folders:
        return _open(folder, method)  # which says that there is none
    return Runs(_open(run, method) for run in folders)


def _open(path: Path, method: str | Path | Sequence[str | Path]) -> Run:
    return Run.of(resume.load(path, method))


def _is_of_a_call(run: Path, folder: Path) -> bool:
    """Tells whether a run lies below a folder as `run` places several: in `<method>/<option>=<value>/seed-<seed>`."""
    method = read_record(run)["method"]
    parts = run.relative_to(folder).parts
    return all(part == method or "=" in part or part.startswith("seed-") for part in parts)


@contextmanager
def _set_aside(folder: Path) -> Iterator[None]:
    """Renames the folder of a run, or of the runs of one call, unless a process runs in it; leaves other folders.

    Where what happens inside fails before it has written into the folder, as a call does that is refused, the old one
    gets its name back.
    """
    renamed = _rename(folder)
    try:
        yield
    except BaseException:
        if renamed is not None and not folder.exists():
            renamed.rename(folder)
        raise


def _rename(folder: Path) -> Path | None:
    """Puts a free number behind the name of a folder of runs, and returns the new path; None where it holds others."""
    runs: list[Path] = []
    for depth in ("", "*/", "*/*/", "*/*/*/"):  # in those of a method, of an option's value, of a seed
        runs += [file.parent for file in folder.glob(depth + RECORD)]
    for run in runs:
        with locked(run):
            pass
    if not runs or not all(_is_of_a_call(run, folder) for run in runs):
        return None
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
    new_folder = next(name for name in names if not name.exists())
    folder.rename(new_folder)
    return new_folder
