"""Command lines in the real grammar of commands and options, with values that are right, at an edge, or mad."""

import dataclasses
from pathlib import Path

from hypothesis import strategies as st

from fedcli import registry
from fedcli.figures import charts
from fedcli.runs.config import RunConfig, recorded_fields

SMALL = {
    "dataset": "digits", "train_examples": "60", "num_clients": "4", "cohort_size": "2", "rounds": "1", "device": "cpu",
    "batch_size": "16", "local_epochs": "1",
}  # fmt: skip
FILES = {
    "raises.py": "raise RuntimeError('two\\nlines')\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "late.py": "import sys\nfrom dataclasses import replace\nfrom fedcli.papers.baselines import fedavg\n"
    "METHOD = replace(fedavg.METHOD, name='late', run_round=lambda *given: sys.exit(0))\n",
    "syntax.py": "def\n",
    "empty.py": "",
}
MAD = (
    "", " ", "-", "--", "0", "-1", "1_0", "٣", "1e999", "-1e-999", "nan", "inf", "1e300", "1e39", "9" * 24, "9" * 400,
    "9" * 5000, "x" * 300, "a/" * 3000, "/etc/passwd", "/dev/null", ".", "..", "/", "\udcff", "\x1b[31m", "$\\frac$",
    "raises.py:x", "./exits.py:x", "empty.py:METHOD", "./none.py:f", "true", "None", "1e-999999", "1e9999999999",
    "auto",
)  # fmt: skip
PARTITIONS = ("iid", "dirichlet:0.5", "classes:2", "classes:20", "dominant:1:share=1e-999999", "missing:3", "domains",
              "writers", "dirichlet:0.5:min=" + "9" * 30, "dominant:1:share=4/0", "domains+iid")  # fmt: skip
mad = st.one_of(st.sampled_from(MAD), st.text(st.characters(blacklist_characters="\x00", codec="utf-8"), max_size=8))
whole = st.one_of(st.integers(0, 5), st.integers(-(2**70), 2**70)).map(str)
number = st.one_of(st.floats(0, 2), st.floats()).map(str)


def values(field: dataclasses.Field) -> st.SearchStrategy[str]:
    """Values for an option, as they are typed."""
    if field.name == "partition":
        return st.sampled_from(PARTITIONS) | mad
    if field.metadata["choices"]:
        return st.sampled_from(field.metadata["choices"]) | mad
    kind = str(field.type)
    likely = whole if "int" in kind else number if "float" in kind else mad
    return likely | mad


@st.composite
def runs(draw: st.DrawFn) -> list[str]:
    """`run` or `tune` of a method, with up to four options."""
    command = draw(st.sampled_from(("run", "run", "run", "tune")))
    name = draw(st.sampled_from(sorted(registry.methods())) | st.sampled_from([f"./{file}" for file in FILES]) | mad)
    known = registry.methods().get(name)
    fields = recorded_fields(known) if known else {field.name: field for field in dataclasses.fields(RunConfig)}
    given = dict(SMALL)
    for option in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)):
        given[option] = draw(values(fields[option]))
    for option in draw(st.lists(st.sampled_from(("out", "seeds", "tuned", "grid")), max_size=1)):
        given[option] = draw(mad | st.sampled_from(("0,1", "lr=0.1,0.1", "rounds=1,2")))
    line = [command, name]
    for option, value in given.items():
        flag = "--" + option.replace("_", "-")
        if option in fields and fields[option].type is bool:
            line.append(flag if value != "0" else "--no-" + flag[2:])
        else:
            line += draw(st.sampled_from(([flag, value], [f"{flag}={value}"])))
    return line


LOOKS = {
    "table": (
        "--format", "--metric", "--page", "--out", "--dry-run", "--only", "--seeds", "--rounds", "--jobs", "--runs",
    ),
    "plot": ("--kind", "--out", "--x", "--method"), "quality": ("--client", "--clients", "--method"),
    "resume": ("--method", "--changed-method"), "verify": ("--out", "--device", "--method"), "show": (),
    "data show": ("--partition", "--num-clients", "--partition-seed", "--train-examples", "--out"), "data import": (),
    "data list": (), "pages": (), "list": (), "check": ("--law", "--device"),
}  # fmt: skip
PLACES = ("run", ".", "none", "fedfm:III", "fedsa:IV", "fedavg", "digits", "run/record.json",
          "run/checkpoint.safetensors")  # fmt: skip
FLAGS = ("--dry-run", "--clients", "--changed-method")


@st.composite
def looks(draw: st.DrawFn) -> list[str]:
    """Any other command, with places and up to two options; a paper's table is only planned."""
    command = draw(st.sampled_from(sorted(LOOKS)))
    line = [*command.split(), *draw(st.lists(st.sampled_from(PLACES) | mad, max_size=2))]
    if command == "check":
        line[1:1] = ["fedavg", "--law", "5"]
    if command == "table" and any(":" in text for text in line):
        line.append("--dry-run")
    for flag in draw(st.lists(st.sampled_from(LOOKS[command] or ("--help",)), max_size=2, unique=True)):
        if flag in line:
            continue
        likely = st.sampled_from(("0", "1", "iid", "csv", "best", "round", *charts()))
        line += [flag] if flag in (*FLAGS, "--help") else [flag, draw(likely | mad)]
    return line


lines = st.one_of(runs(), runs(), looks())


def prepare(folder: Path) -> None:
    """Writes the files that the lines name."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
