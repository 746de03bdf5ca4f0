"""What a method file and a paper file declare, each idea in a module of its own."""

from fedcli.declarations.claims import Claim, Control
from fedcli.declarations.costs import Costs, Sizes, both_ways, params_both_ways, rows_by_class
from fedcli.declarations.methods import Method, Post
from fedcli.declarations.names import flag_of, paper_of
from fedcli.declarations.options import (
    START,
    JoinedConfigs,
    OptionSpec,
    check_value,
    fields_of,
    in_declared_type,
    join_configs,
    option,
    spec_of,
)
from fedcli.declarations.protocols import SELECTIONS, DataSetting, Protocol, PublicSetting
from fedcli.declarations.tables import Cell, Gain, Row, Table, column, grid, row

__all__ = [
    "SELECTIONS", "START", "Cell", "Claim", "Control", "Costs", "DataSetting", "Gain", "JoinedConfigs", "Method",
    "OptionSpec", "Post", "Protocol", "PublicSetting", "Row", "Sizes", "Table", "both_ways", "check_value", "column",
    "fields_of", "flag_of", "grid", "in_declared_type", "join_configs", "option", "paper_of", "params_both_ways", "row",
    "rows_by_class", "spec_of",
]  # fmt: skip
