"""The options that commands share, and how their values are read."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedcli.errors import UserError, import_optional
from fedcli.runs.signals import set_time_limit

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.results.jobs import RayCluster

LONGEST_RANGE = 1000  # seeds of a range
MACHINE = "Machine"  # panels of the help
OUTPUT = "Output"
GRID = "Grid"


def optional(kind: Any, help: str, *flags: str, panel: str | None = None, **traits: Any) -> Any:
    """Make the type of an option; without flags it has the name of its parameter."""
    return Annotated[kind | None, typer.Option(*flags, help=help, rich_help_panel=panel, **traits)]


comma_lists: set[str] = set()  # the flags of `comma_list`


def comma_list(kind: Any, help: str, flag: str, **traits: Any) -> Any:
    """Make the type of an option whose values stand with commas between them, so that it is given once."""
    comma_lists.add(flag)
    return optional(kind, help, flag, **traits)


def argument(kind: Any, metavar: str, help: str, **traits: Any) -> Any:
    """Make the type of an argument."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=help, **traits)]


def given_flags(ctx: typer.Context, concerns: Callable[[Any], bool]) -> list[str]:
    """List the flags that the command line gives of the options that this concerns, options as Typer has them."""
    flags = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and concerns(option):
            flag, *_ = option.opts
            flags.append(flag)
    return flags


def refuse_twice(args: Sequence[str], flag: str, several: str | None) -> None:
    """Refuse an option that is given twice, with its values in one where it takes several.

    Args:
        args: The words of the command line.
        flag: The option.
        several: The option that takes several values with commas between them; None for none.
    """
    from fedcli.runs.options import options_among

    values = [typed.value for typed in options_among(args) if typed.flag == flag]
    if len(values) < 2:
        return
    remedy = f"write {several} {','.join(values)}" if several else "give it once"
    raise UserError(f"{flag} is given twice; {remedy}.")


def parse_seeds(text: str) -> list[Any]:
    """Read the seeds of `--seeds 0,1,2` or `--seeds 0-2`; `check_seeds` refuses a part that is neither.

    A range has both its ends, the smaller first, and at most a thousand seeds.
    """
    seeds: list[Any] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,30})\s*(?:-\s*([0-9]{1,30})\s*)?", part)
        if ends is None:
            seeds.append(part)
            continue
        first, last = ends.groups()
        if last is None:
            seeds.append(int(first))
        elif 0 <= int(last) - int(first) < LONGEST_RANGE:
            seeds += range(int(first), int(last) + 1)
        else:
            seeds.append(part)
    return seeds


def parse_seconds(text: str, flag: str) -> int:
    """Read a time such as 90s, 9m, 2h, 1h30m or seconds, the value of an option; refuse any other."""
    parts = re.fullmatch(r"(?=.)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s?)?", text)
    if parts is None:
        raise UserError(f"{flag} must be a time (got '{text}'); write 90s, 9m, 2h, 1h30m or seconds.")
    hours, minutes, seconds = map(int, parts.groups("0"))
    return 3600 * hours + 60 * minutes + seconds


def limit_time(text: str | None) -> str | None:
    """Start the time of `--time-limit` when it is read, so that what a command prepares counts as well."""
    if text is not None:
        set_time_limit(parse_seconds(text, "--time-limit"))
    return text


Seeds = comma_list(
    Any, "Seeds, a run for each, e.g. 0,1,2 or 0-2.", "--seeds", panel=MACHINE, parser=parse_seeds, metavar="TEXT"
)
Jobs = optional(int, "Parallel runs, each in a process of its own.", panel=MACHINE, min=1)
Workers = optional(int, "Processes that share each round; the bits stay the same.", panel=MACHINE, min=1)
On = optional(str, "ray or ray:ADDRESS: every run a task of Ray, in a shared folder.", panel=MACHINE)
Cpus = optional(float, "With --on ray: cores for a run; 1 by default.", panel=MACHINE, min=0)
Gpus = optional(float, "With --on ray: GPUs for a run; 0.25 packs four on one.", panel=MACHINE, min=0)
TimeLimit = optional(str, "Stop at a checkpoint after 90s, 9m or 1h30m.", panel=MACHINE, callback=limit_time)
LogFile = optional(Path, "File to append the output to.", panel=OUTPUT)
Quiet = optional(bool, "Print nothing but errors.", "--quiet", panel=OUTPUT)
Log = comma_list(
    str, "Log each round to tensorboard, wandb or ./file.py:NAME, or several of them.", "--log", panel=OUTPUT
)
Device = optional(str, "auto, cpu, cuda or cuda:N.")
Set = optional(
    list[str], "One method's option, e.g. fedprox:proximal-weight=0.1; may be repeated.", "--set", panel=GRID,
    metavar="METHOD:OPTION=VALUE",
)  # fmt: skip
CodeFiles = optional(list[str], "A Python file of yours that the run needs; no other is imported.", "--method")
Datasets = optional(list[str], "Only runs on this data set; repeat it for several.")
Labels = optional(list[str], "Name for the runs of a RUN; one for each RUN.")
Client = optional(int, "Client whose own model to use, not the global one.")
Runs = argument(list[Path], "RUN", "Run folders, or folders that hold run folders.")
Format = optional(Literal["markdown", "csv", "latex"], "Form of the table.")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the runs of a plan are trained.

    Attributes:
        jobs: Runs at once on this machine, each in a process of its own where there are several.
        cluster: To run on Ray instead.
    """

    jobs: int = 1
    cluster: "RayCluster | None" = None

    @property
    def one_by_one(self) -> bool:
        """Whether they run one after the other in this process."""
        return self.jobs == 1 and self.cluster is None


ONE_BY_ONE = Placement()


def place_runs(jobs: int | None, on: str | None, cpus: float | None, gpus: float | None) -> Placement:
    """Read `--jobs`, `--on`, `--cpus-per-run` and `--gpus-per-run`."""
    jobs = jobs or 1
    if on is None and cpus is None and gpus is None:
        return Placement(jobs=jobs)
    if on is None:
        raise UserError("--cpus-per-run and --gpus-per-run are for Ray (got no --on); add --on ray, or leave them out.")
    name, _, address = on.partition(":")
    if name != "ray":
        raise UserError(f"--on must be ray or ray:ADDRESS (got --on {on}); write --on ray.")
    if jobs > 1:
        raise UserError(f"--on {on} begins a run whenever a node is free (got --jobs {jobs}); leave one of them out.")
    import_optional("ray", "--on ray", "ray")
    for flag, value in {"--cpus-per-run": cpus, "--gpus-per-run": gpus}.items():
        if value is not None and value > 1 and value % 1:
            raise UserError(f"{flag} must be a part of one or a whole number (got {value:g}); write 0.25, 1 or 2.")
    from fedcli.results.jobs import RayCluster  # late, as it imports PyTorch

    num_cpus = 1.0 if cpus is None else cpus
    return Placement(cluster=RayCluster(address=address or None, num_cpus=num_cpus, num_gpus=gpus or 0.0))


def records_of(runs: Sequence[Any], methods: list | None, datasets: list | None, labels: list | None) -> list[dict]:
    """Read the records of runs that `--method`, `--dataset` and `--label` choose and name."""
    from fedcli.results.groups import select_records
    from fedcli.results.run_records import find_records

    records = find_records(runs, labels or ())
    return select_records(records, methods or (), datasets or ())
