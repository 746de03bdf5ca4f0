"""The options that several commands have, each declared once; how values are read, and how a shell completes them."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option
from typer.core import TyperCommand

from fedcli.cli.describe import index
from fedcli.declarations import flag_of
from fedcli.errors import UserError
from fedcli.runs.signals import set_time_limit

MACHINE, OUTPUT = {"rich_help_panel": "Machine"}, {"rich_help_panel": "Output"}

Seeds = Annotated[str | None, Option(help="Several seeds, a run each, e.g. 0,1,2.", **MACHINE)]
Jobs = Annotated[int | None, Option(help="Runs at once; each of several is a process of its own.", **MACHINE)]
Workers = Annotated[
    int | None, Option(help="Divide each round among so many processes of this machine; the same bits.", **MACHINE)
]
On = Annotated[
    str | None, Option(help="ray or ray:ADDRESS: every run a task of Ray; folders are on shared storage.", **MACHINE)
]
Cpus = Annotated[
    float | None, Option("--cpus-per-run", help="With --on ray: cores for a run, 1 if not given.", **MACHINE)
]
Gpus = Annotated[
    float | None, Option("--gpus-per-run", help="With --on ray: GPUs for a run; 0.25 packs four on one.", **MACHINE)
]
TimeLimit = Annotated[
    str | None, Option(help="Time after which runs end at a checkpoint, to go on later: 9m, 2h, 1h30m, 90.", **MACHINE)
]
LogFile = Annotated[str | None, Option(help="File to which the lines of the run are added, without the bar.", **OUTPUT)]
Quiet = Annotated[bool | None, Option("--quiet", help="Print nothing but errors.", **OUTPUT)]
Log = Annotated[
    str | None,
    Option(help="Where each round's numbers go too: tensorboard, wandb, ./file.py:NAME, or several.", **OUTPUT),
]
Runs = Annotated[list[Path], Argument(metavar="RUN", help="Run folders, or folders that hold run folders.")]
Code = Annotated[
    list[str] | None,
    Option("--method", help="File of yours that a run needs, as method or part; no other is imported."),
]
Methods = Annotated[list[str] | None, Option("--method", help="Only runs of this method; several times for several.")]
Datasets = Annotated[
    list[str] | None, Option("--dataset", help="Only runs on this data set; several times for several.")
]
Labels = Annotated[
    list[str] | None, Option("--label", help="What the runs of a RUN are called; once for each, in order.")
]
Client = Annotated[int | None, Option(help="Whose own model, where each client keeps one; else the global model.")]
Format = Annotated[Literal["markdown", "csv", "latex"], Option(help="Form of the table.")]


class Command(TyperCommand):
    """A command that refuses an option given twice, and knows what other toolkits call ours."""

    def unknown(self, flag: str) -> UserError | None:
        """Make the error for an option that there is not; None where Typer's own says enough."""
        from fedcli.runs.config import meant_option

        guess = meant_option(flag, {}, [parameter.name for parameter in self.params])
        return guess and UserError(f"unknown option {flag}; did you mean {flag_of(guess)}? See --help.")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments after having looked for such mistakes."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        try:
            *_, given = self.make_parser(ctx).parse_args(args=list(args))
        except Exception as error:
            if not getattr(error, "option_name", "").startswith("--") or not hasattr(error, "possibilities"):
                raise
            raise self.unknown(error.option_name) or error from error
        for parameter in given:
            if given.count(parameter) > 1 and not getattr(parameter, "multiple", True):
                raise UserError(f"{parameter.opts[0]} is given twice; give it once.")
        return super().parse_args(ctx, args)


def completion(*kinds: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Make what tells a shell the choices that a text begins, and the names of some kinds: "method", "dataset", ..."""

    def complete(incomplete: str) -> list[str]:
        names = list(choices)
        for kind in kinds:
            if kind.endswith("dataset"):
                from fedcli.data import datasets

                names += datasets.names()
            names += index().get(kind, ())
        return [name for name in names if name.startswith(incomplete.lower())]

    return complete


def parse_seeds(seeds: Any) -> Any:
    """Read the seeds of `--seeds 0,1,2`; what is no text, or a part that is no number, is checked with the others."""
    if not isinstance(seeds, str):
        return seeds
    return [int(part) if re.fullmatch(r"\s*-?[0-9]{1,30}\s*", part) else part for part in seeds.split(",")]


def limit_time(limit: str | int | None) -> None:
    """Read a `--time-limit`, which counts from now; None for none."""
    if limit is not None:
        text = f"{limit}s" if str(limit).isdecimal() else str(limit)
        parts = re.fullmatch(r"(?=.)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", text)
        if parts is None:
            raise UserError(f"--time-limit must be a time (got '{limit}'); write 90s, 9m, 2h, 1h30m or seconds.")
        hours, minutes, seconds = map(int, parts.groups("0"))
        set_time_limit(3600 * hours + 60 * minutes + seconds)


def place_runs(jobs: Any, on: str | None, cpus: float | None, gpus: float | None) -> dict[str, Any]:
    """Read `--jobs`, `--on`, `--cpus-per-run` and `--gpus-per-run` as `jobs.execute` takes them."""
    jobs = 1 if jobs is None else jobs
    if type(jobs) is not int or jobs < 1:
        raise UserError(f"--jobs must be a whole number from 1 (got {jobs}); 1 runs one after the other.")
    if on is None and (cpus, gpus) == (None, None):
        return {"jobs": jobs, "cluster": None}
    name, _, address = str(on).partition(":")
    if name != "ray" or jobs > 1:
        raise UserError(
            f"--on must be ray or ray:ADDRESS, without --jobs, where --cpus-per-run or --gpus-per-run is given (got "
            f"--on {on}, --jobs {jobs}); write --on ray."
        )
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs Ray (got no module 'ray'); pip install 'fedcli[ray]' brings it.")
    for flag, value in (("--cpus-per-run", cpus), ("--gpus-per-run", gpus)):
        if value is not None and (value < 0 or (value > 1 and value % 1)):
            raise UserError(f"{flag} must be a part of one or a whole number (got {value:g}); write 0.25, 1 or 2.")
    cluster = {"address": address or None, "num_cpus": 1.0 if cpus is None else cpus, "num_gpus": gpus or 0.0}
    return {"jobs": 1, "cluster": cluster}
