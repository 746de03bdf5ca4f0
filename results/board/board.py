"""One board: every method on the built-in digits, ten seeds each, by options that were tuned on an eleventh.

    python results/board/board.py                                 # tunes what is not tuned yet
    fedcli table ./results/board/board.py:global --jobs 2         # methods that train one global model, two protocols
    fedcli table ./results/board/board.py:personal --jobs 2       # methods that leave every client its own model

Each method gets three learning rates, and with the best of them up to four values of the one option that says most of
it, its weight as a rule; `GRIDS` has them. What wins on held-out training examples stands in `options.json`. The board
does not compare papers: the images are few and small, and the set-ups are no paper's.
"""

import json
from pathlib import Path
from typing import Any

from fedcli import Cell, Table

HERE = Path(__file__).parent
SEEDS = tuple(range(10))
RATES = {"fedfa:digits": (0.1, 0.2, 0.4), "fedfm:digits": (0.025, 0.05, 0.1), "fedsa:digits-mixed": (0.01, 0.02, 0.05)}
MATCHING = {"match_weight": (0.1, 1.0, 5.0, 50.0)}
GLOBAL: dict[str, dict[str, tuple[float, ...]]] = {
    "fedavg": {},
    "fedavgm": {"server_momentum": (0.5, 0.7, 0.9)},
    "fedprox": {"proximal_weight": (0.001, 0.01, 0.1, 1.0)},
    "scaffold": {"server_lr": (0.5, 1.0)},
    "feddyn": {"alpha": (0.001, 0.01, 0.1, 1.0)},
    "fednova": {},
    "moon": {"contrastive_weight": (0.1, 1.0, 5.0, 10.0)},
    "fedproc": {"temperature": (0.1, 0.5, 1.0)},
    "fedproto-general": {"prototype_weight": (0.01, 0.1, 1.0, 10.0)},
    "fedrs": {"scaling": (0.25, 0.5, 0.75)},
    "fedfm": MATCHING,
    "fedfm-lite": MATCHING,
    "fedprox-fm": MATCHING,
    "fednova-fm": MATCHING,
    "moon-fm": MATCHING,
    "fedfa": {"anchor_weight": (0.01, 0.1, 1.0, 10.0)},
    "fedcme": {"alignment_weight": (0.001, 0.01, 0.1, 1.0)},
}
PERSONAL: dict[str, dict[str, tuple[float, ...]]] = {
    "local": {},
    "lg-fedavg": {},
    "fedproto": {"prototype_weight": (0.1, 1.0, 10.0)},
    "fedtgp": {"prototype_weight": (0.1, 1.0, 10.0)},
    "feddistill": {"distillation_weight": (0.1, 1.0, 10.0)},
    "fedgen": {"generator_weight": (0.1, 1.0, 10.0)},
    "fml": {"private_task_share": (0.25, 0.5, 0.75)},
    "fedkd": {"distillation_weight": (0.1, 1.0, 10.0)},
    "fedmd": {},
    "feddf": {"distillation_lr": (0.0001, 0.001, 0.01)},
    "feddf-client": {"distillation_lr": (0.0001, 0.001, 0.01)},
    "rhfl": {"reverse_weight": (0.1, 1.0, 10.0)},
    "fedmatch": {"consistency_weight": (0.001, 0.01, 0.1)},
    "fccl": {"distillation_weight": (0.1, 1.0, 10.0)},
    "fccl-plus": {"similarity_weight": (0.3, 3.0, 30.0)},
    "fedsa": {"contrastive_weight": (0.01, 0.1, 1.0)},
}
GRIDS = {"fedfa:digits": GLOBAL, "fedfm:digits": GLOBAL, "fedsa:digits-mixed": PERSONAL}
PUBLIC = {"public_dataset": "photos", "public_examples": 500, "public_batch_size": 125}
WITH_PUBLIC = ("fedmd", "feddf", "feddf-client", "rhfl", "fedmatch", "fccl", "fccl-plus")


def fixed(method: str, protocol: str) -> dict[str, Any]:
    """Options of a method that are not tuned."""
    return {"protocol": protocol, "dataset": "digits", **(PUBLIC if method in WITH_PUBLIC else {})}


def tuned() -> dict[str, dict[str, dict[str, Any]]]:
    """The options that were chosen, by protocol and method."""
    file = HERE / "options.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def table(name: str, title: str, protocols: dict[str, str]) -> Table:
    """A table of every method's headline under a protocol, and of its mean over the last tenth of the rounds."""
    options, cells = tuned(), []
    for protocol, heading in protocols.items():
        for method in GRIDS[protocol]:
            settings = {**fixed(method, protocol), **options.get(protocol, {}).get(method, {})}
            cells.append(Cell(method, heading, method, settings))
            cells.append(Cell(method, f"{heading}, last tenth", method, settings, "last-tenth"))
    return Table(name, title, ("Board", name), tuple(cells), SEEDS)


TABLES = (
    table("global", "One global model", {"fedfa:digits": "Two classes a client", "fedfm:digits": "Dirichlet 0.5"}),
    table("personal", "Models of their own, two networks", {"fedsa:digits-mixed": "Dirichlet 0.1"}),
)


def main() -> None:
    """Tunes every method that has no options yet, and keeps what wins."""
    from fedcli.results.tune import tune

    chosen = tuned()
    for protocol, grids in GRIDS.items():
        for method, own in grids.items():
            if method in chosen.get(protocol, {}):
                continue
            best = {}
            for option, values in {"lr": RATES[protocol], **own}.items():
                out = Path("runs/board/tune") / protocol.replace(":", "-") / method / option
                text = f"{option}={','.join(map(str, values))}"
                trials, _ = tune(method, [text], out=out, **fixed(method, protocol), **best)
                best |= trials[0].values
            chosen.setdefault(protocol, {})[method] = best
            (HERE / "options.json").write_text(json.dumps(chosen, indent=1) + "\n")
            print(f"{protocol} {method}: {best}, {trials[0].accuracy:.4f} on held-out examples", flush=True)


if __name__ == "__main__":
    main()
