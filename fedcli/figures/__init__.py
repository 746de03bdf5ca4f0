"""Figures from records and finished runs, and the kinds of `fedcli plot`."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from fedcli.errors import unknown
from fedcli.userfiles import from_file, is_from_file

# By kind, `fedcli plot --kind NAME`: the function that draws it from records, each with its `folder`, and what it
# shows. Its module, slow to import, is imported when it draws.
CHARTS = {
    "curves": (
        "plots:learning_curves", "test accuracy over rounds; runs that differ only in the seed are a line with a band"
    ),
    "drift": ("plots:drift_figure", "how far the clients' models drift apart, of runs with --drift-every"),
    "domains": ("plots:domains_figure", "accuracy of the clients' models on their own and on other domains"),
    "accuracies": ("plots:accuracies_figure", "test accuracy of each client after the last round, sorted"),
    "tsne": ("features:features_chart", "features of test images by t-SNE, after 'fedcli quality'"),
    "clients": ("features:clients_chart", "features of the clients' own models, after 'fedcli quality --clients'"),
    "confusion": (
        "features:confusion_chart", "what the test images of each class are taken for, after 'fedcli quality'"
    ),
    "correlation": (
        "features:correlation_chart", "how alike logits of personal models are on public and on private images"
    ),
}  # fmt: skip
# What curves show, `fedcli plot --y NAME`: a column of `rounds_of`, its label, and what to do where no run has it.
CURVES = {
    "accuracy": (
        "test_accuracy", "Test accuracy (%)",
        "wait for a round to end, or use --x round, as seconds beside other work do not count",
    ),
    "validation": ("validation_accuracy", "Validation accuracy (%)", "run with --validation 0.1"),
    "global": ("global_accuracy", "Accuracy of the global model (%)", "draw runs of methods that have both models"),
    "macro-f1": ("macro_f1", "Macro-F1 (%)", "run with --per-class"),
    "balanced-accuracy": ("balanced_accuracy", "Balanced accuracy (%)", "run with --per-class"),
}  # fmt: skip
WITH_LINES = ("curves", "drift", "domains", "accuracies")  # kinds whose colours, names and legend can be chosen


def find_chart(name: str) -> Callable[..., Any]:
    """Returns what draws a kind of figure, or a user's own one, `./file.py:NAME`, from records.

    Raises:
        UserError: If there is none; of a user's own also when it is drawn and does not return a figure.
    """
    if not is_from_file(name):
        if name not in CHARTS:
            raise unknown("chart", name, CHARTS, f"there are {', '.join(CHARTS)}, and your own by ./file.py:NAME.")
        return resolve_name(f"fedcli.figures.{CHARTS[name][0]}")
    function = from_file(name, "chart")

    def draw(records: list[dict]) -> Any:
        import matplotlib.figure

        with matplotlib.rc_context({"text.parse_math": True}):  # off in our figures, whose names may have a dollar sign
            figure = function(records)
        if not isinstance(figure, matplotlib.figure.Figure):
            raise function.refuse(f"is no chart (it returned {type(figure).__name__})", "return a matplotlib Figure")
        return figure

    return draw
