"""What a method or a run cannot do is refused by the command: one line, exit code 2, nothing written."""

import shlex

import pytest
from typer.testing import CliRunner

from fedcli.cli import app as cli

SMALL = "--dataset digits --train-examples 60 --num-clients 4 --cohort-size 4 --rounds 1 --local-epochs 1 --device cpu"
PUBLIC = f"{SMALL} --public-dataset photos --public-examples 8 --partition iid"
MIXED = "--backbone cnn-small,resnet10-3x3"
NO_AVERAGE = "--average-parameters needs one network"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # Options out of range
        (f"fedavgm {SMALL} --server-momentum -0.1", "--server-momentum must be >= 0 and < 1"),
        (f"fedavgm {SMALL} --server-momentum 1.0", "--server-momentum must be >= 0 and < 1"),
        (f"fedproc {SMALL} --cross-entropy-weight 1.5", "--cross-entropy-weight must be"),
        (f"fedproc {SMALL} --ramp-rounds -1", "--ramp-rounds must be >= 0"),
        (f"fedproc {SMALL} --prototype-momentum 1.0", "--prototype-momentum must be >= 0 and < 1"),
        # The step after the last round
        (f"fedavg {SMALL} --post cvr", "unknown step after the last round 'cvr'; did you mean 'ccvr'?"),
        (f"local {SMALL} --post ccvr", "--post ccvr needs a global model"),
        (f"fedavg {SMALL} --ccvr-epochs 3", "--ccvr-epochs is for --post ccvr (got no --post)"),
        (f"fedavg {SMALL} --post ccvr --ccvr-epochs -1", "--ccvr-epochs must be >= 0"),
        # Different networks
        (f"fedavg {SMALL} {MIXED}", "'fedavg' needs one network for all clients"),
        (f"fccl-plus {PUBLIC} {MIXED} --average-parameters", NO_AVERAGE),
        (f"fccl {PUBLIC} {MIXED} --average-parameters", NO_AVERAGE),
        (f"fedmd {PUBLIC} {MIXED} --average-parameters", NO_AVERAGE),
        (f"feddf-client {PUBLIC} {MIXED} --average-parameters", NO_AVERAGE),
        *((f"{name} {SMALL} --backbone cnn-small,cnn-3conv", "cnn-small 64, cnn-3conv 512")
          for name in ("fedsa", "lg-fedavg", "fedproto", "fedtgp", "fedgen")),
        # Data
        (f"fccl-plus {PUBLIC} --backbone cnn-small --public-batch-size 1", "must have 2 images"),
        (f"fedavg {SMALL} --local-test 0.25", "has no such parts"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["run", *shlex.split(line), "--out", "run"], prog_name="fedcli")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert message in result.stderr
    assert not (tmp_path / "run").exists()
