"""Programs that tests start, interrupt and kill, and scripts as modules."""

import importlib.util
import os
import select
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile

from fedcli.__main__ import main

STDOUT = 1  # the numbers of these files in a program
STDERR = 2
PATIENCE = 300  # seconds until a test fails that waits for a program

# Trains as FedAvg does, and stops in the second round until somebody writes into the pipe `go` or closes it again, as
# long as there is one.
WAITS = """
import os
import select
from dataclasses import replace
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method

def run_round(state, cohort, fed, config):
    if cohort.round == 1 and os.path.exists("go"):
        with open("here", "w") as here:
            print(os.getpid(), file=here, flush=True)
            # Not by opening it for reading alone: a signal just before that call would be seen only after it.
            go = os.open("go", os.O_RDONLY | os.O_NONBLOCK)
            while not select.select([go], [], [], 0.1)[0]:
                pass
            os.close(go)
    return fedavg.run_round(state, cohort, fed, config)

METHOD = replace(find_method("fedavg"), name="waits", run_round=run_round)
"""
# Two runs of it.
TABLE = """
import fedcli

given = {"protocol": "fedfm:digits", "dataset": "digits", "train_examples": 120, "rounds": 3, "device": "cpu"}
cells = tuple(fedcli.Cell(str(lr), "x", "./waits.py", {**given, "lr": lr}) for lr in (0.1, 0.2))
TABLE = fedcli.Table("fedfm:III", "made up", ("FedFM", "Table III"), cells, seeds=(0,))
"""
# Prints the accuracy of each exported model, by PyTorch alone.
EVALUATE = """
import sys, torch
images, labels = torch.load(sys.argv[1])
for file in sys.argv[2:]:
    logits = torch.export.load(file).module()(images)
    print((logits.argmax(1) == labels).double().mean().item())
assert "fedcli" not in sys.modules
"""


class Waiting:
    """Writes `waits.py`, `table.py` and their pipes into a folder, and knows which processes wait in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "waits.py").write_text(WAITS)
        (folder / "table.py").write_text(TABLE)
        os.mkfifo(folder / "here")
        os.mkfifo(folder / "go")
        self._file = os.open(folder / "here", os.O_RDONLY | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def wait_for_one(self) -> int:
        """The id of a process that waits, once there is one."""
        (pid,) = self.wait_for(1)
        return pid

    def wait_for(self, count: int = 2) -> list[int]:
        """The ids of two processes, or of `count`, that wait, once there are so many."""
        waiting = []
        end = time.monotonic() + PATIENCE
        while len(waiting) < count:
            assert time.monotonic() < end, "too few processes have come to their second round"
            if self._wait_for_event() & select.POLLIN:  # else nobody is writing, which may end at any time
                waiting += map(int, os.read(self._file, 100).split())
        return waiting

    def have_ended(self) -> bool:
        """Whether all processes that waited come to an end before patience does."""
        event = self._wait_for_event()
        while event & select.POLLIN:
            os.read(self._file, 100)
            event = self._wait_for_event()
        return bool(event)

    def _wait_for_event(self) -> int:
        """What has happened to the pipe of those that wait, as flags of `select`; 0 after too long."""
        for _, event in self._poll.poll(1000 * PATIENCE):
            return event
        return 0

    def let_later_ones_pass(self) -> None:
        """Lets the processes that come later pass."""
        (self.folder / "go").unlink()

    def let_one_go_on(self) -> None:
        """Lets one that waits go on."""
        (self.folder / "go").open("w").close()


class Program(get_context("fork").Process):
    """What `main` does in a folder, as a program in a fork of this process, which has imported everything.

    It writes into `stdout` and `stderr`, the numbers of open files, or where these are None into files of its own.
    """

    def __init__(self, folder, arguments, main, stdout=None, stderr=None):
        super().__init__()
        self.folder = folder
        self.arguments = arguments
        self.main = main
        self.output_file = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.error_file = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.stdout = self.output_file.fileno() if stdout is None else stdout
        self.stderr = self.error_file.fileno() if stderr is None else stderr

    def run(self):
        os.dup2(self.stdout, STDOUT)
        os.dup2(self.stderr, STDERR)
        sys.stdout = open(STDOUT, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(STDERR, "w", closefd=False)  # noqa: SIM115
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which may be ignored where the tests run
            signal.signal(ending, signal.SIG_DFL)
        os.chdir(self.folder)
        os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        sys.argv = ["fedcli", *map(str, self.arguments)]
        self.main()

    def send_signal(self, signal_number):
        os.kill(self.pid, signal_number)

    @property
    def returncode(self):
        return self.exitcode

    def communicate(self):
        """What it has said on stdout and on stderr, in files of its own, once it has ended."""
        self.join(PATIENCE)
        if self.is_alive():
            self.kill()
            raise TimeoutError("a program has not ended")
        return self._read(self.output_file), self._read(self.error_file)

    @staticmethod
    def _read(file):
        file.seek(0)
        return file.read()


def start(folder, *arguments, main=main, stdout=None, stderr=None):
    """Starts a program in a folder; by default `fedcli` with the arguments."""
    program = Program(folder, arguments, main, stdout, stderr)
    program.start()
    return program


def load_script(file):
    """A script that is no part of the package, as a module; it imports those beside it, as where Python runs it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(file.parent))
    return module
