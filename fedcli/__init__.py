"""fedcli: federated-learning papers, reproduced.

`fedcli.run(METHOD, dataset="digits")` is `fedcli run METHOD` from Python; a method file imports `Method`, `Protocol`,
`DataSetting` and `option` from here. `fedcli.load(RUN).model()` is a trained model.
"""

from fedcli.errors import UserError
from fedcli.registry import Cell, Claim, DataSetting, Gain, Method, Post, Protocol, PublicSetting, Table, grid, option

__all__ = [
    "Cell",
    "Claim",
    "DataSetting",
    "Gain",
    "Method",
    "Post",
    "Protocol",
    "PublicSetting",
    "Table",
    "UserError",
    "grid",
    "load",
    "option",
    "run",
]


def run(method: str, **options):
    """Runs a method; see `fedcli.runs.run`, which this is."""
    from fedcli.runs.run import run as run_  # late: a method file imports this module before the engine exists

    return run_(method, **options)


def load(path, method=()):
    """Opens a run; see `fedcli.runs.run.load`, which this is."""
    from fedcli.runs.run import load as load_

    return load_(path, method)
