"""The names and colours of settings in figures, and the words of titles."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from fedcli.results.groups import SeedGroup, find_shared_settings
from fedcli.results.words import describe_data, name_method
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import reductions

# Okabe and Ito's colours, which colour-blind readers tell apart, and five more; their yellow is too pale on white.
LINE_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
    "#882255", "#999933", "#888888", "#6A3D9A", "#8B4513",
)  # fmt: skip
NO_LABELS: Mapping[str, str] = {}


def choose_colours(names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Chooses a different colour for each name, and none of those that are `taken`, in hexadecimal."""
    names = list(dict.fromkeys(names))
    shades = [shade for shade in LINE_COLOURS if shade.lower() not in taken]
    if len(names) > len(shades):
        places = np.linspace(0.02, 0.98, len(names) + len(taken))
        shades = [shade for shade in map(to_hex, matplotlib.colormaps["turbo"](places)) if shade not in taken]
    return dict(zip(names, shades, strict=False))


def find_sharers(leaderboards: Sequence[Sequence[SeedGroup]]) -> dict[str, str]:
    """Finds with whom each setting shares its look, by its title.

    That is the method where no leaderboard has several settings of a method, and else nobody but the title itself.
    """
    settings = list(chain.from_iterable(leaderboards))
    if all(map(_has_one_a_method, leaderboards)):
        return {setting.title: setting.method for setting in settings}
    return {setting.title: setting.title for setting in settings}


def choose_setting_colours(leaderboards: Sequence[Sequence[SeedGroup]], taken: Collection[str] = ()) -> dict[str, str]:
    """Chooses a colour for each setting, by its title, and none of those that are `taken`; see `find_sharers`."""
    sharer_of_setting = find_sharers(leaderboards)
    shades = choose_colours(sharer_of_setting.values(), taken)
    return {title: shades[sharer] for title, sharer in sharer_of_setting.items()}


def _has_one_a_method(settings: Sequence[SeedGroup]) -> bool:
    """Whether no two settings are of one method."""
    return len({setting.method for setting in settings}) == len(settings)


def name_setting(setting: SeedGroup, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Names a setting: its label, with the method's name as in its paper unless the user has given a label.

    `labels` are the user's, by the label of the setting or by the name of its method.
    """
    if setting.title in labels:
        return labels[setting.title]
    name = labels.get(setting.method, name_method(setting.first))
    return name + setting.title.removeprefix(setting.method)


def describe_runs(records: Sequence[Record], *more: str) -> str:
    """Describes what runs share: "Digits, Dirichlet 0.5, seed 0; reduced: rounds 4 of 100"."""
    shared = find_shared_settings(records)
    title = describe_data(shared.get("dataset", ""), shared.get("partition", ""), *more)
    smaller = {", ".join(reductions(record).values()) for record in records} - {""}
    return f"{title}; reduced: {' or '.join(sorted(smaller))}" if smaller else title
