"""The same rounds in PFLlib, in Flower, in fluke and here, and what they take.

    python peers.py fmnist-cnn --side fedcli --side pfllib --side flower --pfllib CHECKOUT --python PYTHON
    python peers.py mnist-large --side fedcli --side fluke --python PYTHON

appends the seconds of each side's rounds, and the accuracy of its last model where it tests one, to `peers.csv` as all
sides of a turn are done, and prints the medians of these seconds. README.md says what each workload trains.
`--pfllib` is a checkout of TsingZ0/PFLlib; `--python` is the Python of an environment with the same torch,
flwr==1.41.0 and ray for Flower, scikit-learn, matplotlib and h5py for PFLlib, or fluke-fl==0.8.1 for fluke.

Each side runs in a process of its own (`sides/`), which imports nothing of the others. All train the same images of
the same clients from the same initial model with plain SGD; a batch that is not full is left out as in PFLlib, but kept
beside fluke, as fluke keeps it. A side that cannot train a workload so is refused. fedcli
divides the images and writes them normalised into files in PFLlib's form, which the others read as well.

    fedcli    `fedcli.run`; a round is timed from the end of the one before
    pfllib    its servers' own `train`, which times each round itself
    flower    its simulation on Ray with the strategy FedAvg; the client app is a plain PyTorch loop; an actor for each
              core, with one thread; timed as in fedcli
    fluke     its FedAVG's own `run`; timed as in fedcli

`earlier.csv` has what earlier versions of this script measured, with one or two rounds in a turn or by other ways.
"""

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from sides.job import Job, Measurement, Training, Workload

from fedcli.errors import UserError
from fedcli.runs import begin
from fedcli.runs.machine import environment
from fedcli.runs.origins import GivenOptions
from fedcli.runs.prepare import prepare

HERE = Path(__file__).parent
CSV = HERE / "peers.csv"
EARLIER_CSV = HERE / "earlier.csv"  # what earlier versions of this script have measured
ROUNDS = 5
COUNTED_ROUNDS = slice(1, ROUNDS - 1)  # the first warms up, and the last is tested
FMNIST = {
    "protocol": "fedsa:cifar10-silo", "dataset": "fmnist", "optimizer": "sgd", "momentum": 0.0, "partition": "iid",
    "device": "cpu",  # as the other sides
    "local_test": 1 / 7,  # of 700 images each
}  # fmt: skip
MNIST = {**FMNIST, "dataset": "mnist"}
FIVE_EPOCHS = Training(cohort_size=10, local_epochs=5, batch_size=64)
ONE_EPOCH = Training(cohort_size=20, local_epochs=1, batch_size=10)
PROTOTYPES = replace(ONE_EPOCH, method="fedproto", prototype_weight=1.0)
BESIDE_FLUKE = replace(FIVE_EPOCHS, lr=0.05, drop_last=False)
LARGE_NETWORK = f"{HERE}/networks.py:mcmahan"
SMALL_NETWORK = f"{HERE}/networks.py:small"
WORKLOADS = {
    "fmnist-cnn": Workload(FIVE_EPOCHS, FMNIST),
    "fmnist-cnn-batch10": Workload(ONE_EPOCH, FMNIST),
    "fmnist-small": Workload(replace(FIVE_EPOCHS, backbone=SMALL_NETWORK), FMNIST),
    "fmnist-cnn-fedproto": Workload(PROTOTYPES, {**FMNIST, "gathered_epochs": "all"}),
    "mnist-large": Workload(replace(BESIDE_FLUKE, backbone=LARGE_NETWORK), MNIST),
    "mnist-small": Workload(replace(BESIDE_FLUKE, backbone=SMALL_NETWORK), MNIST),
}
WorkloadName = StrEnum("WorkloadName", {name.upper().replace("-", "_"): name for name in WORKLOADS})


class Side(StrEnum):
    """A side: a module of `sides`."""

    FEDCLI = "fedcli"
    PFLLIB = "pfllib"
    FLOWER = "flower"
    FLUKE = "fluke"


