"""Programs that tests start, interrupt and kill, and a method whose runs wait for the test in their second round."""

import os
import select
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile

from fedcli.__main__ import main

STDOUT = 1  # the file descriptors of a program
STDERR = 2
PATIENCE = 300  # seconds that a test waits for a program before it fails

# A method that trains as FedAvg does. In its second round it waits until somebody writes into the pipe `go` or closes
# it again; without that pipe it does not wait.
WAITING_METHOD = """
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
# A table of two of its runs.
WAITING_TABLE = """
import fedcli

given = {"protocol": "fedfm:digits", "dataset": "digits", "train_examples": 120, "rounds": 3, "device": "cpu"}
cells = tuple(fedcli.Cell(str(lr), "x", "./waits.py", {**given, "lr": lr}) for lr in (0.1, 0.2))
TABLE = fedcli.Table("fedfm:III", "made up", ("FedFM", "Table III"), cells, seeds=(0,))
"""


class WaitingRuns:
    """Writes `waits.py`, `table.py` and their pipes into a folder, and sees which processes wait in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "waits.py").write_text(WAITING_METHOD)
        (folder / "table.py").write_text(WAITING_TABLE)
        os.mkfifo(folder / "here")
        os.mkfifo(folder / "go")
        self._file = os.open(folder / "here", os.O_RDONLY | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def wait_for_one(self) -> int:
        """Returns the id of a process that waits, once there is one."""
        (pid,) = self.wait_for(1)
        return pid

    def wait_for(self, count: int = 2) -> list[int]:
        """Returns the ids of `count` processes that wait, once there are so many."""
        waiting = []
        end = time.monotonic() + PATIENCE
        while len(waiting) < count:
            assert time.monotonic() < end, "too few processes have come to their second round"
            if self._wait_for_event() & select.POLLIN:  # else no process has the pipe open, but one may come
                waiting += map(int, os.read(self._file, 100).split())
        return waiting

    def have_ended(self) -> bool:
        """Returns whether all processes that have waited end, within `PATIENCE`."""
        event = self._wait_for_event()
        while event & select.POLLIN:
            os.read(self._file, 100)
            event = self._wait_for_event()
        return bool(event)

    def _wait_for_event(self) -> int:
        """Returns what has happened to the pipe of those that wait, as flags of `select`; 0 after `PATIENCE`."""
        for _, event in self._poll.poll(1000 * PATIENCE):
            return event
        return 0

    def let_later_ones_pass(self) -> None:
        """Lets processes that come to their second round later go on at once."""
        (self.folder / "go").unlink()

    def let_one_go_on(self) -> None:
        """Lets one of the processes that wait go on."""
        (self.folder / "go").open("w").close()


class Program(get_context("fork").Process):
    """A program in a folder: `main` in a fork of this process, which has imported everything.

    As the fork has what the fixtures of every test put in the place of parts of the product, it draws no figures of
    runs and takes any images as `cifar10`.

    It writes into `stdout` and `stderr`, which are file descriptors, or where these are None into files of its own.
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
        """Waits for its end; returns what it has written to stdout and to stderr, as `subprocess` does."""
        self.join(PATIENCE)
        if self.is_alive():
            self.kill()
            raise TimeoutError("a program has not ended")
        return self._read(self.output_file), self._read(self.error_file)

    @staticmethod
    def _read(file):
        file.seek(0)
        return file.read()


def start_program(folder, *arguments, main=main, stdout=None, stderr=None):
    """Starts a program in a folder, by default `fedcli` with these arguments."""
    program = Program(folder, arguments, main, stdout, stderr)
    program.start()
    return program
