"""Options and their values in words: in help, and in what a protocol fixes."""

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from fedcli.declarations import spec_of


def option_help(field: Field, defaults: Mapping[str, Any]) -> str:
    """Write the help of an option; its default is that of a run with no option given, or else of its field."""
    text = spec_of(field).help_text
    value = defaults.get(field.name, field.default)
    return text if value is None else f"{text} [default: {_value_word(value)}]"


def settings_words(settings: Mapping[str, Any]) -> str:
    """Write values of options by their names: "batch size 64, drop last on"."""
    return ", ".join(f"{name.replace('_', ' ')} {_value_word(value)}" for name, value in settings.items())


def _value_word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
