"""Methods whose options have other defaults, so that the laws can be held against a form that is not the default."""

import dataclasses

from fedcli.declarations import Method
from tests import laws


def with_defaults(method: Method, **defaults) -> Method:
    """The method with these defaults of its own options."""
    fields = []
    for own in dataclasses.fields(method.config):
        default = defaults.get(own.name, own.default)
        fields.append((own.name, own.type, dataclasses.field(default=default, metadata=own.metadata)))
    return dataclasses.replace(method, config=dataclasses.make_dataclass("Config", fields, frozen=True))


def assert_laws(method: Method, **defaults) -> None:
    """Laws 1 to 6 for the method with these defaults; the third where its clients keep something."""
    method = with_defaults(method, **defaults)
    laws.law_1_off_is_the_simpler_method(method)
    laws.law_2_on_is_not(method)
    if laws.keeps(method):
        laws.law_3_state_survives(method)
    laws.law_4_chunking_is_invisible(method, chunks=(1, 2, 4, "branches:4"))
    laws.law_5_order_is_invisible(method)
    for chunk in (1, 4):
        laws.law_6_edge_data(method, chunk)
