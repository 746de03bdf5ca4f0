"""What a command cannot do is refused by one line and exit code 2, and nothing is written."""

import shlex

import numpy as np
import pytest

from tests.commands import error_of

SMALL = "--dataset digits --train-examples 60 --num-clients 4 --cohort-size 4 --rounds 1 --local-epochs 1 --device cpu"
PUBLIC = f"{SMALL} --public-dataset photos --public-examples 8 --partition iid --protocol fedfm:digits"
MIXED = "--backbone cnn-small,resnet10-3x3"
OF_TWO_WIDTHS = "--backbone cnn-small,cnn-3conv"
RESERVED = """
from dataclasses import dataclass, replace
from fedcli import option
from fedcli.papers.baselines import fedavg
@dataclass(frozen=True)
class Config:
    lr: float = option(0.1, 'Mine')
METHOD = replace(fedavg.METHOD, name="mine", config=Config)
"""
PLAIN = RESERVED.replace("lr: float = option(0.1, 'Mine')", "strength: float = 0.1")
SEEDS = "--seeds must be distinct whole numbers from 0"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # Names
        ("run fedfmm", "unknown method 'fedfmm'; did you mean 'fedfm'? 'fedcli list --all' shows all."),
        ("run ./none.py", "there is no method file at '"),
        ("show fedfm:niid", "unknown protocol 'fedfm:niid'; did you mean 'fedfm:niid-3'? 'fedfm' has fedfm:niid-1, "),
        ("run ./reserved.py --help", "the option name 'lr' of 'mine' is reserved"),
        ("run ./plain.py", "the option 'strength' has no help and no range (got a plain field of its Config)"),
        ("run fedavg --dataset mnist", "or without a network 'fedcli data import mnist PATH'."),
        ("run fedavg --backbone cnn-smal", "did you mean 'cnn-small'? 'fedcli list' shows all."),
        ("run fedavg,FedAvg", "two methods have the same name (got fedavg, fedavg); name each once."),
        ("run fedavg --mu 1", "unknown option of 'fedavg' '--mu'; 'fedcli run fedavg --help' shows all."),
        ("run fedprox --mu 1", "'--mu'; did you mean '--proximal-weight'? 'fedcli run fedprox --help' shows all."),
        ("run fedavg --clients 1", "'--clients'; did you mean '--num-clients'?"),
        ("run fedavg --E 1", "'--E'; did you mean '--local-epochs'?"),
        ("run fedavg --learning-rate 1", "'--learning-rate'; did you mean '--lr'?"),
        ("run fedavg extra", "Got unexpected extra argument(s) (extra) ('fedcli run --help' shows all)"),
        ("run fedfm --guiding x", "--guiding must be contrastive or l2 or l2-sum (got 'x'); choose one of them."),
        # Options out of range
        ("run fedavg --rounds 0", "--rounds must be >= 1 (got 0); choose a value in that range."),
        ("run fedavg --lr nan", "--lr must be > 0 and <= 3e+38 (got nan)"),
        (f"run fedavg --seed {2**40}", "--seed must be >= 0 and <= 4294967295 (got"),
        (f"run fedavg --rounds {10**24}", "--rounds must be >= 1 and <= 2147483647"),
        ("run fedavg --seeds 0,x", f"{SEEDS} (got '0,x'); write --seeds"),
        ("run fedavg --seeds 1,1", f"{SEEDS} (got '1,1')"),
        ("run fedavg --seeds 2-0", f"{SEEDS} (got '2-0')"),
        ("run fedavg --seeds 0-2,1", f"{SEEDS} (got '0,1,2,1')"),
        ("run fedavg --seeds 0-99999999", f"{SEEDS} (got '0-99999999')"),
        ("run fedavg --device gpu", "--device must be auto, cpu, cuda or cuda:N (got 'gpu')"),
        # Several at once
        ("run fedavg --num-clients 4 --cohort-size 2,30", "--cohort-size 30 is larger than --num-clients 4"),
        ("run fedavg --seed 0,1", "--seed takes one seed (got '0,1'); write --seeds 0,1."),
        ("run fedavg --lr 0.1 --rounds 1 --lr 0.2", "--lr is given twice; write --lr 0.1,0.2."),
        ("run fedavg --lr=0.1 --lr=0.2", "--lr is given twice; write --lr 0.1,0.2."),
        ("run fedfm --start_round 1 --start-round 2", "--start-round is given twice; write --start-round 1,2."),
        ("run fedavg --optimizer sgd --optimizer adam", "--optimizer is given twice; write --optimizer sgd,adam."),
        ("run fedavg --seed 0 --seed 1", "--seed is given twice; write --seeds 0,1."),
        ("run fedavg --seeds 0 --seeds 1", "--seeds is given twice; write --seeds 0,1."),
        ("run fedavg --dataset digits --dataset cifar10", "--dataset is given twice; give it once."),
        ("run fedavg --out one --out two", "--out is given twice; give it once."),
        ("table runs --metric best --metric last", "--metric is given twice; write --metric best,last."),
        ("data import mine ./one.npz --size 8 --size 9", "--size is given twice; give it once."),
        ("table runs --format csv --format latex", "--format is given twice; give it once."),
        ("run fedavg --rounds", "Option '--rounds' requires an argument"),
        ("run fedavg --out=", "a value is empty (got it after '--out=')"),
        ("run fedavg --dataset ./none.npz", "unknown data set './none.npz'"),
        ("run fedavg --lr 0.1,0.2 --continue", "--continue needs a folder (got no --out)"),
        ("run fedavg --partition classes:20 --log-file new/logs/log.txt", "does not fit the data (got 10 clients and "),
        (f"run fedavg,fedprox {SMALL} --log tensorbord --log-file new/log.txt", "unknown logger 'tensorbord'"),
        (f"run fedavg {SMALL} --lr 0.1,0.2 --log ./none.py:Mine --out new/runs", "there is no logger file at '"),
        ("run fedavg --lr 0.1,0.2 --seed 0 --seeds 0,1", "--seed 0 was given with --seeds"),
        # Methods that count on SGD
        (f"run scaffold {SMALL} --optimizer adam", "'scaffold' counts on steps along gradients (got --optimizer adam); "
         "choose --optimizer sgd."),
        # Options without effect
        (f"run fedavg {SMALL} --optimizer adam --momentum 0.5", "--momentum is for --optimizer sgd (got --optimizer"),
        (f"run fedfa {SMALL} --calibration never --calibration-lr 0.1", "--calibration-lr is for --calibration batch"),
        # The step after the last round
        (f"run fedavg {SMALL} --post cvr", "unknown step after the last round 'cvr'; did you mean 'ccvr'?"),
        (f"run local {SMALL} --post ccvr", "--post ccvr needs a global model"),
        (f"run local {SMALL} --drift-every 2", "--drift-every 2 needs a global model"),
        (f"run fedavg {SMALL} --ccvr-epochs 3", "--ccvr-epochs is for --post ccvr (got no --post)"),
        (f"run local {SMALL} --ccvr-epochs 3", "--ccvr-epochs is for --post ccvr (got no --post)"),
        # Different networks
        (f"run fedavg {SMALL} {MIXED}", "'fedavg' needs one network for all clients"),
        (f"run fccl-plus {PUBLIC} {MIXED} --average-parameters", "--average-parameters needs one network"),
        (f"run fedsa {SMALL} {OF_TWO_WIDTHS}", "cnn-small 64, cnn-3conv 512"),
        (f"run lg-fedavg {SMALL} {OF_TWO_WIDTHS}", "cnn-small 64, cnn-3conv 512"),
        (f"run fedproto {SMALL} {OF_TWO_WIDTHS}", "cnn-small 64, cnn-3conv 512"),
        (f"run fedtgp {SMALL} {OF_TWO_WIDTHS}", "cnn-small 64, cnn-3conv 512"),
        (f"run fedgen {SMALL} {OF_TWO_WIDTHS}", "cnn-small 64, cnn-3conv 512"),
        # Data
        ("run fedavg --partition classes:20", "does not fit the data (got 10 clients and "),
        ("run fedavg --partition domains", "needs a data set with domains"),
        ("run fedavg --train-examples 200 --batch-size 500 --drop-last", "--batch-size 500 is larger than every"),
        ("run fedavg --train-examples 5", "--train-examples 5 does not fit 'digits'"),
        ("run fedavg --public-dataset digits", "'fedavg' uses no public images (got --public-dataset digits)"),
        (f"run feddf {SMALL} --partition iid --public-dataset photos --backbone cnn-small", "tests on domains"),
        (f"run fccl-plus {PUBLIC} --backbone cnn-small --public-batch-size 1", "must have 2 images"),
        (f"run fedavg {SMALL} --local-test 0.25", "uses no --local-test"),
        ("run fedavg --dataset digits --partition iid --train-examples 48 --num-clients 12 --cohort-size 2",
         "no client has a validation part (got --validation"),
        ("run fedavg --dataset digits --partition iid --protocol fedsa:digits-mixed --num-clients 100 --cohort-size 2 "
         "--local-test 0.001 --backbone cnn-small", "no client has a test part (got --local-test 0.001)"),
        # Other commands
        ("resume nowhere", "there is no run at 'nowhere' (got no record.json); give the folder of a run, which holds"),
        ("plto", "No such command 'plto'. Did you mean 'plot'? ('fedcli --help' shows all)"),
        ("--knd plot", "No such option: --knd ('fedcli --help' shows all)"),
        ("plot a --knd x", "No such option: --knd (Possible options: --kind, --legend) ('fedcli plot --help'"),
        ("plot", "Missing argument 'RUN'. ('fedcli plot --help' shows all)"),
        ("new method 'my method'", "'my method' cannot be the name of a new method; begin with a letter, use only a-z"),
        ("new", "Missing argument 'method'. Choose from: method ('fedcli new --help' shows all)"),
        ("new method fedavg", "and no name of a method or a file here."),
        ("plot nowhere --title ''", "there is no run at 'nowhere'"),  # a figure may be without one
        # Data sets
        ("data import mine nowhere", "there is nothing at 'nowhere' to import; give the path of a file or a folder."),
        ("data download digit", "these can be downloaded: mnist, "),
        ("data import shapes floats.npz", "it has no array x_test (its arrays: x_train, y_train)"),
        ("data import digits floats.npz", "the name 'digits' is reserved: it is built in; choose another name."),
        # Tables and figures
        ("claims fedx", "unknown paper with claims 'fedx'"),
        ("claims ./reserved.py", "declares no CLAIMS"),
        ("claims --runs nowhere", "Invalid value for '--runs': path 'nowhere' does not exist"),
        ("table fedfm:2", "'fedfm' has fedfm:Fig1, fedfm:III, "),
        ("table fedfm:III runs", "a paper's table goes alone"),
        ("table fedfm:III --runs a --runs b", "--runs (got fedfm:III and more)"),
        ("table runs --rounds 3", "--rounds is for a paper's table; see"),
        ("table runs --dry-run", "--dry-run is for a paper's table"),
        ("table fedfm:III --label x", "--label is for a table of runs"),
        ("table fedfm:III --rounds 0", "--rounds must be >= 1 (got 0)"),
        ("table fedfm:III --only x9", "no row or column of fedfm:III has 'x9' in its name"),
        ("table fedfm:III --out notes.txt/t.md", "'notes.txt' cannot be used (File exists); choose another path."),
        # Measurements and laws
        ("quality r --clients --client 0", "--clients takes no --client and no --round (got --client): it measures"),
        ("quality r --round selected --client 0 --clients", "(got --client, --round): it measures the models of all"),
        ("bench w11", "unknown workload 'w11'; did you mean 'w1'? there are w1, w2, w3, w4, "),
        ("bench w1 --device cpu --csv notes.txt", "does not hold results"),
        ("check fedavg --law 8", "unknown law 8; 'fedcli check --help' says what they are."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_the_folder_is_left_alone(line, message, folder):
    (folder / "notes.txt").write_text("not what is looked for\n")
    (folder / "reserved.py").write_text(RESERVED)
    (folder / "plain.py").write_text(PLAIN)
    np.savez(folder / "floats.npz", x_train=np.zeros((4, 8, 8)), y_train=[0, 1, 0, 1])
    assert message in error_of(*shlex.split(line))
    assert (folder / "notes.txt").read_text() == "not what is looked for\n"
