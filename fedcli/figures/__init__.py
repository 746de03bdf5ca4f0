"""Figures from records and finished runs, and the kinds of `fedcli plot`."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fedcli.errors import unknown
from fedcli.userfiles import find_user_function, names_user_file

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.runs.schema import Record


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A kind of figure.

    Attributes:
        function: What draws it from records, each with its `folder`, as MODULE:NAME of this package. The module, slow
            to import, is imported when it draws.
        shows: What it shows, for the help.
        takes: The arguments of the function beside the records, of those of `fedcli plot`: `x` and `y`, what its axes
            show; `options`, of its lines; `files`, the user's, where it opens the runs.
    """

    function: str
    shows: str
    takes: tuple[str, ...] = ()

    @property
    def has_lines(self) -> bool:
        """Whether colours, names and legend of its lines can be chosen."""
        return "options" in self.takes


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What curves show.

    Attributes:
        column: A column of `tabulate_rounds`; or a name before a slash, as "intra", for the mean of its columns; of
            single clients, the column of `tabulate_clients`, "accuracy".
        label: Its name at the vertical axis.
        remedy: What a user can do where no run has a value.
        of_clients: Whether the points of a curve are clients, the worst first, and not rounds.
        is_percentage: Whether no value lies beyond 0 and 100.
    """

    column: str
    label: str
    remedy: str
    of_clients: bool = False
    is_percentage: bool = True


# By kind, `fedcli plot --kind NAME`.
CHARTS = {
    "curves": Chart(
        function="line_charts:learning_curves",
        shows="test accuracy over rounds; runs that differ only in the seed are a line with a band",
        takes=("x", "y", "options"),
    ),
    "drift": Chart(
        function="line_charts:drift_chart",
        shows="how far the clients' models drift apart, of runs with --drift-every",
        takes=("options",),
    ),
    "domains": Chart(
        function="line_charts:domains_chart",
        shows="accuracy of the clients' models on their own and on other domains",
        takes=("options",),
    ),
    "accuracies": Chart(
        function="line_charts:accuracies_chart",
        shows="test accuracy of each client after the last round, sorted",
        takes=("options",),
    ),
    "tsne": Chart(
        function="features:features_chart",
        shows="features of test images by t-SNE, after 'fedcli quality'",
    ),
    "clients": Chart(
        function="features:clients_chart",
        shows="features of the clients' own models, after 'fedcli quality --clients'",
    ),
    "confusion": Chart(
        function="predictions:confusion_chart",
        shows="what the test images of each class are taken for, after 'fedcli quality'",
    ),
    "correlation": Chart(
        function="predictions:correlation_chart",
        shows="how alike logits of personal models are on public and on private images",
        takes=("files",),
    ),
}
WITH_LINES = tuple(kind for kind, chart in CHARTS.items() if chart.has_lines)
# By name, `fedcli plot --y NAME`.
QUANTITIES = {
    "accuracy": Quantity(
        column="test_accuracy",
        label="Test accuracy (%)",
        remedy="wait for a round to end, or use --x round, as seconds beside other work do not count",
    ),
    "validation": Quantity(
        column="validation_accuracy",
        label="Validation accuracy (%)",
        remedy="run with --validation 0.1",
    ),
    "global": Quantity(
        column="global_accuracy",
        label="Accuracy of the global model (%)",
        remedy="draw runs of methods that have both models",
    ),
    "macro-f1": Quantity(
        column="macro_f1",
        label="Macro-F1 (%)",
        remedy="run with --per-class",
    ),
    "balanced-accuracy": Quantity(
        column="balanced_accuracy",
        label="Balanced accuracy (%)",
        remedy="run with --per-class",
    ),
}
ACCURACY = QUANTITIES["accuracy"]


def find_chart(name: str) -> Callable[..., Any]:
    """Returns what draws a kind of figure, or a user's own one, `./file.py:NAME`, from records.

    Raises:
        UserError: If there is none; of a user's own also when it is drawn and does not return a figure.
    """
    if not names_user_file(name):
        if name not in CHARTS:
            raise unknown("chart", name, CHARTS, f"there are {', '.join(CHARTS)}, and your own by ./file.py:NAME.")
        return resolve_name(f"{__name__}.{CHARTS[name].function}")
    function = find_user_function(name, "chart")

    def draw(records: "list[Record]") -> Any:
        import matplotlib.figure

        with matplotlib.rc_context({"text.parse_math": True}):  # off in our figures, whose names may have a dollar sign
            figure = function(records)
        if not isinstance(figure, matplotlib.figure.Figure):
            raise function.refuse(f"is no chart (it returned {type(figure).__name__})", "return a matplotlib Figure")
        return figure

    return draw
