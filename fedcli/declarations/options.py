"""Options: a field of a dataclass that says all of an option, and the check of a value."""

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedcli.declarations.checks import require_texts
from fedcli.declarations.names import flag_of
from fedcli.errors import UserError

START = "start_round"  # an option of this name says after how many rounds a method's own term starts
LARGEST = {int: 2**31 - 1, float: 3e38}  # of options without a bound of their own; what PyTorch takes as float32
SPEC = "option"  # the key of `OptionSpec` in the metadata of a field


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """What an option is, as `option` declares it, which explains each of these."""

    default: Any
    help: str
    symbol: str
    source: str
    unit: str
    low: float | None
    high: float | None
    open_low: bool
    open_high: bool
    off: Any
    choices: tuple[str, ...]
    tune: tuple[float, ...]
    before: Any
    only_with: Mapping[str, tuple[str, ...]]

    @property
    def range_text(self) -> str:
        """The values that the option allows; empty for any."""
        if self.choices:
            return " or ".join(self.choices)
        bounds = []
        if self.low is not None:
            sign = ">" if self.open_low else ">="
            bounds.append(f"{sign} {self.low}")
        if self.high is not None:
            sign = "<" if self.open_high else "<="
            bounds.append(f"{sign} {self.high}")
        return " and ".join(bounds)

    @property
    def need_text(self) -> str:
        """The options and values with which the option is used; empty for any."""
        needs = self.only_with.items()
        return " and ".join(f"{flag_of(name)} {' or '.join(values)}" for name, values in needs)

    @property
    def help_text(self) -> str:
        """The help of the option in a line."""
        text = self.help
        origin = ", ".join(filter(None, (self.symbol, self.source, self.unit)))
        if origin:
            text += f" ({origin})"
        if self.range_text:
            text += f"; {self.range_text}"
        if self.off is not None:
            text += f"; {self.off} switches it off"
        if self.only_with:
            text += f"; for {self.need_text}"
        return f"{text}."

    def is_idle(self, values: Mapping[str, Any]) -> bool:
        """Whether the option is not used beside these values of the others."""
        return any(values.get(name) not in needed for name, needed in self.only_with.items())

    def check(self, flag: str, value: Any, kind: type) -> None:
        """Refuses a value that the option does not allow.

        Args:
            flag: The option's name in the message.
            value: Of a type that the option has, or a whole number in the place of a float.
            kind: That type.

        Raises:
            UserError: It is none of the choices or outside of the range.
        """
        is_none_of_choices = value is not None and value not in self.choices
        if self.choices and is_none_of_choices:
            raise UserError(f"{flag} must be {self.range_text} (got '{value}'); choose one of them.")
        if kind in LARGEST:
            self._check_range(flag, value, LARGEST[kind])

    def _check_range(self, flag: str, value: float, largest: float) -> None:
        """Refuses a number outside of the range, or larger than PyTorch takes."""
        low = -largest if self.low in (None, -math.inf) else self.low
        high = largest if self.high in (None, math.inf) else self.high
        is_at_open_end = (value == low and self.open_low) or (value == high and self.open_high)
        is_inside = low <= value <= high and not is_at_open_end  # a NaN is not
        if not is_inside:
            is_too_large = not abs(value) <= largest
            bounded = replace(self, low=low, high=high) if is_too_large else self
            raise UserError(f"{flag} must be {bounded.range_text} (got {value}); choose a value in that range.")


