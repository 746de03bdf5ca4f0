"""The commands that run methods: `run`, `resume`, `verify`, `tune`, `smoke`, `bench` and `check`."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, make_dataclass
from functools import partial
from itertools import product
from json import dumps
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from fedcli import registry
from fedcli.cli import common
from fedcli.cli.common import OUTPUT, NoSuchOption, argument, optional, print_table, refuse_twice
from fedcli.cli.describe import completion, find_summary, index, option_help
from fedcli.declarations import flag_of
from fedcli.errors import UserError, unknown
from fedcli.runs.signals import exit_code
from fedcli.userfiles import is_from_file, user_files

if TYPE_CHECKING:  # they import PyTorch, which help does not need
    from fedcli.cli.display import Display
    from fedcli.results.plans import Plan

FILES = "Options from files"  # panels of the help
GRID = "Grid"
Device = optional(str, "auto, cpu, cuda or cuda:N.")
Set = optional(
    list[str], "One method's option, e.g. fedprox:proximal-weight=0.1; may be repeated.", "--set", panel=GRID,
    metavar="METHOD:OPTION=VALUE",
)  # fmt: skip


class MethodCommand(TyperCommand):
    """A command, `run` or `tune`, that has the options of the method that it is given, beside its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in what `--config` and `--from` stand for; take underscores for dashes; collect the method's options."""
        ctx.meta["options"] = []
        if not args or args[0] in ("-h", "--help"):
            ctx.meta["given"] = {}
            return super().parse_args(ctx, args)
        from fedcli.runs.options import typed_options, unknown_option
        from fedcli.runs.sources import expand

        typed = [re.sub(r"^--\w+(?==|$)", _with_dashes, word) for word in args]
        expanded, ctx.meta["sources"] = expand(typed, ctx.info_name)
        names = expanded[0].split(",")
        post = typed_options(expanded).get("post")
        steps = index()["post"]
        methods = [find_summary(name) for name in names]
        if is_from_file(names[0]) or is_from_file(post or ""):
            steps = registry.posts(registry.find_method(names[0]), post)
        options = make_options(methods, steps)
        ctx.meta["options"] = options
        for option in options:
            _refuse_two_values(option, typed)
        try:
            rest = super().parse_args(ctx, expanded)
        except NoSuchOption as error:
            raise unknown_option(error.option_name, methods[0], steps, post, methods[1:]) from error
        values = {option.name: ctx.params.pop(option.name) for option in options}
        ctx.meta["given"] = {name: value for name, value in values.items() if value is not None}
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """List the options of the method before those of the command."""
        return [*ctx.meta.get("options", ()), *super().get_params(ctx)]


def _with_dashes(flag: re.Match) -> str:
    return flag[0].replace("_", "-")


def _refuse_two_values(option: Any, typed: Sequence[str]) -> None:
    """Refuse an option of a method that is typed twice."""
    flag = option.opts[0]
    if flag == "--seed":
        refuse_twice(typed, flag, "--seeds")
    else:
        takes_several = option.metavar == "VALUE"
        refuse_twice(typed, flag, flag if takes_several else None)


def make_options(methods: Sequence[Any], steps: Mapping[str, Any]) -> list[Any]:
    """Make the options of a run, of steps after it and of the methods.

    An option is None unless it is given; several values are a tuple. Where methods have an option of the same name,
    the help is that of the first.
    """
    from fedcli.runs.options import fields_of, option_panels

    panels = option_panels(methods[0], steps)
    names = {name for panel in panels.values() for name in panel}
    for method in methods[1:]:
        own = fields_of(method.config)
        panels[method.title] = {name: field for name, field in own.items() if name not in names}
        names |= own.keys()
    parameters = []
    for title, panel in panels.items():
        for field in panel.values():
            kind = _option(field, option_help(field, methods[0].defaults), title)
            parameters.append((field.name, kind, None))
    app = typer.Typer(add_completion=False)
    app.command()(make_dataclass("Options", parameters))
    return typer.main.get_command(app).params


