"""What a command cannot do is refused by one line and exit code 2, and nothing is written."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedcli.cli import app as cli

SMALL = "--dataset digits --train-examples 60 --num-clients 4 --cohort-size 4 --rounds 1 --local-epochs 1 --device cpu"
PUBLIC = f"{SMALL} --public-dataset photos --public-examples 8 --partition iid"
MIXED = "--backbone cnn-small,resnet10-3x3"
METHOD = """
from dataclasses import dataclass, replace
from fedcli import option
from fedcli.papers.baselines import fedavg
@dataclass(frozen=True)
class Config:
    extra: float = option(0.1, 'Mine')
METHOD = replace(fedavg.METHOD, name="mine", config=Config)
"""
OWN = {  # a user's files, each with a mistake
    "reserved.py": METHOD.replace("extra", "lr"),
}
SEEDS = "--seeds must be distinct whole numbers from 0"
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def refused(line, message, folder, monkeypatch):
    """Runs a command in a folder with some files; it must be refused with the message and leave the folder alone."""
    (folder / "taken").mkdir(parents=True)
    for name in ("taken/file", "notes.txt", "text.npz"):
        (folder / name).write_text("not what is looked for\n")
    for name, text in OWN.items():
        (folder / name).write_text(text)
    np.savez(folder / "floats.npz", x_train=np.zeros((4, 8, 8)), y_train=[0, 1, 0, 1])
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(cli.app, shlex.split(line), prog_name="fedcli")
    assert (result.exit_code, result.stderr.count("\n"), result.stdout.strip()) == (2, 1, ""), result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert sorted(folder.rglob("*")) == before
    assert Path("notes.txt").read_text() == "not what is looked for\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # Names
        ("fedfmm", "unknown method 'fedfmm'; did you mean 'fedfm'? 'fedcli list --all' shows all."),
        ("./none.py", "there is no method file at '"),
        ("./reserved.py --help", "the option name 'lr' of 'mine' is reserved"),
        ("fedavg --dataset mnist", "or without a network 'fedcli data import mnist PATH'."),
        ("fedavg --backbone cnn-smal", "did you mean 'cnn-small'? 'fedcli list' shows all."),
        ("fedavg,FedAvg", "two methods have the same name (got fedavg, fedavg); name each once."),
        ("fedavg --mu 1", "unknown option of 'fedavg' '--mu'; 'fedcli run fedavg --help' shows all."),
        ("fedavg extra", "got unexpected extra argument(s) (extra); 'fedcli run --help' shows all."),
        ("fedfm --guiding x", "--guiding must be contrastive or l2 or l2-sum (got 'x'); choose one of them."),
        # Options out of range
        ("fedavg --rounds 0", "--rounds must be >= 1 (got 0); choose a value in that range."),
        ("fedavg --rounds x", "--rounds must be of type int (got 'x'); give a value of that type."),
        ("fedavg --lr nan", "--lr must be > 0 and <= 3e+38 (got nan)"),
        (f"fedavg --seed {2**40}", "--seed must be >= 0 and <= 4294967295 (got"),
        (f"fedavg --rounds {10**24}", "--rounds must be >= 1 and <= 2147483647"),
        ("fedavg --seeds 0,x", f"{SEEDS} (got '0,x'); write --seeds"),
        ("fedavg --seeds 1,1", f"{SEEDS} (got '1,1')"),
        ("fedavg --device gpu", "--device must be auto, cpu, cuda or cuda:N (got 'gpu')"),
        pytest.param("fedavg --device cuda", "there is no --device cuda here (got 0 CUDA", marks=no_cuda),
        # Several at once
        ("fedavg --num-clients 4 --cohort-size 2,30", "--cohort-size 30 is larger than --num-clients 4"),
        ("fedavg --seed 0,1", "invalid value for '--seed'"),
        ("fedavg --lr 0.1 --rounds 1 --lr 0.2", "--lr is given twice; give it once, several values as 0.01,0.1."),
        ("fedavg --rounds", "option '--rounds' requires an argument"),
        ("fedavg --out=", "a value is empty (got it after '--out=')"),
        ("fedavg --dataset ./none.npz", "unknown data set './none.npz'"),
        ("fedavg --lr 0.1,0.2 --continue", "--continue needs a folder (got no --out)"),
        ("fedavg --lr 0.1,0.2 --seed 0 --seeds 0,1", "--seed 0 was given with --seeds"),
        # Options without effect
        (f"fedavg {SMALL} --optimizer adam --momentum 0.5", "--momentum is for --optimizer sgd (got --optimizer adam"),
        (f"fedfa {SMALL} --calibration never --calibration-lr 0.1", "--calibration-lr is for --calibration batch or"),
        # The step after the last round
        (f"fedavg {SMALL} --post cvr", "unknown step after the last round 'cvr'; did you mean 'ccvr'?"),
        (f"local {SMALL} --post ccvr", "--post ccvr needs a global model"),
        (f"local {SMALL} --drift-every 2", "--drift-every 2 needs a global model"),
        (f"fedavg {SMALL} --ccvr-epochs 3", "--ccvr-epochs is for --post ccvr (got no --post)"),
        # Different networks
        (f"fedavg {SMALL} {MIXED}", "'fedavg' needs one network for all clients"),
        (f"fccl-plus {PUBLIC} {MIXED} --average-parameters", "--average-parameters needs one network"),
        *((f"{name} {SMALL} --backbone cnn-small,cnn-3conv", "cnn-small 64, cnn-3conv 512")
          for name in ("fedsa", "lg-fedavg", "fedproto", "fedtgp", "fedgen")),
        # Data
        ("fedavg --partition classes:20", "does not fit the data (got 10 clients and "),
        ("fedavg --partition domains", "needs a data set with domains"),
        ("fedavg --train-examples 200 --batch-size 500 --drop-last", "--batch-size 500 is larger than every client's"),
        ("fedavg --train-examples 5", "--train-examples 5 does not fit the data set 'digits'"),
        ("fedavg --public-dataset digits", "'fedavg' uses no public images (got --public-dataset digits)"),
        (f"fccl-plus {PUBLIC} --backbone cnn-small --public-batch-size 1", "must have 2 images"),
        (f"fedavg {SMALL} --local-test 0.25", "uses no --local-test"),
        ("fedavg --dataset digits --partition iid --train-examples 48 --num-clients 12 --cohort-size 2",
         "no client has a validation part (got --validation"),
        ("fedavg --dataset digits --partition iid --protocol fedsa:digits-mixed --num-clients 100 --local-test 0.001 "
         "--cohort-size 2 --backbone cnn-small", "no client has a test part (got --local-test 0.001)"),
        # Folders
        (f"fedavg {SMALL} --out taken", "the output folder 'taken' exists; an existing one is never overwritten"),
        (f"fedavg {SMALL} --out taken/file", "'taken/file' cannot be made (File exists)"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_is_refused(line, message, tmp_path, monkeypatch):
    refused(f"run {line}", message, tmp_path / "work", monkeypatch)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "resume nowhere",
            "there is no run at 'nowhere' (got no record.json); give the folder of a run, which holds one.",
        ),
        ("plto", "no such command 'plto'; did you mean 'plot'? 'fedcli --help' shows all."),
        ("plot a --knd x", "no such option: --knd (Possible options: --kind); 'fedcli plot --help'"),
        ("plot", "missing argument 'RUN'; 'fedcli plot --help' shows all."),
        ("new method 'my method'", "the name 'my method' is invalid; begin with a letter and use only a-z, 0-9, -"),
        ("new", "missing argument 'method'. Choose from: method; 'fedcli new --help' shows all."),
        ("new method fedavg", "there is a method or a file of that name (got 'fedavg'); choose another name."),
        # Data sets
        ("data download digit", "these can be downloaded: mnist, "),
        ("data import shapes floats.npz", "floats.npz"),
        ("data import digits floats.npz", "digits"),
        # Tables and figures
        ("table", "there is nothing to show (got no RUN or PAPER:ID); write 'fedcli table runs', or"),
        ("plot .", "there is no run in '.' (got no record.json in it or below)"),
        ("claims --runs nowhere", "invalid value for '--runs': path 'nowhere' does not exist"),
        ("table fedfm:2", "'fedfm' has fedfm:Fig1, fedfm:III, "),
        ("table fedfm:III runs", "a paper's table is made alone"),
        ("table runs --rounds 3", "--rounds is for a paper's table; see"),
        ("table --dry-run", "--dry-run is for a paper's table"),
        ("table fedfm:III --label x", "--label is for a table of runs"),
        ("table fedfm:III --rounds 0", "--rounds must be >= 1 (got 0)"),
        ("table fedfm:III --only x9", "no row or column of fedfm:III has 'x9' in its name"),
        ("table fedfm:III --out notes.txt/t.md", "'notes.txt' cannot be used (File exists); choose another path."),
        # Measurements and laws
        ("bench w11", "unknown workload 'w11'; did you mean 'w1'? there are w1, w2, w3, "),
        ("bench w1 --device cpu --csv notes.txt", "does not hold results"),
        ("check fedavg --law 8", "unknown law 8; there are 1 (switched off"),
    ],
)
def test_another_command_that_cannot_be_is_refused(line, message, tmp_path, monkeypatch):
    refused(line, message, tmp_path / "work", monkeypatch)
