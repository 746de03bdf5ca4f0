"""What `run`, `load` and `tune` return: runs, and chosen options, as Python and a notebook show them."""

import base64
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex, overload

from fedcli.errors import UserError
from fedcli.keywords import in_keywords, keywords_for_flags
from fedcli.runs.saved_run import SavedRun
from fedcli.runs.settings_text import settings_text

# The columns of a table's CSV that a notebook shows of a run.
SUMMARY_COLUMNS = [
    "method", "protocol", "dataset", "config.partition", "seed", "status", "rounds_done", "selection", "selected",
    "last", "folder",
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Run(SavedRun):
    """A run that has ended.

    Attributes:
        record: The content of its `record.json`, where rounds count from 0.
        state: The method's server state after the last round; None for a run that had ended before.
        path: Its folder.
    """

    @classmethod
    def of(cls, saved: SavedRun) -> "Run":
        """Returns the same run, with what a notebook needs of it."""
        return cls(record=saved.record, state=saved.state, path=saved.path, files=saved.files)

    model = in_keywords()(SavedRun.model)  # as it is, but for its refusals

    @property
    def history(self) -> Any:
        """A `pandas.DataFrame` with a row for each round; `round` counts from 1, accuracies are in percent."""
        from fedcli.results.run_tables import tabulate_rounds  # late: pandas takes half a second

        return tabulate_rounds(self.record)

    @property
    def clients(self) -> Any:
        """A `pandas.DataFrame` with the `accuracy` of each `client` in percent in each `round` that the record has.

        Those are the selected round, the last, and with `per_client_every` every n-th.
        """
        from fedcli.results.run_tables import tabulate_client_rounds

        return tabulate_client_rounds(self.record)

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

        return predictions(self.model(client, round, prototypes=self.classifies_by_prototypes), images)

    @in_keywords()
    def confusion(self, client: int | None = None, round: str = "selected") -> Any:
        """Counts what the test images of each class are taken for, `[C, C]`, the true class by the predicted one.

        By the headline's models, unless `round="last"`; with models or test images of single clients summed over them.

        Raises:
            UserError: If the run has no such model, or its data or files have changed.
        """
        from fedcli.measure.predictions import confusion

        return confusion(self, client, round)

    @in_keywords()
    def per_class(self, client: int | None = None, round: str = "selected") -> Any:
        """Returns a `pandas.DataFrame`, a row a class: `images`, and `accuracy`, `precision`, `f1` in percent."""
        from fedcli.measure.predictions import per_class

        return per_class(self.confusion(client, round), self.record["class_names"])

    def __repr__(self) -> str:
        record = self.record
        summary = record["summary"]
        selected = math.nan if summary["selected"] is None else summary["selected"]
        accuracy = f"{selected:.2%} ({summary['selection']})"
        return f"Run({record['method']} on {record['dataset']}, seed {record['seed']}: {accuracy}, in {self.path})"

    def _repr_html_(self) -> str:
        return Runs([self])._repr_html_()


class Runs(list[Run]):
    """Several runs, as of `fedcli.run(..., seeds=[0, 1])`."""

    def __add__(self, others: list[Run]) -> "Runs":  # type: ignore[override]  # what is no run is not added
        return Runs([*self, *others])

    @overload
    def __getitem__(self, index: SupportsIndex) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> "Runs": ...

    def __getitem__(self, index: SupportsIndex | slice) -> "Run | Runs":
        if isinstance(index, slice):
            return Runs(super().__getitem__(index))
        return super().__getitem__(index)

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
        from fedcli.figures.options import FigureOptions
        from fedcli.figures.warn import warnings_in_words

        with in_keywords():
            chosen = FigureOptions(**look)
            parameters = chosen.parameters()
        with rc_context(parameters), in_keywords(), warnings_in_words(keywords_for_flags):
            return learning_curves([run.record for run in self], x, y, options=chosen)

    @property
    def _records(self) -> list[dict[str, Any]]:
        """Their records as tables take them, each with its folder."""
        return [{**run.record, "folder": run.path} for run in self]

    @in_keywords()
    def frame(self, *metrics: str) -> Any:
        """Returns a `pandas.DataFrame`, a row a run: the options, the seed, accuracies in percent and any `metrics`."""
        from fedcli.results.tables import tabulate_numbers

        return tabulate_numbers(self._records, metrics)

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
            UserError: If there is no run, a metric, a column or the format is not known, or there can be no such label.
        """
        import pandas as pd

        from fedcli.results.columns import Layout
        from fedcli.results.formats import write_tables
        from fedcli.results.tables import build_table

        if not self:
            raise UserError("a table needs a run (got none); read the warnings of the call that has made them.")
        with in_keywords():
            layout = Layout(columns, digits)
            if format is not None:
                return write_tables(self._records, metrics, format, layout, label)
            if label:
                raise UserError(f"label='{label}' is for format=\"latex\" (got no format); give it, or leave it out.")
            shown = build_table(self._records, metrics, leads=True, layout=layout)
        return pd.DataFrame(shown.rows, columns=shown.titles)

    def _repr_html_(self) -> str:
        """Returns a table of the runs, a column each, and their curves."""
        if not self:
            return "<p>no runs</p>"
        import pandas as pd

        from fedcli.results.tables import collect_numbers

        table = pd.DataFrame({**collect_numbers(run.record), "folder": run.path} for run in self)
        # Not cut, and without mathematics, as a name may have dollar signs.
        with pd.option_context("display.max_colwidth", None, "display.html.use_mathjax", False):
            page = table[SUMMARY_COLUMNS].T.to_html(header=False, float_format="{:,.2f}".format)
        with suppress(UserError):  # nothing was evaluated
            picture = base64.b64encode(self.plot()._repr_png_()).decode()
            page += f'<img alt="learning curves" style="max-width: 100%" src="data:image/png;base64,{picture}">'
        return page


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