def _option(field: Field, help: str, panel: str) -> Any:
    """Make the type of the option that a field describes."""
    choices = field.metadata["choices"]
    traits: dict[str, Any] = {"autocompletion": completion(field.name, choices=choices)}
    is_number = not {int, float}.isdisjoint({field.type, *get_args(field.type)})
    if choices or is_number:
        traits["parser"] = partial(_parse_values, field)
        traits["metavar"] = "<int>" if field.name == "seed" else "VALUE"
    flag = flag_of(field.name)
    if field.type is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    return optional(field.type, escape(help), flag, panel=escape(panel), show_default=False, **traits)


def _parse_values(field: Any, text: str) -> Any:
    """Read the values of an option, one or a tuple; `--checkpoint-every auto` is as if it were not given."""
    from fedcli.runs.options import parse_values

    if field.name == "checkpoint_every" and text == "auto":
        return None
    values = parse_values(field, text)
    if field.name == "seed" and len(values) > 1:
        raise UserError(f"--seed takes one seed (got '{text}'); write --seeds {text}.")
    return values if len(values) > 1 else values[0]


def run(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    method: argument(str, "METHOD", "A method or a method file.", autocompletion=completion("method")),
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    workers: common.Workers = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
    set_: Set = None,
    out: optional(str, "New folder; by default in runs/.", panel=OUTPUT) = None,
    continue_: optional(bool, "Go on in --out: skip ended runs, resume others.", "--continue", panel=OUTPUT) = None,
    log: common.Log = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    config: optional(str, "TOML file of options; typed ones override them.", panel=FILES) = None,
    from_: optional(str, "Run whose options to use; typed ones override them.", "--from", panel=FILES) = None,
    tuned: optional(str, "Folder of 'fedcli tune' whose best options to use.", panel=FILES) = None,
) -> None:
    """Run a method, by its name or by the path of a method file, or several with commas between them.

    Numeric and choice options take lists, e.g. --lr 0.01,0.1; every combination runs.
    Defaults are those of a run without options; another data set or protocol brings its own.
    'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols.
    """
    from fedcli.runs import begin
    from fedcli.runs.workers import launched

    names = method.split(",")
    settings = _settings_of_single(names, set_)
    options = {**ctx.meta["given"], "sources": ctx.meta["sources"]}
    if len(names) == 1:
        options |= settings.get(method, {})
    experiment = {"out": out, "tuned": tuned, "continue_": continue_}
    where = common.place_runs(jobs, on, cpus_per_run, gpus_per_run)
    is_grid = any(isinstance(value, tuple) for value in options.values())
    is_single = not where and not is_grid and seeds is None and len(names) == 1
    if is_single:
        if workers is not None:  # one folder for all workers; what is refused is so before they start
            [(_, folder)] = begin.resolve_runs(method, out=out, tuned=tuned, **options)
            launch_workers(workers, () if out else ("--out", str(folder)))
        watch(partial(begin.run_method, method, **experiment, **options), quiet, log_file, log, workers)
        return
    if workers is not None or launched():
        raise UserError("workers share one run (got several runs); leave --workers or the launcher out.")
    if log is not None and where:
        raise UserError(f"--log {log} is for runs one after the other (got --jobs or --on); leave one out.")
    from fedcli.results.plans import plan_grid

    plan = plan_grid(names, options, seeds=seeds, settings=settings, **experiment)
    errors = _run_grid(plan, where, quiet, log_file, log)
    raise typer.Exit(1 if errors else 0)


def _run_grid(
    plan: "Plan", where: Mapping[str, Any], quiet: bool | None, log_file: Path | None, log: str | None
) -> Mapping[Path, str]:
    """Run what is to do of a plan, and write and print the table and curves of its runs; returns what failed."""
    from fedcli.cli.plan_display import run_plan, warn_of_protocols
    from fedcli.results.frame import find_records
    from fedcli.results.render import render
    from fedcli.results.tables import sheet

    again = f"the same command with --out {shlex.quote(str(plan.folder))} --continue"
    warn_of_protocols(plan)
    errors = run_plan(plan, common.consoles(quiet, log_file, stderr=True), again, log, **where)
    records = find_records([plan.folder])
    text = render(sheet(records, leads=True))
    common.write_text(plan.folder / "table.md", text)
    from fedcli.figures.line_charts import learning_curves  # here, since it imports pandas and Matplotlib
    from fedcli.figures.saving import write_figure

    with suppress(UserError):  # no run has come to a test
        write_figure(plan.folder / "curves.png", learning_curves, records, page=True)
    if not quiet:
        common.print_text(text, is_markdown=True)
        common.say(f"table and curves: {plan.folder}, table.md and curves.png")
    return errors


