"""How many of the machine's cores a process may use."""

import math
import os
from pathlib import Path

import torch

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def threads_of_run() -> int:
    """Returns how many threads a run on a CPU has: PyTorch's, and unless they are asked for no more than cores."""
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else min(threads, allowed_cores())


def allowed_cores(groups: Path = GROUPS, listing: Path = OWN_GROUPS) -> int:
    """Returns how many cores this process may use: those that it is bound to, and no more than a container leaves it.

    Args:
        groups: Where the system shows its control groups, of either version.
        listing: Which of them are this process's.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / "cpu" if controllers else groups  # of the first version each kind has its own
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                cores = int(min(cores, _quota(folder)))
    return max(cores, 1)


def _quota(folder: Path) -> float:
    """Returns how many cores a control group may keep busy, a part of one counted as one; infinite without a limit."""
    of_version_2 = folder / "cpu.max"  # it has quota and period
    of_version_1 = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
    if of_version_2.is_file():
        quota, period = of_version_2.read_text(encoding="utf-8").split()
    elif all(file.is_file() for file in of_version_1):
        quota, period = [file.read_text(encoding="utf-8").strip() for file in of_version_1]
    else:
        return math.inf
    return math.ceil(int(quota) / int(period)) if quota.isdecimal() else math.inf
