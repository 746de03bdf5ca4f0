"""The command `check`."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from fedcli import registry
from fedcli.cli.options import Device, argument, optional
from fedcli.cli.printing import print_table, say, show_traceback
from fedcli.errors import UserError

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.check import Failure, Finding, Law
    from fedcli.declarations import Method


def check(
    ctx: typer.Context,
    methods: argument(list[str] | None, "METHOD|FILE", "Methods or files; by default one of each kind.") = None,
    device: Device = "auto",
    law: optional(list[int], "A law to check, 1 to 7 or 9; may be repeated.") = None,
    all_: optional(bool, "Check every method; takes minutes.", "--all") = None,
) -> None:
    """Check that methods, also your own, obey the laws of all methods, on small random images in float64.

    1: switched off, a method equals the simpler one. 2: switched on, it differs. 3: stored client states are read.
    4: training clients together equals one by one. 5: client order does not matter. 6: edge cases give finite numbers.
    7: a resumed run equals an uninterrupted one. 9: what is sent is what is declared.
    Variants that a named method declares are checked too. Exit code 1 if a law is broken.
    """
    from fedcli.check import LAWS
    from fedcli.check import check as hold_to_law
    from fedcli.runs.resolve import find_device

    if methods and all_:
        raise UserError(f"--all checks every method (got {', '.join(methods)} beside it); leave --all or these out.")
    numbers = law or list(LAWS)
    for number in sorted(numbers):
        if number not in LAWS:
            raise UserError(f"unknown law {number}; 'fedcli check --help' says what they are.")
    chosen = _methods_to_check(methods, bool(all_))
    device = str(find_device(device))
    outcomes = []
    with Console(stderr=True).status("") as status:
        for method, number in product(chosen, numbers):
            law_of_number = LAWS[number]
            status.update(escape(f"{method.name}: {law_of_number.measure.__name__.replace('_', ' ')}"))
            findings = hold_to_law(method, number, device)
            outcome = Outcome(method=method.name, number=number, law=law_of_number, findings=findings)
            _say_broken(ctx, outcome)
            outcomes.append(outcome)
    rows = list(chain.from_iterable(outcome.rows() for outcome in outcomes))
    print_table(("Checked", "Law", "Compared", "Figure", "Tolerance", ""), rows)
    counts = Counter(outcome.verdict for outcome in outcomes)
    left_out = f"; {counts['left out']} left out, see above" if counts["left out"] else ""
    typer.echo(f"{counts['holds']} of {counts['holds'] + counts['broken']} laws hold on {device}{left_out}.")
    raise typer.Exit(1 if counts["broken"] else 0)


def _methods_to_check(names: list[str] | None, is_all: bool) -> "list[Method]":
    """Find the methods of these names and their variants; without names one of each kind, or all methods."""
    from fedcli.check import one_of_each_kind, variants_of

    named = [registry.find_method(name) for name in names or registry.methods()]
    if names:
        return [*named, *chain.from_iterable(map(variants_of, named))]
    return named if is_all else one_of_each_kind()


class Outcome(NamedTuple):
    """What came out where a method was held to a law."""

    method: str
    number: int  # of the law
    law: "Law"
    findings: "list[Finding | Failure]"  # none where the method does not declare what the law needs

    @property
    def broken(self) -> "list[Finding | Failure]":
        """The findings that break the law."""
        return [finding for finding in self.findings if not finding.holds]

    @property
    def verdict(self) -> str:
        """One of "left out", "broken" and "holds"."""
        if not self.findings:
            return "left out"
        return "broken" if self.broken else "holds"

    def rows(self) -> Iterator[tuple]:
        """Make its rows of the table."""
        if not self.findings:
            compared = "nothing" if self.law.need is None else f"nothing, without {self.law.need.name}"
            yield (self.method, self.number, compared, "", "", "left out")
        for finding in self.findings:
            yield (self.method, self.number, *_cells(finding))


def _cells(finding: "Finding | Failure") -> tuple[str, str, str, str]:
    """Make the cells of what was compared, the figure, its tolerance and the verdict."""
    from fedcli.check import Failure

    if isinstance(finding, Failure):
        return (finding.label, "error", "", "FAIL")
    verdict = "pass" if finding.holds else "FAIL"
    return (finding.label, f"{finding.figure:.1e}", finding.tolerance, verdict)


def _say_broken(ctx: typer.Context, outcome: Outcome) -> None:
    """Print how a law is broken, with the traceback of an error where it is asked for."""
    from fedcli.check import Failure

    for finding in outcome.broken:
        say(f"{outcome.method}, law {outcome.number}: {finding}", err=True)
        if isinstance(finding, Failure):
            show_traceback(ctx, finding.error)
