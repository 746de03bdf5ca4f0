"""Which experiment a run is: its settings, their key, in what two runs differ, and whether the code would repeat it.

Only here is decided whether two runs are the same experiment, and whether a run belongs to a table's cell, a grid's
point, a claim's side or a folder to go on in.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.core import NUMERICS, NUMERICS_WITH_DEAD_TAPS, partition
from fedcli.core.backbones import have_dead_taps
from fedcli.data.datasets import num_images, num_images_of_record
from fedcli.declarations import SELECTIONS, Method, fields_of, in_declared_type, spec_of
from fedcli.errors import UserError
from fedcli.registry import methods, posts
from fedcli.runs.options import RunConfig, filled_up, recorded_fields
from fedcli.runs.origins import of_other_option
from fedcli.runs.resolve import Setup
from fedcli.runs.schema import Record
from fedcli.userfiles import first_hash, has_several_hashes, is_hash_of, last_hash, replace_paths, user_paths


class Difference(NamedTuple):
    """The values in which two runs differ, or a run as it would go on now from its last rounds; None for none."""

    value: Any  # of the run, or now
    other_value: Any  # of the one that it is compared with, or of the last rounds


Settings = dict[str, Any]  # by name
Differences = dict[str, Difference]  # by the name of the setting
# Options on which no result depends, and the seed, which stands beside the settings.
NOT_SETTINGS = (
    "seed", "device", "clients_per_chunk", "state_memory", "per_class", "per_client_every", "drift_every",
    "checkpoint_every", "keep_states",
)  # fmt: skip
FIRST_SETTINGS = ("method", "protocol", "dataset", "partition")  # what is told first
AS_SEED = "as seed"
SIZES = {  # options that a run can have smaller than its protocol says, in words
    "rounds": "rounds", "local_epochs": "local epochs", "num_clients": "clients", "cohort_size": "clients in a round",
    "train_examples": "training images", "public_examples": "public images",
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """What the settings of a run follow from, of one that has a record or of one that is planned.

    Attributes:
        method: The method's name.
        method_hash: Of the user's file that declares the method; None for a registered one.
        protocol: The protocol's name.
        dataset: The data set's name.
        options: All options by name; of a record those that it has.
        has_own_partition_seed: Whether the partition's seed is another one than the run's.
        num_images: How many images are divided among the clients; None where the options or the data set say it.
        selection: The rule for the headline.
    """

    method: str
    method_hash: str | None
    protocol: str
    dataset: str
    options: Mapping[str, Any]
    has_own_partition_seed: bool
    num_images: int | None
    selection: str

    @classmethod
    def from_record(cls, record: Record) -> "Experiment":
        """Returns the experiment of a run that has begun."""
        return cls(
            method=record["method"],
            method_hash=None if is_packaged(record) else record["method_hash"],
            protocol=record["protocol"],
            dataset=record["dataset"],
            options=record["config"],
            has_own_partition_seed=record["origin"].get("partition_seed") != "seed",
            num_images=record["partition"].get("images"),
            selection=record["summary"]["selection"],
        )

    @classmethod
    def from_setup(cls, setup: Setup) -> "Experiment":
        """Returns the experiment of a planned run.

        Loads a user's data set where a setting depends on how many images it has: a record of the same run has the
        number, and both must have the same settings.
        """
        method = setup.method
        is_registered = methods().get(method.name) is method
        images = setup.config.train_examples
        if images is None and partition.takes_remainder(setup.config.partition):
            images = num_images(setup.dataset, setup.config.local_test)
        return cls(
            method=method.name,
            method_hash=None if is_registered else method.file_hash,
            protocol=setup.protocol.name,
            dataset=setup.dataset,
            options=setup.all_options(),
            has_own_partition_seed=setup.origins["partition_seed"] != of_other_option("seed"),
            num_images=images,
            selection=setup.selection,
        )

    def settings(self) -> Settings:
        """Everything that says which experiment a run is: all options on which its result can depend.

        Not the seed, the machine, the numerics and the fingerprints of images and partition, which differ between runs
        of one experiment, nor options that are not used beside the others. An option that is newer than the record has
        the value that runs had before it. A user's file counts by its name, and a method's also by its hash.
        """
        # No user's file is imported for a record.
        method = methods().get(self.method) if self.method_hash is None else None
        config_types = [RunConfig] if method is None else [RunConfig, method.config]
        options = filled_up(self.options, *config_types)
        unused = self._unused_options(options, config_types)
        if not self.has_own_partition_seed:
            options["partition_seed"] = AS_SEED
        settings = {
            "method": self.method,
            "protocol": self.protocol,
            "dataset": self.dataset,
            "partition": _canonical_partition(options["partition"]),
        }
        declared = fields_of(*config_types)
        for name, value in options.items():
            if name not in settings and name not in NOT_SETTINGS and name not in unused:
                settings[name] = in_declared_type(declared[name], value) if name in declared else value
        settings["selection"] = self.selection
        if self.method_hash is not None:
            settings["code"] = self.method_hash[:8]
        file_names = {path: Path(path).name for path in user_paths(options.values())}  # a file may be moved
        return {name: replace_paths(value, file_names) for name, value in settings.items()}

    def _unused_options(self, options: Mapping[str, Any], config_types: Sequence[type]) -> set[str]:
        """The options, of these dataclasses and of steps after the last round, that change nothing beside the others.

        Their values are those of `options`, which lack none.
        """
        unused = {name for name, field in fields_of(*config_types).items() if spec_of(field).is_idle(options)}
        if not partition.leaves_remainder(options["partition"], options["num_clients"], self._images_of(options)):
            unused.add("remainder")
        if options["post"] is None:
            unused.update(fields_of(*(step.config for step in posts().values())))
        if options["public_dataset"] is None:
            unused.update(name for name in options if name.startswith("public_"))
        return unused

    def _images_of(self, options: Mapping[str, Any]) -> int | None:
        """Returns the images that are divided; None where only a user's file or absent images would tell."""
        images = self.num_images or options["train_examples"]
        if images is None and partition.takes_remainder(options["partition"]):
            images = num_images_of_record(self.dataset, options["local_test"])
        return images


