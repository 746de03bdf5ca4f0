"""Two programs for a GPU that is there for minutes and on which nothing has been measured.

    python3 results/evidence/measure_new_gpu.py check-and-bench --out first
    python3 results/evidence/measure_new_gpu.py profile-and-compare --out second --from first --before /tmp/before

They run in the repository's top folder. `--tiny` tries either on a CPU.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

# The test of a run whose step cannot be a graph, since its loss reads a number, and of the run after it.
TEST_WITHOUT_GRAPH = "test_on_a_cuda_device_a_run_that_cannot_be_captured_leaves_the_next_one_its_graphs"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
FEDCLI = ("-m", "fedcli")
CHECKOUT = Path()  # the working folder is this checkout
CLAIMS_SECONDS = 120  # that all other programs leave for the open claims, which write the archive in the end
OVERRUN_SECONDS = 60  # by which the open claims may miss their --time
EXIT_CODES_OUT_OF_TIME = (124, 137)  # of the program `timeout`: after SIGTERM, after SIGKILL


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is measured, and on which device: all of it on a GPU, or little of it on a CPU."""

    device: str
    bench_arguments: tuple[tuple[str, ...], ...]  # of each call of `fedcli bench`
    profiled_workload: str  # its kernels are listed
    backbones: tuple[str, ...]  # of the runs that are repeated for the same bits
    check_options: tuple[str, ...] = ()  # of `fedcli check`
    claims_options: tuple[str, ...] = ()  # of `run_open_claims.py`


ON_GPU = Scope(
    device="cuda", bench_arguments=(("w1", "w2"), ("w3", "--epochs=1")), profiled_workload="w3",
    backbones=("cnn-small", "resnet18"),
)  # fmt: skip
TINY = Scope(
    device="cpu", bench_arguments=(("w2", "--epochs=1"),), profiled_workload="w2", backbones=("cnn-small",),
    check_options=("--law=9",), claims_options=("--tiny",),
)  # fmt: skip

app = typer.Typer(help="Measures in minutes what has not been measured on a GPU.")
Out = Annotated[Path, typer.Option(help="Folder for what is measured, and for what the next machine goes on from.")]
Minutes = Annotated[float, typer.Option(help="In which all of it ends.")]
# The choices are those of `fedcli run`, whose package this program does without.
Precision = Annotated[
    Literal["float32", "float64", "tf32", "bf16"], typer.Option(help="Of FedFM and of the listed kernels.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Try it on a CPU.")]


@app.command()
def check_and_bench(out: Out, minutes: Minutes = 9, precision: Precision = "float32", tiny: Tiny = False) -> None:
    """Checks steps, bits and a run whose step is no graph, benches three precisions, then begins with open claims."""
    session = start_session(out, minutes, tiny)
    check_steps(session, end=session.end_of_step(60))
    check_bits(session, end=session.end_of_step(60))
    check_without_graph(session, end=session.end_of_step(30))
    bench(session, CHECKOUT, ("float32", "tf32", "bf16"), "bench.csv", end=session.end_of_step(90))
    run_claims(session, precision)
    session.report()


@app.command()
def profile_and_compare(
    out: Out,
    earlier_archive: Annotated[
        Path, typer.Option("--from", help="Folder of an earlier session.", exists=True, file_okay=False)
    ],
    before: Annotated[
        Path | None,
        typer.Option(help="Folder of another commit, to bench beside this one.", exists=True, file_okay=False),
    ] = None,
    probe: Annotated[str, typer.Option(help="A script of kernels that takes --budget SECONDS, with options.")] = "",
    minutes: Minutes = 9,
    precision: Precision = "float32",
    tiny: Tiny = False,
) -> None:
    """Lists kernels by their time, runs a script of kernels, benches two commits, then goes on with the open claims."""
    session = start_session(out, minutes, tiny)
    list_kernels(session, precision, end=session.end_of_step(30))
    if probe:
        session.run_python(*shlex.split(probe), "--budget=240", end=session.end_of_step(260))
    if before is not None:
        link_papers(before)
        end_before = session.end_of_step(60)
        end_after = session.end_of_step(120)
        bench(session, before, ("float32",), "before.csv", end=end_before)
        bench(session, CHECKOUT, ("float32",), "after.csv", end=end_after)
    run_claims(session, precision, earlier_archive)
    session.report()