@dataclass(frozen=True)
class Abilities:
    """What a side can train."""

    methods: Collection[str]
    drop_last: Collection[bool]  # whether it leaves out a batch that is not full; both where it does as it is told


ABILITIES = {
    Side.FEDCLI: Abilities(methods=("fedavg", "fedproto"), drop_last=(True, False)),
    Side.PFLLIB: Abilities(methods=("fedavg", "fedproto"), drop_last=(True,)),
    Side.FLOWER: Abilities(methods=("fedavg",), drop_last=(True, False)),
    Side.FLUKE: Abilities(methods=("fedavg",), drop_last=(False,)),
}


def check_sides(workload: str, sides: Sequence[Side]) -> None:
    """Refuses sides that would train something else than the workload, and one that is given twice.

    Raises:
        UserError: If a side is given twice, lacks the method, or keeps or leaves out batches that are not full where
            the workload does not.
    """
    training = WORKLOADS[workload].training
    for side in sides:
        abilities = ABILITIES[side]
        if sides.count(side) > 1:
            raise UserError(f"{side} is given twice; give each --side once, and another turn by --turn.")
        if training.method not in abilities.methods:
            raise UserError(f"{side} cannot train '{workload}', which is {training.method}; leave it out.")
        if training.drop_last not in abilities.drop_last:
            treatment = "without" if training.drop_last else "with"
            raise UserError(
                f"{side} cannot train '{workload}', which is {treatment} the batches that are not full; leave it out."
            )