def option(  # noqa: PLR0913  # a declaration: one keyword for each fact of an option
    default: Any,
    help: str,
    *,
    symbol: str = "",
    source: str = "",
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
    off: Any = None,
    choices: tuple[str, ...] = (),
    tune: tuple[float, ...] = (),
    before: Any = MISSING,
    only_with: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Any:
    """Returns a dataclass field that becomes a command-line option by itself.

    Args:
        default: Its default value.
        help: What it is, in a sentence without a full stop.
        symbol: Its symbol in the paper.
        source: The equation, table or section it stands in.
        unit: Its unit.
        low: Smallest value allowed; None for no bound.
        high: Largest value allowed.
        open_low: Whether `low` itself is refused.
        open_high: Whether `high` itself is refused.
        off: The value that switches the term off, if there is one.
        choices: The strings allowed; empty for any.
        tune: Values worth trying where the option is tuned.
        before: Value that records without this option are taken to have; the default if not given.
        only_with: The option is used only when these options have one of these values.

    Raises:
        UserError: `choices`, or the values of one option in `only_with`, are no tuple of texts.
    """
    require_texts(f"choices of the option '{help}'", choices, "texts")
    for name, values in only_with.items():
        require_texts(f"only_with[{name!r}] of the option '{help}'", values, "texts")
    spec = OptionSpec(
        default=default,
        help=help,
        symbol=symbol,
        source=source,
        unit=unit,
        low=low,
        high=high,
        open_low=open_low,
        open_high=open_high,
        off=off,
        choices=choices,
        tune=tune,
        before=default if before is MISSING else before,
        only_with=only_with,
    )
    return field(default=default, metadata={SPEC: spec})


def spec_of(field: Field) -> OptionSpec:
    """Returns what an option of a configuration is, as it is declared.

    Raises:
        UserError: The field is not made by `option`.
    """
    if SPEC not in field.metadata:
        raise UserError(
            f"the option '{field.name}' has no help and no range (got a plain field of its Config); make it by "
            "fedcli.option(DEFAULT, HELP)."
        )
    return field.metadata[SPEC]


def fields_of(*config_types: type) -> dict[str, Field]:
    """Returns the declarations of the options that these dataclasses have, by name.

    Their types are types also where the file says `from __future__ import annotations`, which makes texts of them.

    Raises:
        UserError: A type is a text that says none.
    """
    declared: dict[str, Field] = {}
    for config_type in config_types:
        for entry in fields(config_type):
            declared[entry.name] = _with_type(entry, config_type) if isinstance(entry.type, str) else entry
    return declared


def _with_type(entry: Field, config_type: type) -> Field:
    """Returns the declaration of an option whose type is a text, with the type that it says."""
    try:
        types = get_type_hints(config_type)
    except (NameError, SyntaxError, TypeError) as error:
        raise UserError(
            f"the type of the option '{entry.name}' cannot be read (got '{entry.type}': {error}); write int, float, "
            "bool or str, or one of them with '| None'."
        ) from error
    typed = copy.copy(entry)
    typed.type = types[entry.name]
    return typed


@dataclass(frozen=True)
class JoinedConfigs:
    """Two configurations as one, see `join_configs`.

    Attributes:
        config: Frozen dataclass of the options of both, a subclass of the first.
        second: The second configuration.
        names: What each option of the second is called in `config`, by its own name.
    """

    config: type
    second: type
    names: Mapping[str, str]

    def second_of(self, values: Any) -> Any:
        """Returns the second configuration, an instance, out of an instance of the joined one."""
        return self.second(**{own: getattr(values, joined) for own, joined in self.names.items()})


def join_configs(first: type, second: type, *, prefix: str, source: str) -> JoinedConfigs:
    """Joins the options of two methods, for a method that adds the first to the second.

    Args:
        first: Frozen dataclass whose options keep their names.
        second: Frozen dataclass; an option of it whose name `first` has too is called `{prefix}_{name}`.
        prefix: The second method's name.
        source: What the help of the second's options says before their own source: the second method's title.

    Raises:
        UserError: A field of the second is not made by `option`, or two options have one name also with the prefix.
    """
    own_names = fields_of(first).keys()
    second_fields = fields_of(second)
    names = {}
    for name in second_fields:
        names[name] = f"{prefix}_{name}" if name in own_names else name
    twice = [name for name, times in Counter([*own_names, *names.values()]).items() if times > 1]
    if twice:
        raise UserError(
            f"two options of the joined methods are called '{twice[0]}' (got the prefix '{prefix}'); choose another."
        )
    joined = []
    for name, entry in second_fields.items():
        spec = spec_of(entry)
        origin = ", ".join(filter(None, (source, spec.source)))
        # By their names in the joined configuration; an option of the run is called there as ever.
        needs = {names.get(needed, needed): values for needed, values in spec.only_with.items()}
        spec = replace(spec, source=origin, only_with=MappingProxyType(needs))
        declared: Any = field(default=spec.default, metadata={SPEC: spec})
        joined.append((names[name], entry.type, declared))
    config = make_dataclass("JoinedConfig", joined, bases=(first,), frozen=True)
    return JoinedConfigs(config, second, names)


def _kinds_of(field: Field) -> set[type]:
    """Returns the types that values of an option may have, of `float | None` both.

    Raises:
        UserError: Another one is among them, which no record could have.
    """
    is_union = get_origin(field.type) in (Union, UnionType)
    alternatives: tuple[Any, ...] = get_args(field.type) if is_union else (field.type,)
    kinds = set(alternatives)
    if not kinds <= {bool, int, float, str, NoneType}:
        raise UserError(
            f"the option '{field.name}' has a type that no record can have (got {field.type}); declare it as int, "
            "float, bool or str, or one of them with '| None'."
        )
    return kinds


def in_declared_type(field: Field, value: Any) -> Any:
    """Returns a value that `check_value` has let pass, a whole number in the place of a float as the float."""
    return float(value) if _stands_for_float(value, _kinds_of(field)) else value


def _stands_for_float(value: Any, kinds: Collection[type]) -> bool:
    """Whether a value is a whole number where an option of these types takes floats and no whole numbers."""
    return type(value) is int and float in kinds and int not in kinds


def check_value(field: Field, value: Any) -> None:
    """Refuses a value that an option, made by `option`, does not allow.

    Raises:
        UserError: It is of another type or outside of the range.
    """
    flag = flag_of(field.name)
    spec = spec_of(field)
    kinds = _kinds_of(field)
    stands_for_float = _stands_for_float(value, kinds)
    if type(value) not in kinds and not stands_for_float:
        names = " or ".join(sorted(kind.__name__ for kind in kinds - {NoneType}))
        raise UserError(f"{flag} must be of type {names} (got {value!r}); give a value of that type.")
    spec.check(flag, value, float if stands_for_float else type(value))