@dataclass(kw_only=True)
class Session:
    """What is measured on a machine, until when, and which programs have not succeeded.

    Attributes:
        scope: What is measured.
        out: The folder for what comes of it.
        end: When all of it ends, by `time.monotonic`.
        failed: The programs that have ended by an error.
        out_of_time: The programs that were ended, or not started for want of time.
    """

    scope: Scope
    out: Path
    end: float
    failed: list[str] = field(default_factory=list)
    out_of_time: list[str] = field(default_factory=list)

    def end_of_step(self, seconds: float) -> float:
        """Returns the end of a step that takes so many seconds at most, so that the open claims have their time."""
        return min(time.monotonic() + seconds, self.end - CLAIMS_SECONDS)

    def run_python(self, *arguments: str, end: float, checkout: Path = CHECKOUT) -> bool:
        """Runs Python with the package of a checkout, in its folder, and ends it at the time `end`.

        Returns:
            Whether it has succeeded. Nothing starts where no time is left.
        """
        program = shlex.join(arguments)
        seconds = end - time.monotonic()
        if seconds <= 0:
            self.out_of_time.append(program)
            return False
        path = [str(checkout.resolve())]
        if "PYTHONPATH" in os.environ:
            path.append(os.environ["PYTHONPATH"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        command = ["timeout", "--kill-after=5", f"{seconds:.1f}", sys.executable, *arguments]
        ended = subprocess.run(command, cwd=checkout, env=environment, check=False)
        if ended.returncode in EXIT_CODES_OUT_OF_TIME:
            self.out_of_time.append(program)
        elif ended.returncode != 0:
            self.failed.append(program)
        return ended.returncode == 0

    def report(self) -> None:
        """Prints which programs have not succeeded, and ends this one by an error if some have failed."""
        for program in self.out_of_time:
            print(f"out of time: {program}")
        for program in self.failed:
            print(f"failed: {program}")
        if self.failed:
            sys.exit(f"{len(self.failed)} programs have failed")


def start_session(out: Path, minutes: float, tiny: bool) -> Session:
    """Returns a session of so many minutes from now on, and makes its folder."""
    end = time.monotonic() + 60 * minutes
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    link_papers(CHECKOUT)
    scope = TINY if tiny else ON_GPU
    return Session(scope=scope, out=out, end=end)


def link_papers(checkout: Path) -> None:
    """Links the papers into the package of a checkout that is not installed, since it has them beside it."""
    link = checkout / "fedcli" / "papers"
    if not link.exists():
        link.symlink_to("../papers")


def check_steps(session: Session, end: float) -> None:
    """Checks that steps are graphs and agree with the CPU, and that methods keep their laws."""
    chosen = f"on_a_cuda_device and not {TEST_WITHOUT_GRAPH}"
    session.run_python(*PYTEST, "tests/test_graphs.py", "-k", chosen, end=end)
    methods = ["fedavg", "fedfm", "scaffold"]
    options = [*session.scope.check_options, f"--device={session.scope.device}"]
    session.run_python(*FEDCLI, "check", *methods, *options, end=end)


def check_bits(session: Session, end: float) -> None:
    """Checks that runs repeat their bits: two rounds with stacked clients, and two with clients in branches.

    The runs are not kept.
    """
    for backbone in session.scope.backbones:
        for clients_per_chunk in ("10", "branches:10"):
            options = ["--dataset=digits", f"--backbone={backbone}", f"--clients-per-chunk={clients_per_chunk}"]
            options += ["--rounds=2", f"--device={session.scope.device}"]
            with TemporaryDirectory(dir=session.out) as temporary:
                folder = f"{temporary}/run"
                if session.run_python(*FEDCLI, "run", "fedavg", *options, f"--out={folder}", end=end):
                    session.run_python(*FEDCLI, "verify", folder, end=end)


def check_without_graph(session: Session, end: float) -> None:
    """Checks a run whose step cannot be a graph, and the run after it."""
    session.run_python(*PYTEST, f"tests/test_graphs.py::{TEST_WITHOUT_GRAPH}", end=end)


def bench(session: Session, checkout: Path, precisions: Sequence[str], csv: str, end: float) -> None:
    """Benches the code of a checkout in each of the precisions, and writes the times into a CSV file of the session."""
    for arguments in session.scope.bench_arguments:
        for precision in precisions:
            options = ["--repeats=1", f"--precision={precision}", f"--csv={session.out / csv}"]
            session.run_python(*FEDCLI, "bench", *arguments, *options, end=end, checkout=checkout)


def list_kernels(session: Session, precision: str, end: float) -> None:
    """Lists the kernels of a workload by their time."""
    options = [f"--precision={precision}", f"--device={session.scope.device}", f"--out={session.out / 'kernels.txt'}"]
    workload = session.scope.profiled_workload
    session.run_python("results/evidence/kernels.py", workload, *options, end=end)


def run_claims(session: Session, precision: str, earlier_archive: Path | None = None) -> None:
    """Goes on with the open claims, and with the archive of an earlier session if there is one.

    They end in their `--time` by themselves; should they not, they are interrupted at the end of the session.
    """
    seconds = int(session.end - OVERRUN_SECONDS - time.monotonic())
    options = [
        f"--time={max(0, seconds)}",
        "--jobs=1",
        f"--precision={precision}",
        f"--carry={session.out}",
        *session.scope.claims_options,
    ]
    if earlier_archive is not None:
        options.append(f"--from={earlier_archive}")
    session.run_python("results/evidence/run_open_claims.py", *options, end=session.end)


if __name__ == "__main__":
    app()