def check_checkout(pfllib: Path) -> None:
    """Refuses a folder that is no checkout of PFLlib.

    Raises:
        UserError: If it lacks PFLlib's modules, or git knows no commit of it.
    """
    if not (pfllib / "system" / "flcore").is_dir():
        raise UserError(f"'{pfllib}' has no PFLlib (looked for 'system/flcore'); give its checkout by --pfllib.")
    command = ["git", "-C", str(pfllib), "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    if git.returncode:
        raise UserError(f"'{pfllib}' is no checkout ({git.stderr.strip()}); clone PFLlib, so that its commit is noted.")


def read_measured_rows() -> pd.DataFrame:
    """The rows of all that was measured, also by earlier versions of this script."""
    earlier_rows = pd.read_csv(EARLIER_CSV)
    if not CSV.exists():
        return earlier_rows
    return pd.concat([earlier_rows, pd.read_csv(CSV)])


def find_next_turn(workload: str) -> int:
    """The number after that of a workload's last turn, also of one that an earlier version has measured."""
    rows = read_measured_rows()
    turns = rows[rows.workload == workload].turn
    return 0 if turns.empty else int(turns.max()) + 1


def check_turns(workload: str, sides: Sequence[Side], turns: Sequence[int]) -> None:
    """Refuses a side's turn that is measured already, or that is asked for twice.

    Raises:
        UserError: If there is one.
    """
    rows = read_measured_rows()
    of_workload = rows[rows.workload == workload]
    measured = set(zip(of_workload.side, of_workload.turn, strict=True))
    for turn, side in product(turns, sides):
        if (side, turn) in measured:
            raise UserError(
                f"turn {turn} of {side} with '{workload}' is in a CSV file, or was asked for twice; leave out --turn "
                "for the next one."
            )
        measured.add((side, turn))


def write_clients(folder: Path, workload: Workload) -> None:
    """Writes the clients' images as PFLlib's generators do, `dataset/train/K.npz` and so on, and the initial model."""
    options = workload.options
    method = options.pop("method")
    (planned,) = begin.resolve_runs(method, GivenOptions(options), out=folder)
    dataset, _, fed = prepare(planned.setup)
    for split, clients in (("train", fed.training), ("test", fed.testing)):
        folder_of_split = folder / "dataset" / split
        folder_of_split.mkdir(parents=True)
        for client, positions in enumerate(clients):
            x = fed.transform(dataset.x_train[positions]).numpy()
            y = dataset.y_train[positions].numpy()
            np.savez(folder_of_split / f"{client}.npz", data={"x": x, "y": y})
    params, _ = fed.initial_model()
    torch.save(list(params.values()), folder / "initial.pt")


@dataclass(frozen=True)
class CsvRow:
    """A row of the CSV, whose columns have these names."""

    quantity: str  # "seconds" of a round, or "final_accuracy", a fraction
    workload: str
    side: Side
    turn: int
    value: float
    versions: str
    torch_version: str
    cores: int  # of the machine, and the most threads that a side has
    processor: str


def measure(workload: str, sides: Sequence[Side], turn: int, pfllib_checkout: str | None, python: str) -> list[CsvRow]:
    """Runs the sides of a turn one after the other; appends the rows of all to the CSV, and returns them."""
    rows: list[CsvRow] = []
    processor = environment(torch.device("cpu"))["machine"]["processor"]
    with TemporaryDirectory() as folder:
        write_clients(Path(folder), WORKLOADS[workload])
        job = Job(Path(folder), WORKLOADS[workload], ROUNDS, pfllib_checkout)
        for side in sides:
            python_of_side = sys.executable if side is Side.FEDCLI else python
            measurement = run_side(python_of_side, side, job)
            outcome = measurement.outcome
            make_row = partial(
                CsvRow,
                workload=workload,
                side=side,
                turn=turn,
                versions=outcome.versions,
                torch_version=measurement.torch_version,
                cores=measurement.cores,
                processor=processor,
            )
            rows += [make_row(quantity="seconds", value=seconds) for seconds in outcome.seconds[COUNTED_ROUNDS]]
            if outcome.accuracy is not None:
                rows.append(make_row(quantity="final_accuracy", value=outcome.accuracy))
    append_rows(rows)
    return rows


def append_rows(rows: Sequence[CsvRow]) -> None:
    """Appends rows to the CSV."""
    pd.DataFrame(rows).to_csv(CSV, mode="a", header=not CSV.exists(), index=False, float_format="%.6g")


def run_side(python: str, side: Side, job: Job) -> Measurement:
    """Returns what came of one side, which runs in a new process."""
    command = [python, "-m", "sides", side, job.to_json()]
    paths = [str(HERE)]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FLWR_TELEMETRY_ENABLED": "0"}
    process = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    last_line = process.stdout.splitlines()[-1]  # a side may print before
    return Measurement.from_json(last_line)


def compute_medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the medians of the values, a row each quantity, workload and turn, a column each side."""
    medians_of_sides = rows.groupby(["quantity", "workload", "turn", "side"])["value"].median()
    return medians_of_sides.unstack()


def main(
    workload: Annotated[WorkloadName, typer.Argument(help="What is trained")],
    sides: Annotated[list[Side], typer.Option("--side", help="Who trains it, in this order")] = [  # noqa: B006
        Side.FEDCLI,
        Side.PFLLIB,
    ],
    turns: Annotated[
        list[int],
        typer.Option("--turn", help="Number of a turn, which starts every side anew; by default the next"),
    ] = [],  # noqa: B006
    pfllib: Annotated[Path | None, typer.Option(help="Checkout of TsingZ0/PFLlib, which the side pfllib needs")] = None,
    python: Annotated[str, typer.Option(help="Python of the environment of the sides but fedcli")] = sys.executable,
) -> None:
    """Append the seconds of each side's rounds to the CSV, and print their medians."""
    if Side.PFLLIB in sides and pfllib is None:
        raise typer.BadParameter("give the checkout of PFLlib, or other sides by --side.", param_hint="--pfllib")
    check_sides(workload, sides)
    if Side.PFLLIB in sides:
        check_checkout(pfllib)
    turns = turns or [find_next_turn(workload)]
    check_turns(workload, sides, turns)
    checkout = None if pfllib is None else str(pfllib.resolve())
    rows: list[CsvRow] = []
    for turn in turns:
        rows += measure(workload, sides, turn, checkout, python)
    print(compute_medians(pd.DataFrame(rows)).loc["seconds"])


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
