"""The laws of `fedcli.check` as tests hold them: law 4 also against the plain loop of `tests.reference`."""

from functools import partial

from fedcli import check
from fedcli.check import (
    RELATIVE,
    Broken,
    distance,
    law_1_off_is_the_simpler_method,
    law_2_on_is_not,
    law_3_state_survives,
    law_5_order_is_invisible,
    law_6_edge_data,
    law_7_resume_is_invisible,
    law_9_costs_are_what_is_sent,
    model_of,
    simulate,
    toy_dataset,
    toy_parts,
    variants_of,
    with_defaults,
)
from tests.reference import ReferenceFederation

__all__ = [
    "Broken", "assert_agree", "distance", "federation", "keeps", "law_1_off_is_the_simpler_method", "law_2_on_is_not",
    "law_3_state_survives", "law_4_chunking_is_invisible", "law_5_order_is_invisible", "law_6_edge_data",
    "law_7_resume_is_invisible", "law_9_costs_are_what_is_sent", "model_of", "simulate", "toy_dataset", "toy_parts",
    "variants_of", "with_defaults",
]  # fmt: skip

law_4_chunking_is_invisible = partial(check.law_4_chunking_is_invisible, against=ReferenceFederation)
NORMED = f"{check.__file__}:normed"  # a small network with BatchNorm


def keeps(method) -> bool:
    """Whether its clients keep something between rounds, so that law 3 has a say."""
    return any(kind.__name__ == "ClientState" for kind in method.state_types)


def federation(method, overrides=None, *, reference=False, **run):
    """A setup and its federation on toy data, whose clients train by the plain loop where `reference`."""
    return check.federation(method, overrides, kind=ReferenceFederation if reference else None, **run)


def assert_agree(tree, other, what: str) -> None:
    assert distance(tree, other) <= RELATIVE, f"{what}: relative distance {distance(tree, other):.2e}"
