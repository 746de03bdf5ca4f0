"""What a user's file changes in the process, on which other runs depend, is refused by name and put back."""

from pathlib import Path

import pytest
import torch

import fedcli
from fedcli import isolation, registry
from fedcli.errors import UserError
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from fedcli.userfiles import find_user_function, import_file
from tests.commands import error_of
from tests.run_options import SHORT_RUN
from tests.user_errors import raises_user_error

CHANGES = {
    "torch.set_default_dtype": "torch.set_default_dtype(torch.float64)",
    "torch.set_default_device": "torch.set_default_device('meta')",
    "torch.set_num_threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "torch.set_grad_enabled": "torch.set_grad_enabled(False)",
    "torch.use_deterministic_algorithms": "torch.use_deterministic_algorithms(True)",
    "torch.set_float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cudnn.benchmark": "torch.backends.cudnn.benchmark = True",
    "torch.backends.cuda.enable_flash_sdp": "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.nn.functional.cross_entropy": "torch.nn.functional.cross_entropy = print",
    "torch.nn.Linear.forward": "torch.nn.Linear.forward = print",
    "torch.Tensor.mean": "torch.Tensor.mean = print",
    "torch.relu": "del torch.relu",
    "numpy.mean": "import numpy; numpy.mean = print",
    "numpy.seterr": "import numpy; numpy.seterr(all='raise')",
    "random._test": "import random; names = vars(random); names['test'] = names.pop('_test')",  # the last of its names
    "fedcli.core.aggregate.weighted_mean": "import fedcli.core.aggregate as a; a.weighted_mean = print",
    "fedcli.core.federation.Federation.lr": "from fedcli.core.federation import Federation as F; F.lr = print",
    "fedcli.data.dataset.Dataset.num_classes": (
        "from fedcli.data.dataset import Dataset as D; D.num_classes = property(len)"
    ),
    "fedcli.core.optimizers.BETA_1": "import fedcli.core.optimizers as c; c.BETA_1 = 0.5",
    "fedcli.core.backbones.BACKBONES['cnn-small']": (
        "from fedcli.core.backbones import BACKBONES as b; b['cnn-small'] = b['vit-tiny']"
    ),
    "a hook on all modules": "torch.nn.modules.module.register_module_forward_hook(print)",
    "os.chdir": "import os; os.chdir('/')",
    "signal.signal(SIGTERM, ...)": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """An empty working folder; the methods are read, which import much that is not the user's."""
    monkeypatch.chdir(tmp_path)
    registry.methods()
    return tmp_path


def test_of_several_files_none_is_blamed_alone():
    num_threads = torch.get_num_threads()
    fault = r"one of the files 'a\.py', 'b\.py' changes torch\.set_num_threads \(got"
    with pytest.raises(UserError, match=fault), isolation.unchanged(["a.py", "b.py"]):
        torch.set_num_threads(num_threads + 1)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_file_changes_at_import_is_refused_by_name_and_put_back(name, working_folder):
    cross_entropy = torch.nn.functional.cross_entropy
    mean = torch.Tensor.mean
    relu = torch.relu
    Path("mine.py").write_text(f"import torch\n{CHANGES[name]}\ndef part(): pass\n")

    with raises_user_error(f"mine.py' changes {name}", "leave it as"):
        import_file(str(Path("mine.py").resolve()), "metric")
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled()
    assert torch.nn.functional.cross_entropy is cross_entropy
    assert torch.Tensor.mean is mean
    assert torch.relu is relu
    assert Path.cwd() == working_folder


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_function_of_a_file_changes_when_it_is_called_is_refused_by_name(name):
    Path("mine.py").write_text(f"import torch\ndef part():\n    {CHANGES[name]}\n")
    with raises_user_error(f"mine.py' changes {name}"):
        find_user_function("mine.py:part", "metric")()
    Path("mine.py").write_text("def part(): return 1\n")
    assert find_user_function("mine.py:part", "metric")() == 1


def test_a_library_that_is_imported_may_wrap_its_own_functions():
    was = torch.manual_seed
    text = (
        "import functools, torch\nwas = torch.manual_seed\n"
        "code = compile('import functools\\n@functools.wraps(was)\\ndef now(*a): return was(*a)', FILE, 'exec')\n"
        "exec(code, globals())\ntorch.manual_seed = now\n"
    )

    Path("mine.py").write_text(text.replace("FILE", repr(str(Path(torch.__file__).with_name("x.py")))))
    try:
        import_file(str(Path("mine.py").resolve()), "metric")  # as torch._dynamo does
    finally:
        torch.manual_seed = was

    Path("mine.py").write_text(text.replace("FILE", "'mine.py'"))
    with raises_user_error("changes torch.manual_seed"):
        import_file(str(Path("mine.py").resolve()), "metric")


METHOD = """
from dataclasses import replace
import torch
from fedcli.papers.baselines import fedavg
def run_round(state, cohort, fed, config):
    if cohort.round == 1:
        torch.set_default_dtype(torch.float64)
    return fedavg.run_round(state, cohort, fed, config)
def init(fed, config):
    CHANGE
    return fedavg.init(fed, config)
METHOD = replace(fedavg.METHOD, name="mine", run_round=run_round, init=init, default_protocol="fedfm:digits")
"""


def test_what_a_method_changes_in_a_round_ends_the_run_before_the_round_counts():
    Path("mine.py").write_text(METHOD.replace("CHANGE", ""))
    with raises_user_error("mine.py' changes torch.set_default_dtype (got"):
        fedcli.run("./mine.py", out="run", **SHORT_RUN)
    assert torch.get_default_dtype() == torch.float32
    record = read_record(Path("run"))
    assert record["status"] == "failed"
    assert len(record["rounds"]) == 1

    Path("mine.py").write_text(METHOD.replace("CHANGE", "torch.set_num_threads(7)"))
    with raises_user_error("mine.py' changes torch.set_num_threads (got 7"):
        fedcli.run("./mine.py", out="new", **SHORT_RUN)
    assert not Path("new").exists()


def test_a_file_does_not_change_the_run_of_another_method_beside_it():
    Path("mine.py").write_text("import torch\ntorch.set_default_dtype(torch.float64)\n" + METHOD.replace("CHANGE", ""))
    options = flags_of(SHORT_RUN)
    error = error_of("run", "./mine.py,fedavg", *options, "--out", "runs")
    assert "changes torch.set_default_dtype (got torch.float64, was torch.float32)" in error
