"""What a user sees, written as text, so that a change of the code shows what it changes for a user.

`python -m tests.net DIR` writes every paper's table, every study's table, the claims, the plans, the pages, the output
of commands and their refusals. `diff -r` of two such folders is the difference that a change makes. It goes when the
code around the core has its final size.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
WIDTH = "200"

TINY = "--rounds 2 --train-examples 240 --local-epochs 1 --device cpu"
RUNS = {
    "fedfm": f"run fedfm --dataset digits {TINY} --seeds 0,1 --out fedfm",
    "scaffold": f"run scaffold --dataset digits {TINY} --num-clients 6 --cohort-size 3 --out scaffold",
    "fedproto": f"run fedproto --protocol fedsa:digits-mixed {TINY} --num-clients 4 --cohort-size 4 --out fedproto",
    "fccl": f"run fccl-plus --protocol fccl:digit-domains {TINY} --public-examples 60 --out fccl",
    "grid": f"run fedprox --dataset digits {TINY} --lr 0.01,0.1 --seeds 0,1 --out grid",
    "grid-again": f"run fedprox --dataset digits {TINY} --lr 0.01,0.1 --seeds 0,1 --out grid --continue",
    "tune": f"tune fedprox --dataset digits {TINY} --grid lr=0.01,0.1 --out tune",
    "tuned": f"run fedprox --dataset digits {TINY} --tuned tune --out tuned",
    "from": "run --from scaffold --rounds 1 --out from",
    "post": f"run fedavg --dataset digits {TINY} --post ccvr --out post",
    "own-method": f"run {ROOT}/docs/examples/my_method.py --dataset digits {TINY} --out own-method",
    "own-parts": (
        f"run fedavg --protocol fedfm:digits --dataset {ROOT}/docs/examples/my_parts.py:blobs --num-clients 4 "
        f"--partition {ROOT}/docs/examples/my_parts.py:by_halves --backbone {ROOT}/docs/examples/my_parts.py:tiny "
        "--rounds 2 --out own-parts"
    ),
    "verify": "verify scaffold",
    "quality": "quality fedfm/seed-0",
    "export": "export fedfm/seed-0",
    "table": "table fedfm grid scaffold",
    "table-csv": "table fedfm grid scaffold --format csv --metric selected,last,best,round:1",
    "table-latex": "table fedfm --format latex",
    "claims-own": "claims --runs fedfm --format csv",
    "report": "report fedfm grid --out report.html",
    "plot": "plot fedfm grid --out curves.png",
    "plot-tsne": "plot fedfm/seed-0 --kind tsne --out tsne.png",
    "plot-confusion": "plot fedfm/seed-0 --kind confusion --out confusion.png",
    "plot-partition": "plot scaffold --kind partition --out partition.png",
}
LOOKS = [
    "--help", "--version", "list", "data list", "show fedfm:niid-1", "show fccl:digits-4", "show ccvr",
    *(
        f"{command} --help"
        for command in (
            "run", "run fedavg", "run fedfm", "resume", "verify", "tune", "tune fedprox", "data", "data import",
            "data download", "data show", "quality", "plot", "report", "export", "table", "claims", "pages", "smoke",
            "check", "bench",
        )
    ),
]  # fmt: skip
REFUSED = [
    "run fedxyz", "run fedfm --dataset nowhere", "run fedfm --lr -1", "run fedfm --rounds 0", "run fedavg --mu 1",
    "run fedfm --dataset cifar10", "run fedfm --dataset digits --batch-size 9999 --drop-last",
    "run fedfm --dataset digits --partition nonsense", "run fedfm --dataset digits --seeds 0,0",
    "run fedfm --dataset digits --backbone nothing", "run fedfm --out fedfm", "run fedfm --dataset digits --out fedfm",
    "run fedfm --dataset digits --device cuda", "run ./nothing.py", "run --config nothing.toml", "run --from nothing",
    "resume nowhere", "resume fedfm/seed-0", "verify nowhere", "table nowhere", "table fedfm:XX",
    "table fedfm --metric nothing", "plot nowhere", "plot fedfm --kind nothing",
    "export nowhere", "quality nowhere", "show nothing", "claims nothing", "tune fedprox --grid lr",
    "data import mine nowhere", "data show nothing", "data download nothing", "check nothing", "bench w9", "nothing",
    "run fedfm --dataset digits --log nothing", "report nowhere --out r.html", "run fedavg --post nothing",
    "run fedprox --tuned nowhere --dataset digits", "run fedmd --protocol fedfm:digits", "smoke nothing",
]  # fmt: skip

# What depends on the machine or the moment, and by what it is replaced.
VOLATILE = [
    (re.compile(re.escape(str(ROOT))), "ROOT"),
    (re.compile(r"\b\d{8}-\d{6}\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)?(?= ?(s|seconds|minutes|hours|GiB|MiB|kB|MB|min)\b)"), "N"),
    (re.compile(r"\b\d+:\d\d(:\d\d)?\b"), "CLOCK"),
    (re.compile(r"process \d+"), "process N"),
    (re.compile(r"[\d,]+ samples/s"), "N samples/s"),
]
TIMES = re.compile(
    r"digest|second|time|started|ended|date|peak|environment|version|commit|host|path|load|hash|file", re.I
)


def steady(text: str, folder: Path) -> str:
    """The text without what depends on the machine or the moment."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, instead in VOLATILE:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def steady_record(value: object) -> object:
    """A record without the entries that depend on the machine or the moment."""
    if isinstance(value, dict):
        return {key: steady_record(part) for key, part in value.items() if not TIMES.search(key) or "sha256" in key}
    if isinstance(value, list):
        return [steady_record(part) for part in value]
    return value