def tune(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    method: argument(str, "METHOD", "A method or a method file.", autocompletion=completion("method")),
    grid: optional(
        list[str], "Values to try, e.g. lr=0.01,0.1, or fedprox:lr=0.1,1 for one method; may be repeated.", panel=GRID
    ) = None,
    trials: optional(int, "Trials of each method; those of the smallest grid by default.", panel=GRID, min=1) = None,
    set_: Set = None,
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
    out: optional(str, "Folder of the trials, by default in tuning/; none runs twice.", panel=OUTPUT) = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
) -> None:
    """Run a grid of options and choose by validation accuracy, never by test accuracy.

    Several methods, with commas between them, get the same number of trials; a larger grid is drawn from.
    All other options are the same in every trial; with several seeds, the mean counts.
    'fedcli run METHOD --tuned FOLDER' then uses what was chosen.
    """
    from fedcli.cli.plan_display import run_plan, warn_of_protocols
    from fedcli.results import tune
    from fedcli.results.comparison import find_methods
    from fedcli.runs.options import flags_of

    names = method.split(",")
    settings = _settings_of_single(names, set_)
    plan = tune.plan_trials(
        method, grid=grid or (), trials=trials, seeds=seeds, out=out, settings=settings, **ctx.meta["given"]
    )
    where = common.place_runs(jobs, on, cpus_per_run, gpus_per_run)
    warn_of_protocols(plan)
    for text in tune.samples(plan):
        common.say(f"{text}.", err=True)
    errors = run_plan(plan, common.consoles(quiet, log_file, stderr=True), records_only=True, **where)
    ranked = tune.rank(plan, errors)
    for name, of_method in ranked.groupby("method", sort=False):
        print_trials(name if len(names) > 1 else "", of_method)
    for text in tune.edges(find_methods(names), plan.grids, ranked):
        common.say(f"warning: {text}; try values beyond.", err=True)
    tuned = shlex.join(["--tuned", str(plan.folder)])
    if len(names) == 1:
        flags = shlex.join(flags_of(ranked["options"].iloc[0]))
        common.say(f"use {flags}, or {tuned} ({plan.folder / tune.TUNED})")
        return
    counts = ranked.groupby("method", sort=False).size()
    if counts.nunique() == 1:
        budget = f"{counts.iloc[0]} trials each"
    else:
        budget = "trials: " + ", ".join(f"{name} {count}" for name, count in counts.items())
    common.say(f"{budget}; use fedcli run {method} {tuned}")


