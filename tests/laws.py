"""The laws of `fedcli.check` as tests hold them: one that does not hold raises; law 4 has a plain loop beside it."""

from functools import wraps

import fedcli.check
from fedcli.check import *  # noqa: F403
from fedcli.check import RELATIVE, distance
from tests.reference import ReferenceFederation

NORMED = f"{fedcli.check.__file__}:normed"  # a small network with BatchNorm


class Broken(Exception):
    """A law does not hold."""


def raising(law, **options):
    """The law with these options, which raises `Broken` where it does not hold."""

    @wraps(law)
    def held(*arguments, **more):
        findings = law(*arguments, **options, **more)
        broken = [str(finding) for finding in findings if not finding.holds]
        if broken:
            raise Broken("; ".join(broken))
        return findings

    return held


for name in [name for name in vars(fedcli.check) if name.startswith("law_")]:
    globals()[name] = raising(vars(fedcli.check)[name])
law_4_chunking_is_invisible = raising(fedcli.check.law_4_chunking_is_invisible, against=ReferenceFederation)


def federation(method, overrides=None, *, reference=False, **run):
    """A setup and its federation on toy data, whose clients train by the plain loop where `reference`."""
    return fedcli.check.federation(method, overrides, kind=ReferenceFederation if reference else None, **run)


def assert_agree(tree, other, what: str) -> None:
    assert distance(tree, other) <= RELATIVE, f"{what}: relative distance {distance(tree, other):.2e}"
