"""Figures from records and from finished runs, and the kinds of them that `fedcli plot` knows."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from fedcli.errors import unknown
from fedcli.userfiles import from_file, is_from_file


class Chart(NamedTuple):
    """A kind of figure of runs, `fedcli plot --kind NAME`.

    Attributes:
        draw: From the runs to the matplotlib Figure.
        help: What it shows, one line.
        needs: What `draw` takes: the "records" of the runs; or, where a figure needs more of them, the "folders" given;
            or the folders and the user's files that their "models" need.
    """

    draw: Callable[..., Any]
    help: str
    needs: str = "records"


def _late(module: str, function: str) -> Callable[..., Any]:
    """A function of this package whose module, slow to import, is imported when it draws."""
    return lambda *given: getattr(import_module(f"fedcli.figures.{module}"), function)(*given)


_QUALITY = "after 'fedcli quality'"
CHARTS = {
    "curves": Chart(
        _late("curves", "learning_curves"),
        "test accuracy over rounds; runs that differ only in the seed are one line with a band",
    ),
    "drift": Chart(
        _late("curves", "drift_figure"), "how far the clients' models drift apart, of runs with --drift-every"
    ),
    "domains": Chart(
        _late("curves", "domains_figure"), "accuracy of the clients' models on their own and on the other domains"
    ),
    "tsne": Chart(
        _late("features", "embedding_chart"),
        f"features of test images by t-SNE, a panel a setting, {_QUALITY}",
        "folders",
    ),
    "clients": Chart(
        _late("features", "clients_chart"),
        "features of the clients' own models, after 'fedcli quality --clients'",
        "folders",
    ),
    "confusion": Chart(
        _late("matrices", "confusion_chart"), f"what the test images of each class are taken for, {_QUALITY}", "folders"
    ),
    "correlation": Chart(
        _late("matrices", "correlation_chart"),
        "how alike the logits of personal models are, on public and on private images",
        "models",
    ),
}


def charts() -> dict[str, Chart]:
    """The kinds of figures of runs by name."""
    return CHARTS


def find_chart(name: str) -> Chart:
    """The kind of figure of that name, or a user's own, `./file.py:NAME`, which is given the records.

    Raises:
        UserError: If there is none; of a user's own also when it is drawn and does not return a figure.
    """
    if not is_from_file(name):
        if name not in CHARTS:
            raise unknown("chart", name, CHARTS, f"there are {', '.join(CHARTS)}, and your own by ./file.py:NAME.")
        return CHARTS[name]
    own = from_file(name, "chart")

    def draw(records: list[dict]) -> Any:
        figure = own(records)
        if not isinstance(figure, import_module("matplotlib.figure").Figure):
            raise own.refuse(f"is no chart (it returned {type(figure).__name__})", "return a matplotlib Figure")
        return figure

    return Chart(draw, own.name)
