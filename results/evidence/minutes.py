"""Two programs for a GPU that is there for minutes and on which nothing has been measured.

    python3 results/evidence/minutes.py check-and-bench --out first
    python3 results/evidence/minutes.py profile-and-compare --out second --from first --before /tmp/before

They run in the repository's top folder. `--tiny` tries either on a CPU.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

FAILING_RUN = "test_on_a_cuda_device_a_run_that_cannot_be_captured_leaves_the_next_one_its_graphs"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
FEDCLI = ("-m", "fedcli")
CHECKOUT = Path()  # the working folder is this checkout


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A device and what is run on it: all of it on a GPU, or a trial on a CPU."""

    device: str
    workloads: tuple[str, ...]  # arguments of `fedcli bench`
    profiled_workload: str  # its kernels are listed
    backbones: tuple[str, ...]  # of the runs that are repeated for the same bits
    check_options: tuple[str, ...] = ()  # of `fedcli check`
    evidence_options: tuple[str, ...] = ()  # of `evidence.py`


ON_GPU = Platform(
    device="cuda", workloads=("w1 w2", "w3 --epochs=1"), profiled_workload="w3", backbones=("cnn-small", "resnet18")
)  # fmt: skip
TINY = Platform(
    device="cpu", workloads=("w2 --epochs=1",), profiled_workload="w2", backbones=("cnn-small",),
    check_options=("--law=9",), evidence_options=("--tiny",),
)  # fmt: skip

app = typer.Typer(help="Measures in minutes what has not been measured on a GPU.")
Out = Annotated[Path, typer.Option(help="Folder for what is measured, and for what the next machine goes on from.")]
Minutes = Annotated[float, typer.Option(help="In which all of it ends.")]
Precision = Annotated[str, typer.Option(help="Of FedFM and of the listed kernels.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Try it on a CPU.")]


@app.command()
def check_and_bench(out: Out, minutes: Minutes = 9, precision: Precision = "tf32", tiny: Tiny = False) -> None:
    """Checks steps, bits and a run whose step is no graph, benches three precisions, then begins with open claims."""
    end = deadline_in(60 * minutes)
    platform = TINY if tiny else ON_GPU
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    link_papers(CHECKOUT)
    check_steps(platform, until=deadline_in(60))
    check_bits(platform, out, until=deadline_in(60))
    check_failing_run(until=deadline_in(30))
    bench(CHECKOUT, platform, ("float32", "tf32", "bf16"), out / "bench.csv", until=deadline_in(90))
    run_claims(platform, precision, until=end, archive_folder=out)


@app.command()
def profile_and_compare(
    out: Out,
    earlier_archive: Annotated[Path, typer.Option("--from", help="Folder of an earlier session.")],
    before: Annotated[Path | None, typer.Option(help="Folder of another commit, to bench beside this one.")] = None,
    probe: Annotated[str, typer.Option(help="A script of kernels that takes --budget SECONDS, with options.")] = "",
    minutes: Minutes = 9,
    precision: Precision = "tf32",
    tiny: Tiny = False,
) -> None:
    """Lists kernels by their time, runs a script of kernels, benches two commits, then goes on with the open claims."""
    end = deadline_in(60 * minutes)
    platform = TINY if tiny else ON_GPU
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    link_papers(CHECKOUT)
    options = [f"--precision={precision}", f"--device={platform.device}", f"--out={out / 'kernels.txt'}"]
    run_python("results/evidence/kernels.py", platform.profiled_workload, *options, until=deadline_in(30))
    if probe:
        run_python(*shlex.split(probe), "--budget=240", until=deadline_in(260))
    if before is not None:
        link_papers(before)
        end_before = deadline_in(60)
        end_after = deadline_in(120)
        bench(before, platform, ("float32",), out / "before.csv", until=end_before)
        bench(CHECKOUT, platform, ("float32",), out / "after.csv", until=end_after)
    run_claims(platform, precision, until=end, archive_folder=out, earlier_archive=earlier_archive)


def deadline_in(seconds: float) -> float:
    """Returns the time, by `time.monotonic`, at which so many seconds from now are over."""
    return time.monotonic() + seconds


def run_python(*arguments: str, until: float, checkout: Path = CHECKOUT) -> bool:
    """Runs Python with the package of a checkout, in its folder, and ends it at the time `until`.

    Returns:
        Whether it has succeeded. Nothing starts where no time is left.
    """
    seconds = until - time.monotonic()
    if seconds <= 0:
        return False
    path = [str(checkout.resolve())]
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = ["timeout", "--kill-after=5", f"{seconds:.1f}", sys.executable, *arguments]
    ended = subprocess.run(command, cwd=checkout, env=environment, check=False)
    return ended.returncode == 0


def link_papers(checkout: Path) -> None:
    """Links the papers into the package of a checkout that is not installed, since it has them beside it."""
    find_papers = "import sys, importlib.util; sys.exit(importlib.util.find_spec('fedcli.papers') is None)"
    if not run_python("-c", find_papers, until=deadline_in(60), checkout=checkout):
        (checkout / "fedcli" / "papers").symlink_to("../papers")


def check_steps(platform: Platform, until: float) -> None:
    """Checks that steps are graphs and agree with the CPU, and that methods keep their laws."""
    chosen = f"on_a_cuda_device and not {FAILING_RUN}"
    run_python(*PYTEST, "tests/test_graphs.py", "-k", chosen, until=until)
    methods = ["fedavg", "fedfm", "scaffold"]
    run_python(*FEDCLI, "check", *methods, *platform.check_options, f"--device={platform.device}", until=until)


def check_bits(platform: Platform, out: Path, until: float) -> None:
    """Checks that runs repeat their bits: two rounds with stacked clients, and two with clients in branches."""
    for backbone in platform.backbones:
        for clients_per_chunk in ("10", "branches:10"):
            name, _, _ = clients_per_chunk.partition(":")
            folder = str(out / f"bits-{backbone}-{name}")
            options = ["--dataset=digits", f"--backbone={backbone}", f"--clients-per-chunk={clients_per_chunk}"]
            options += ["--rounds=2", f"--device={platform.device}", f"--out={folder}"]
            if run_python(*FEDCLI, "run", "fedavg", *options, until=until):
                run_python(*FEDCLI, "verify", folder, until=until)


def check_failing_run(until: float) -> None:
    """Checks a run whose step cannot be a graph, since its loss reads a number, and the run after it."""
    run_python(*PYTEST, f"tests/test_graphs.py::{FAILING_RUN}", until=until)


def bench(checkout: Path, platform: Platform, precisions: Sequence[str], csv: Path, until: float) -> None:
    """Benches the code of a checkout in each of the precisions, and writes the times into a CSV file."""
    for workload in platform.workloads:
        for precision in precisions:
            options = ["--repeats=1", f"--precision={precision}", f"--csv={csv}"]
            run_python(*FEDCLI, "bench", *workload.split(), *options, until=until, checkout=checkout)


def run_claims(
    platform: Platform, precision: str, until: float, archive_folder: Path, earlier_archive: Path | None = None
) -> None:
    """Goes on with the open claims, and with the archive of an earlier session if there is one."""
    seconds = int(until - time.monotonic())
    options = [
        f"--time={seconds}",
        "--jobs=1",
        f"--precision={precision}",
        f"--carry={archive_folder}",
        *platform.evidence_options,
    ]
    if earlier_archive is not None:
        options.append(f"--from={earlier_archive}")
    if seconds > 0:
        run_python("results/evidence/evidence.py", *options, until=until + 60)  # it ends in time by itself


if __name__ == "__main__":
    app()
