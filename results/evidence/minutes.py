"""Spend the first minutes on a GPU on which nothing has been measured, and the second ones; from the repository's top.

    python3 results/evidence/minutes.py first --out first
    python3 results/evidence/minutes.py second --out second --from first --before /tmp/before --probe probe.py

`--tiny` tries either on a CPU.
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
CHECKOUT = Path()  # this one, as it is the working folder


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is run on a GPU, or for a trial on a CPU."""

    device: str
    workloads: tuple[str, ...]  # arguments of `fedcli bench`
    profiled: str  # the workload whose kernels are listed
    backbones: tuple[str, ...]  # of runs that are to repeat their bits
    check_options: tuple[str, ...] = ()  # of `fedcli check`
    evidence_options: tuple[str, ...] = ()  # of `evidence.py`


ON_GPU = Size(
    device="cuda", workloads=("w1 w2", "w3 --epochs=1"), profiled="w3", backbones=("cnn-small", "resnet18")
)  # fmt: skip
TINY = Size(
    device="cpu", workloads=("w2 --epochs=1",), profiled="w2", backbones=("cnn-small",), check_options=("--law=9",),
    evidence_options=("--tiny",),
)  # fmt: skip

app = typer.Typer(help="Each in minutes: what has not been measured on a GPU.")
Out = Annotated[Path, typer.Option(help="Folder for what is measured, and for what the next machine goes on from.")]
Minutes = Annotated[float, typer.Option(help="Until all of it has ended.")]
Precision = Annotated[str, typer.Option(help="Of FedFM and of the listed kernels.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Try it on a CPU.")]


@app.command()
def first(out: Out, minutes: Minutes = 9, precision: Precision = "tf32", tiny: Tiny = False) -> None:
    """Check steps, bits and a run whose step is no graph, bench three precisions, then begin with FedFM."""
    end = after(60 * minutes)
    size = TINY if tiny else ON_GPU
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    link_papers(CHECKOUT)
    check_steps(size, until=after(60))
    check_bits(size, out, until=after(60))
    check_failing_run(until=after(30))
    bench(CHECKOUT, size, ("float32", "tf32", "bf16"), out / "bench.csv", until=after(90))
    run_claims(size, precision, until=end, carry=out)


@app.command()
def second(
    out: Out,
    origin: Annotated[Path, typer.Option("--from", help="Folder of the first minutes.")],
    before: Annotated[Path | None, typer.Option(help="Folder of another commit, to bench beside this one.")] = None,
    probe: Annotated[str, typer.Option(help="A script of kernels that takes --budget SECONDS, with options.")] = "",
    minutes: Minutes = 9,
    precision: Precision = "tf32",
    tiny: Tiny = False,
) -> None:
    """List the kernels of a workload by time, run a script of kernels, bench two commits, then go on with FedFM."""
    end = after(60 * minutes)
    size = TINY if tiny else ON_GPU
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    link_papers(CHECKOUT)
    kernels = [size.profiled, f"--precision={precision}", f"--device={size.device}", f"--out={out / 'kernels.txt'}"]
    run_python("results/evidence/kernels.py", *kernels, until=after(30))
    if probe:
        run_python(*shlex.split(probe), "--budget=240", until=after(260))
    if before is not None:
        link_papers(before)
        half = after(60)
        whole = after(120)
        bench(before, size, ("float32",), out / "before.csv", until=half)
        bench(CHECKOUT, size, ("float32",), out / "after.csv", until=whole)
    run_claims(size, precision, until=end, carry=out, origin=origin)


def after(seconds: float) -> float:
    """Returns when so many seconds from now are over, by `time.monotonic`."""
    return time.monotonic() + seconds


def run_python(*arguments: str, until: float, checkout: Path = CHECKOUT) -> bool:
    """Runs Python with arguments in a checkout, on the package there, and ends it once its time is over.

    Returns:
        Whether it has succeeded. Where no time is left, nothing starts.
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
    """Puts the papers into the package of a checkout that is not installed, where nothing else finds them."""
    find_papers = "import sys, importlib.util; sys.exit(importlib.util.find_spec('fedcli.papers') is None)"
    if not run_python("-c", find_papers, until=after(60), checkout=checkout):
        (checkout / "fedcli" / "papers").symlink_to("../papers")


def check_steps(size: Size, until: float) -> None:
    """Holds graphs of steps, and the laws, to the CPU."""
    chosen = f"on_a_cuda_device and not {FAILING_RUN}"
    run_python(*PYTEST, "tests/test_graphs.py", "-k", chosen, until=until)
    methods = ["fedavg", "fedfm", "scaffold"]
    run_python(*FEDCLI, "check", *methods, *size.check_options, f"--device={size.device}", until=until)


def check_bits(size: Size, out: Path, until: float) -> None:
    """Runs two rounds twice, of clients that are stacked and of clients in branches; `verify` compares the bits."""
    for backbone in size.backbones:
        for way in ("10", "branches:10"):
            name, _, _ = way.partition(":")
            folder = str(out / f"bits-{backbone}-{name}")
            options = ["--dataset=digits", f"--backbone={backbone}", f"--clients-per-chunk={way}", "--rounds=2"]
            options += [f"--device={size.device}", f"--out={folder}"]
            if run_python(*FEDCLI, "run", "fedavg", *options, until=until):
                run_python(*FEDCLI, "verify", folder, until=until)


def check_failing_run(until: float) -> None:
    """Runs one whose loss reads a number, so that its step cannot be a graph, and another in the same process."""
    run_python(*PYTEST, f"tests/test_graphs.py::{FAILING_RUN}", until=until)


def bench(checkout: Path, size: Size, precisions: Sequence[str], csv: Path, until: float) -> None:
    """Times the code of a checkout in precisions, into a file."""
    for workload in size.workloads:
        for precision in precisions:
            options = ["--repeats=1", f"--precision={precision}", f"--csv={csv}"]
            run_python(*FEDCLI, "bench", *workload.split(), *options, until=until, checkout=checkout)


def run_claims(size: Size, precision: str, until: float, carry: Path, origin: Path | None = None) -> None:
    """Goes on with the open claims, from what another machine has carried, if one has."""
    seconds = int(until - time.monotonic())
    options = [f"--time={seconds}", "--jobs=1", f"--precision={precision}", f"--carry={carry}", *size.evidence_options]
    if origin is not None:
        options.append(f"--from={origin}")
    if seconds > 0:
        run_python("results/evidence/evidence.py", *options, until=until + 60)  # it ends in time by itself


if __name__ == "__main__":
    app()
