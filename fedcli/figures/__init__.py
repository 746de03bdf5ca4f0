"""Figures from records and from finished runs, and the kinds of them that `fedcli plot` knows."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, NamedTuple

from fedcli.errors import unknown
from fedcli.userfiles import from_file, is_from_file


class Chart(NamedTuple):
    """A kind of figure of runs, `fedcli plot --kind NAME`."""

    draw: Callable[..., Any]  # from the runs to the matplotlib Figure
    help: str  # what it shows, one line
    needs: str = "records"  # what `draw` takes: these, or the "folders" given, or also the files that "models" need


def _chart(function: str, help: str, needs: str = "records") -> Chart:
    """A chart of this package, by `module:function`; the module, slow to import, is imported when it draws."""
    return Chart(lambda *given: resolve_name(f"fedcli.figures.{function}")(*given), help, needs)


CHARTS = {
    "curves": _chart(
        "curves:learning_curves", "test accuracy over rounds; runs that differ only in the seed are a line with a band"
    ),
    "drift": _chart("curves:drift_figure", "how far the clients' models drift apart, of runs with --drift-every"),
    "domains": _chart("curves:domains_figure", "accuracy of the clients' models on their own and on other domains"),
    "accuracies": _chart("curves:accuracies_figure", "test accuracy of each client after the last round, sorted"),
    "tsne": _chart("outputs:embedding_chart", "features of test images by t-SNE, after 'fedcli quality'", "folders"),
    "clients": _chart(
        "outputs:clients_chart", "features of the clients' own models, after 'fedcli quality --clients'", "folders"
    ),
    "confusion": _chart(
        "outputs:confusion_chart", "what the test images of each class are taken for, after 'fedcli quality'", "folders"
    ),
    "correlation": _chart(
        "outputs:correlation_chart", "how alike logits of personal models are on public and on private images", "models"
    ),
}


def find_chart(name: str) -> Chart:
    """The kind of figure of that name, or a user's own, `./file.py:NAME`, which is given the records.

    Raises:
        UserError: If there is none; of a user's own also when it is drawn and does not return a figure.
    """
    if not is_from_file(name):
        if name not in CHARTS:
            raise unknown("chart", name, CHARTS, f"there are {', '.join(CHARTS)}, and your own by ./file.py:NAME.")
        return CHARTS[name]
    function = from_file(name, "chart")

    def draw(records: list[dict]) -> Any:
        import matplotlib.figure

        with matplotlib.rc_context({"text.parse_math": True}):  # in names of ours a dollar sign is one
            figure = function(records)
        if not isinstance(figure, matplotlib.figure.Figure):
            raise function.refuse(f"is no chart (it returned {type(figure).__name__})", "return a matplotlib Figure")
        return figure

    return Chart(draw, function.name)