def _canonical_partition(flag: str) -> str:
    """Returns a partition's flag in its one spelling, dirichlet:0.5, where older records also have dirichlet:.5."""
    if user_paths([flag]):
        return flag
    try:
        return partition.from_flag(flag).flag
    except UserError:  # there is no such partition any more
        return flag


def settings_of(record: Record) -> Settings:
    """Returns the settings of a run that has begun, see `Experiment.settings`."""
    return Experiment.from_record(record).settings()


def planned_settings(setup: Setup) -> Settings:
    """Returns the settings of a planned run, see `Experiment.settings`."""
    return Experiment.from_setup(setup).settings()


def is_packaged(record: Record) -> bool:
    """Whether a run's method is a registered one and not of a user's file."""
    return record["method_source"] == record["method"]


def numerics_of(method: Method, dead_taps: bool) -> dict[str, int]:
    """Returns the versions of the arithmetic of core and method, raised when code changes results.

    The core has one of its own for networks with `dead_taps`.
    """
    return {"core": NUMERICS_WITH_DEAD_TAPS if dead_taps else NUMERICS, "method": method.numerics}


def current_numerics(record: Record, method: Method) -> dict[str, int]:
    """Returns the current versions for a run, see `numerics_of`.

    Builds its networks, of which some may have dead taps; the user must have named those of a user's file.
    """
    dead_taps = False
    if "input" in record["model"]:
        channels, image_size, _ = record["model"]["input"]
        dead_taps = have_dead_taps(record["config"]["backbone"], channels, image_size)
    return numerics_of(method, dead_taps)


def outdated(record: Record, method: Method) -> bool:
    """Whether the code would not repeat a run: a user's file, options or numerics are others now.

    The file of a registered method may change its words; what it computes is counted by `numerics`. Options beside a
    step of a user's file may be the step's, which is not imported for a record.
    """
    lost_options = record["config"].keys() - recorded_fields(method).keys()
    if user_paths([record["config"].get("post")]):
        lost_options = set()
    has_other_start = record["numerics"] != current_numerics(record, method)
    return bool(lost_options or has_other_start or current_code_differences(record, method))


