"""fedcli: methods of federated-learning papers, implemented and compared.

`fedcli.run("fedavg", dataset="digits")` is `fedcli run fedavg --dataset digits` from Python; a method file imports
`Method`, `Protocol`, `DataSetting` and `option` from here. `fedcli.load(RUN).model()` is a trained model.
"""

import os

# Before PyTorch is loaded: limit OpenMP's spinning, which starves other processes. A waiting thread looks 300,000 times
# before it sleeps, which makes a small operation ten times as long where another program has a core.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from fedcli.api import frame, load, run, tune
from fedcli.declarations import (
    Cell,
    Claim,
    Control,
    Costs,
    DataSetting,
    Gain,
    Method,
    Post,
    Protocol,
    PublicSetting,
    Row,
    Table,
    both_ways,
    column,
    grid,
    join_configs,
    option,
    params_both_ways,
    row,
    rows_by_class,
)  # fmt: skip
from fedcli.errors import UserError

__all__ = [
    "Cell", "Claim", "Control", "Costs", "DataSetting", "Gain", "Method", "Post", "Protocol", "PublicSetting", "Row",
    "Table", "UserError", "both_ways", "column", "frame", "grid", "join_configs", "load", "option", "params_both_ways",
    "row", "rows_by_class", "run", "tune",
]  # fmt: skip