def _settings_of_single(names: Sequence[str], set_: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Read `--set` as options of single methods, by their names; without it, nothing slow is imported."""
    if not set_:
        return {}
    from fedcli.results.comparison import single_settings

    return single_settings(names, set_)


def print_trials(name: str, trials: Any) -> None:
    """Print the trials of a method, the best first, with the mean and deviation of their validation accuracies."""
    from fedcli.results.metrics import find_metric

    mean_text = find_metric("validation").mean_text
    rows = []
    for trial in trials.itertuples():
        percent = [100 * accuracy for accuracy in trial.accuracies]
        has_diverged = isnan(trial.accuracy)
        rows.append([*trial.options.values(), "diverged" if has_diverged else mean_text(percent)])
    columns = [*map(flag_of, trials["options"].iloc[0]), "Validation accuracy, %"]
    if name:
        columns = ["Method", *columns]
        rows = [[name, *row] for row in rows]
    print_table(columns, rows)


def watch(
    start: Callable, quiet: bool | None = None, log_file: Path | None = None, log: str | None = None,
    workers: int | None = None,
) -> Any:  # fmt: skip
    """Start a run with a display, and loggers; when it fails or is interrupted, say where it stands.

    With one of `workers`, it shares its work with no process.
    """
    from fedcli.cli.display import Display, print_line
    from fedcli.core.federation import NonFiniteLoss
    from fedcli.runs.record import RECORD
    from fedcli.runs.trackers import Loggers
    from fedcli.runs.workers import joined

    consoles = common.consoles(quiet, log_file)
    (_, *log_files) = consoles
    display = Display(*consoles)
    try:
        with joined(forks=workers != 1) as group:
            is_first = group.number == 0
            return start(progress=Loggers(display, log) if is_first else None)
    except UserError as error:
        print_line(log_files, f"error: {error}")
        raise
    except NonFiniteLoss as error:
        assert display.folder is not None  # a loss is of a round, before which `start` has set it
        message = f"error: {error} The record is {display.folder / RECORD}."
        code = 1
    except KeyboardInterrupt as error:
        message = _interrupted_text(error, display)
        code = exit_code(error)
    print_line(log_files, message)
    common.stop(message, code)


def _interrupted_text(error: KeyboardInterrupt, display: "Display") -> str:
    """Say after which round a run was interrupted, and the command that goes on."""
    if display.folder is None:
        return "interrupted before the first round."
    words = ["fedcli", "resume", str(display.folder)]
    for file in user_files(display.record):
        words += ["--method", file]
    rounds = f"{len(display.record['rounds'])}/{display.record['config']['rounds']} rounds"
    return f"{str(error) or 'interrupted'} after {rounds}; to resume: {shlex.join(words)}"


def launch_workers(workers: int | None, words: Sequence[str] = ()) -> None:
    """Run this command with more `words` in several workers and end as the first does; go on if this is a worker."""
    from fedcli.runs.workers import launch, launched

    if workers in (None, 1) or launched():
        return
    command = [sys.executable, "-P", "-m", "fedcli", *sys.argv[1:], *words]
    raise typer.Exit(launch(workers, command))


def resume(  # noqa: PLR0913  # the parameters of a command are its options
    run: argument(Path, "RUN", "Folder of the run, or a folder of several."),
    method: common.Code = None,
    changed_method: optional(bool, "Resume although a file has changed.", "--changed-method") = False,
    workers: common.Workers = None,
    time_limit: common.TimeLimit = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    log: common.Log = None,
) -> None:
    """Resume a killed or interrupted run from its last checkpoint, or all such runs in a folder."""
    from fedcli.runs.resume import find_runs
    from fedcli.runs.resume import resume as resume_run

    launch_workers(workers)
    folders = find_runs(run, skip_ended=workers is not None)
    if workers is not None and len(folders) > 1:
        raise UserError(f"--workers {workers} is for one run (got {len(folders)} in '{run}'); name one of them.")
    if folders == [run]:
        start = partial(resume_run, run, method=method or (), changed_method=changed_method, skip_ended=False)
        watch(start, quiet, log_file, log, workers)
        return
    has_failed = False
    for folder in folders:
        start = partial(resume_run, folder, method=method or (), changed_method=changed_method, skip_ended=True)
        try:
            watch(start, quiet, log_file, log, workers)
        except UserError as error:
            common.say(f"error: '{folder}': {error}", err=True)
            has_failed = True
        except typer.Exit as error:
            if error.exit_code != 1:  # interrupted, or the time of all runs is over
                raise
            has_failed = True
    if not quiet:
        common.say(f"'{run}' may lack runs that had not begun; the command that made it starts them, with --continue")
    raise typer.Exit(1 if has_failed else 0)


def verify(
    record: argument(Path, "RECORD", "Folder or record.json of an ended run."),
    out: optional(Path, "Folder of the repetition; by default in runs/.") = None,
    device: optional(str, "Another device: cpu, cuda, cuda:N.") = None,
    method: common.Code = None,
    rounds: optional(int, "Compare only the first rounds.") = None,
) -> None:
    """Run a record again in a new folder, and compare partition, curve, end and parameters.

    Prints "same bits"; "same within x" on another machine or version; or what differs, with exit code 1.
    With --rounds, compares the curve so far and the terms ("same to the last digit"); --out keeps the repetition.
    """
    from fedcli.runs.verify import verify as verify_run

    start = partial(verify_run, record, out=out, method=method or (), device=device, rounds=rounds)
    comparison = watch(start)
    common.say(comparison.words)
    raise typer.Exit(0 if comparison.is_same else 1)


def smoke(only: optional(list[str], "A method to try; may be repeated.") = None) -> None:
    """Run every registered method for two rounds on built-in data, which needs no network.

    Exit code 1 if one of them fails. The accuracies say nothing of how good a method is.
    """
    from fedcli.cli.plan_display import run_plan
    from fedcli.results.plans import plan_grid

    small = {"rounds": 2, "train_examples": 240, "local_epochs": 2, "checkpoint_every": 2}
    with TemporaryDirectory() as folder:
        plan = plan_grid(only or list(registry.methods()), small, out=f"{folder}/runs")
        errors = run_plan(plan, common.consoles(None, None, stderr=True))
    typer.echo(f"{len(plan.runs) - len(errors)} of {len(plan.runs)} methods ran.")
    raise typer.Exit(1 if errors else 0)


def bench(  # noqa: PLR0913  # the parameters of a command are its options
    workloads: argument(list[str] | None, "WORKLOAD|METHOD", "See above; w1 and w2 if none is given.") = None,
    method: optional(str, "Name or file of a method.") = "fedavg",
    device: Device = "auto",
    precision: optional(str, "float32, float64, tf32 or bf16.") = "float32",
    clients_per_chunk: optional(str, "Clients trained together: auto, N or branches:N.") = "auto",
    epochs: optional(int, "Local epochs in place of the workload's.", min=1) = None,
    repeats: optional(int, "Timed rounds of each side.", min=1) = 5,
    seed: optional(int, "Seed of images, models and batches.") = 0,
    json: optional(bool, "Print a JSON object a line, and no table.", "--json") = None,
    csv: optional(Path, "File to append the results of workloads to.") = None,
    scaling: optional(bool, "Measure w1 over clients and batch sizes, too.", "--scaling") = None,
    count: optional(
        bool, "Measure nothing: count a joint step as CUDA would do it, and model an H100.", "--count"
    ) = None,
) -> None:
    """Measure the engine against a plain PyTorch loop in the same run.

    cnn-five-epochs, w1: 28 x 28 grey images, 100 clients x 600, 10 a round, 5 epochs, batch 64, cnn-mcmahan.
    cnn-small-batches, w2: the same images, 20 clients a round, 1 epoch, batch 10.
    resnet18, w3: 32 x 32 colour images, 10 clients x 4,000, 10 epochs, batch 64; hours on a CPU.
    small-network, w4: as w1, with a network of 21,840 parameters.
    METHOD: rounds of its own protocol on CIFAR-10, without the plain loop; how long all will take.
    Where fmnist or cifar10 is missing, the images are random.
    """
    from fedcli.bench import measure

    if count:
        _print_counts(workloads or ["w1", "w2", "w3", "w4"], precision, bool(json))
        return
    given = {"device": device, "precision": precision, "clients_per_chunk": clients_per_chunk, "seed": seed}
    if epochs:
        given["local_epochs"] = epochs
    names = list(workloads or ())
    if scaling:
        names += measure.SCALING
    if not names:
        names = ["w1", "w2"]
    cases = [_bench_case(name, method, given) for name in names]
    if csv is not None:  # refused now rather than after minutes
        measure.check_csv(csv)
    results = []
    for case in cases:
        with Console(stderr=True).status(case.name) as status:
            result = measure.measure(case.name, case.setup, repeats, status.update, with_plain=case.is_workload)
        results.append(result)
        if json:
            typer.echo(dumps(result))
        if csv is not None:
            measure.append_csv(csv, result)
    if not json:
        _print_timings(results)


def _print_timings(results: Sequence[dict[str, Any]]) -> None:
    """Print what was measured, a row a case, and the machine."""
    from fedcli.bench.measure import MACHINE, cells

    by_title = [cells(result) for result in results]
    titles = list(dict.fromkeys(title for row in by_title for title in row))
    rows = []
    for row in by_title:
        rows.append([row.get(title, "") for title in titles])
    print_table(titles, rows)
    typer.echo(MACHINE.format(**results[-1]))


class BenchCase(NamedTuple):
    """What is timed."""

    name: str  # of the workload, or of a protocol
    setup: Any
    is_workload: bool  # which a plain loop trains as well


def _bench_case(name: str, method: str, given: Mapping[str, Any]) -> BenchCase:
    """Resolve a workload by a method, or a method under its own protocol."""
    from fedcli.bench.measure import SCALING, WORKLOADS, prepare_workload
    from fedcli.runs.resolve import resolve

    workload = {**WORKLOADS, **SCALING}.get(name)
    if workload is not None:
        return BenchCase(name, prepare_workload(workload, method, **given), is_workload=True)
    if name in registry.methods() or is_from_file(name):
        setup = resolve(registry.find_method(name), {"dataset": "cifar10", **given}, need_data=False)
        return BenchCase(setup.protocol.name, setup, is_workload=False)
    raise unknown("workload", name, WORKLOADS, f"there are {', '.join(WORKLOADS)}, and methods.")


def _print_counts(workloads: list[str], precision: str, as_json: bool) -> None:
    """Print what is counted of a joint step of each workload in each way."""
    from fedcli.bench.count import cells, count_step
    from fedcli.bench.measure import WORKLOADS
    from fedcli.core.stacked import WAYS

    for name in workloads:
        if name not in WORKLOADS:
            raise unknown("workload", name, WORKLOADS, f"there are {', '.join(WORKLOADS)}.")
    rows = []
    for name in workloads:
        for way in WAYS:
            row, _ = count_step(name, WORKLOADS[name], way, precision)
            rows.append(row)
            if as_json:
                typer.echo(dumps(row))
    if as_json:
        return
    table = [cells(row) for row in rows]
    (first, *_) = table
    print_table(list(first), [list(row.values()) for row in table])


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
    from fedcli import check
    from fedcli.runs.resolve import find_device

    numbers = law or list(check.LAWS)
    for number in sorted(numbers):
        if number not in check.LAWS:
            raise UserError(f"unknown law {number}; 'fedcli check --help' says what they are.")
    named = [registry.find_method(name) for name in methods or registry.methods()]
    if methods:
        variants = [variant for method in named for variant in check.variants_of(method)]
        chosen = [*named, *variants]
    else:
        chosen = named if all_ else check.one_of_each_kind()
    device = str(find_device(device))
    rows: list[tuple] = []
    num_held = 0
    num_broken = 0
    num_left_out = 0
    with Console(stderr=True).status("") as status:
        for method, number in product(chosen, numbers):
            law_held = check.LAWS[number]
            status.update(escape(f"{method.name}: {law_held.measure.__name__.replace('_', ' ')}"))
            findings = check.check(method, number, device)
            if not findings:
                num_left_out += 1
                rows.append((method.name, number, f"nothing, without {law_held.needs}", "", "", "left out"))
                continue
            rows += [(method.name, number, *finding.cells) for finding in findings]
            broken = [finding for finding in findings if not finding.holds]
            if broken:
                num_broken += 1
            else:
                num_held += 1
            for finding in broken:
                common.say(f"{method.name}, law {number}: {finding}", err=True)
                if finding.error is not None:
                    common.show_traceback(ctx, finding.error)
    print_table(("Checked", "Law", "Compared", "Figure", "Tolerance", ""), rows)
    left_out = f"; {num_left_out} left out, see above" if num_left_out else ""
    typer.echo(f"{num_held} of {num_held + num_broken} laws hold on {device}{left_out}.")
    raise typer.Exit(1 if num_broken else 0)