def command_line(folder: Path) -> Callable[[str], str]:
    """What runs a command in this process and gives its exit code and its output."""
    from typer.testing import CliRunner

    from fedcli.cli import app

    def call(line: str) -> str:
        result = CliRunner().invoke(app.app, shlex.split(line), env={"COLUMNS": WIDTH, "TERM": "dumb"})
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            return f"exit {result.exit_code} {type(error).__name__}: {error}\n{steady(result.output, folder)}"
        return f"exit {result.exit_code}\n{steady(result.output, folder)}"

    return call


def write(out: Path) -> None:
    """Writes everything into a folder, which must not exist."""
    from fedcli import registry
    from fedcli.results import pages

    results = ROOT / "results"
    studies = sorted(file.parent for file in results.glob("records/*/intro.md"))

    def put(name: str, text: str) -> None:
        file = out / f"{re.sub(r'[^a-zA-Z0-9_.=-]+', '-', name)}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    put("goldens", hashlib.sha256((ROOT / "tests/goldens.json").read_bytes()).hexdigest() + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.chdir(folder)
        os.environ["FEDCLI_DATA"] = str(folder / "no-data")
        call = command_line(folder)
        put("claims", call("claims --format csv"))
        for module, table in ((table.name.partition(":")[0], table) for table in registry.tables().values()):
            put(f"plan-{module}-{table.name}", call(f"table {table.name} --dry-run --format csv"))
        put("plan-reduced", call("table fedcme:II --dry-run --rounds 5 --local-epochs 1 --seeds 0 --only K=50,M=10"))
        for study in studies:
            put(f"study-{study.name}", call(f"table {study} --format csv"))
        for path, text in pages.pages(results).items():
            put(f"page-{path}", steady(text, folder))
        for line in LOOKS:
            put(f"look-{line}", call(line))
        for method in registry.methods():
            put(f"look-show-{method}", call(f"show {method}"))
        for name, line in RUNS.items():
            put(f"run-{name}", call(line))
        for line in REFUSED:
            put(f"refused-{line}", call(line))
        for file in sorted(folder.rglob("record.json")):
            record = steady_record(json.loads(file.read_text()))
            put(f"record-{file.parent.relative_to(folder)}", json.dumps(record, indent=1) + "\n")
        left = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        put("files", steady("\n".join(left), folder))
        os.chdir(ROOT)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    with mock.patch.dict(os.environ):
        write(folder)