def current_code_differences(record: Record, method: Method) -> Differences:
    """In what the code as it is now differs from that of a run's last rounds, by words for it.

    A registered method is known by its numerics, a user's file by its hash.
    """
    differing = {}
    now = current_numerics(record, method)
    was = last_numerics(record)
    if now != was:
        differing["numerics"] = Difference(now, was)
    if not is_packaged(record) and not is_hash_of(record["method_hash"], method.file):
        differing["hash"] = Difference(method.file_hash, last_hash(record["method_hash"]))
    return differing


def last_numerics(record: Record) -> dict[str, int]:
    """The numerics of a run's last rounds, to which the user has consented where they are not those of its first."""
    consented = [change["numerics"] for change in record["changed"] if "numerics" in change]
    return consented[-1] if consented else record["numerics"]


def recorded_code_changes(record: Record) -> list[str]:
    """Returns what of the code has changed between the rounds of a run: `["its method changed after round 7"]`."""
    changes = [f"{change['what']} changed after round {change['round']}" for change in record["changed"]]
    if not changes and not is_packaged(record) and has_several_hashes(record["method_hash"]):  # older ones say no round
        changes = ["its method changed when it was resumed"]
    return changes


def recorded_changes(record: Record) -> list[str]:
    """Returns what of code, machine and versions has changed between the rounds of a run, in words."""
    moves = [f"its machine or versions changed after round {move['round']}" for move in record["moved"]]
    return [*recorded_code_changes(record), *moves]


def key_of(settings: Settings) -> str:
    """Returns a hash of settings; two runs with the same are the same experiment."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def identity_of(record: Record) -> str:
    """SHA-256 over a run's method, configuration, data and partition.

    A user's file counts by its hash when the run began, so that it may be moved.
    """
    hashes = {path: first_hash(recorded) for path, recorded in record["user_files"].items()}
    config = {name: replace_paths(value, hashes) for name, value in record["config"].items()}
    return digest_of([record["method"], config, record["dataset_fingerprint"], record["partition"]["fingerprint"]])


def digest_of(value: Any) -> str:
    """SHA-256 over a value's JSON with sorted keys and without spaces."""
    plain = json.loads(json.dumps(value))  # numbers as keys become texts, which sort in another order
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(settings: Settings, other_settings: Settings) -> Differences:
    """Returns the settings in which two runs differ."""
    differing = {}
    for name in {**other_settings, **settings}:
        value = settings.get(name)
        other_value = other_settings.get(name)
        if value != other_value:
            differing[name] = Difference(value, other_value)
    return differing


def differences_from_plan(
    record: Record, settings: Settings, planned_settings: Settings, needed_rounds: str
) -> Differences:
    """Returns the settings in which a run differs from a planned one, as far as a number of it needs them.

    A run with a step after its last round also matches plans without one.

    Args:
        record: Of the run.
        settings: Its settings.
        planned_settings: Those of the planned run.
        needed_rounds: Those that the number is from: "every" tested one, the "selected" or the "last".
    """
    compared_settings = settings
    if planned_settings["post"] is None and settings["post"] is not None:
        compared_settings = _settings_without_post(record, planned_settings)
    differing = differences(compared_settings, planned_settings)
    seeds = differing.get("partition_seed")
    if seeds is not None and {seeds.value, seeds.other_value} == {record["seed"], AS_SEED}:
        del differing["partition_seed"]  # one names the seed that the other has as its own
    selection = SELECTIONS[record["summary"]["selection"]]
    needs_last_round = needed_rounds == "last" or (needed_rounds == "selected" and selection.is_of_last_round)
    if needs_last_round:
        differing.pop("eval_every", None)  # whether other rounds are tested changes nothing
    return differing


def _settings_without_post(record: Record, planned_settings: Settings) -> Settings:
    """Returns the settings of a run as if it had no step after its last round, and no option of that step.

    Those of a user's step are known by their absence from a plan of the same method without it.
    """
    experiment = Experiment.from_record(record)
    settings = replace(experiment, options={**experiment.options, "post": None}).settings()
    if user_paths([record["config"].get("post")]):
        run_options = fields_of(RunConfig)
        of_step = {name for name in experiment.options if name not in run_options and name not in planned_settings}
        settings = {name: value for name, value in settings.items() if name not in of_step}
    return settings


def is_smaller(name: str, value: Any, full: Any) -> bool:
    """Whether an option is a size, and smaller than in full; None stands for all."""
    return name in SIZES and value is not None and (full is None or value < full)
