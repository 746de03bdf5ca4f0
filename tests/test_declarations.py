"""What a method, a protocol or a table declares: options of one method and of two joined, and what is refused."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Optional, Union

import pytest

from fedcli import Gain, join_configs, option
from fedcli.declarations import check_value, spec_of
from fedcli.registry import find_method, find_protocol, find_table
from tests.user_errors import raises_user_error


@dataclass(frozen=True)
class Matching:
    """Options of a method that is added to another."""

    temperature: float = option(0.1, "Temperature", source="Eq. 1")
    form: str = option("a", "Form", choices=("a", "b"))


@dataclass(frozen=True)
class Extended:
    """Options of the other."""

    form: str = option("x", "Form", choices=("x", "y"))
    weight: float = option(2.0, "Weight", source="Eq. 4", low=0, only_with={"form": ("x",)})


def test_joined_options_are_those_of_both_methods_under_names_of_their_own():
    joined = join_configs(Matching, Extended, prefix="other", source="Other")
    values = joined.config(temperature=0.5, form="b", other_form="y", weight=3.0)
    assert joined.second_of(values) == Extended(form="y", weight=3.0)
    assert joined.second_of(joined.config()) == Extended()

    fields = joined.config.__dataclass_fields__
    assert list(fields) == ["temperature", "form", "other_form", "weight"]
    weight_before = spec_of(Extended.__dataclass_fields__["weight"])
    weight_now = replace(weight_before, source="Other, Eq. 4", only_with={"other_form": ("x",)})
    assert spec_of(fields["weight"]) == weight_now
    assert spec_of(fields["other_form"]).source == "Other"
    with raises_user_error("--other-form must be x or y"):
        check_value(fields["other_form"], "b")


@dataclass(frozen=True)
class WithMomentum:
    """An option that is used with one of the run's own, whose name is that of another method's."""

    temperature: float = option(0.9, "Momentum", only_with={"optimizer": ("sgd",)})


def test_a_joined_option_may_be_for_a_value_of_an_option_of_the_run():
    joined = join_configs(Extended, WithMomentum, prefix="other", source="Other")
    assert spec_of(joined.config.__dataclass_fields__["temperature"]).only_with == {"optimizer": ("sgd",)}


def test_joined_options_of_one_name_are_refused():
    @dataclass(frozen=True)
    class Taken(Matching):
        other_form: str = option("a", "Form")

    words = "two options of the joined methods are called 'other_form' (got the prefix 'other'); choose another."
    with raises_user_error(words):
        join_configs(Taken, Extended, prefix="other", source="Other")


def test_a_whole_number_in_the_place_of_a_float_has_the_floats_limit():
    weight = Extended.__dataclass_fields__["weight"]
    check_value(weight, 3_000_000_000)
    with raises_user_error("--weight must be >= 0 and <= 3e+38"):
        check_value(weight, 10**39)


def make_field(name, kind, default):
    """Returns the field of a configuration that has one option, of this type and with what `option` returns."""
    config = dataclasses.make_dataclass("Config", [(name, kind, default)])
    (field,) = dataclasses.fields(config)
    return field


@pytest.mark.parametrize("number", [10**400, 1e308, float("inf"), float("nan")])
def test_a_number_without_an_end_has_the_largest_that_can_be_computed(number):
    weight = make_field("weight", float, option(0.1, "Weight", low=0, high=float("inf")))
    with raises_user_error("--weight must be >= 0 and <= 3e+38 (got "):
        check_value(weight, number)


def test_an_option_of_some_texts_may_be_none_where_its_type_says_so():
    mean = make_field("mean", str | None, option(None, "Mean", choices=("a", "b")))
    check_value(mean, None)
    with raises_user_error("--mean must be a or b (got 'c')"):
        check_value(mean, "c")
    form = make_field("form", str, option("a", "Form", choices=("a",)))
    with raises_user_error("--form must be of type str (got None)"):
        check_value(form, None)


@pytest.mark.parametrize("kind", [list[int], tuple[float, ...], dict[str, int]])
def test_an_option_of_a_type_that_no_record_has_is_refused(kind):
    widths = make_field("widths", kind, option(None, "Widths"))
    with raises_user_error("the option 'widths' has a type that no record can have (got "):
        check_value(widths, 3)


@pytest.mark.parametrize("kind", [Optional[int], Union[int, None], int | None])  # noqa: UP007, UP045
def test_an_option_of_two_types_may_have_either(kind):
    width = make_field("width", kind, option(None, "Width"))
    check_value(width, None)
    check_value(width, 3)
    with raises_user_error("--width must be of type int (got '3')"):
        check_value(width, "3")


# Declarations with a text in the place of a tuple of one, where a comma was forgotten.
NO_TUPLES = {
    "choices of the option 'Mean'": lambda: option("mean", "Mean", choices="mean"),
    "only_with['optimizer'] of the option 'Rate'": lambda: option(0.1, "Rate", only_with={"optimizer": "mean"}),
    "optimizers of the method 'fedavg'": lambda: replace(find_method("fedavg"), optimizers="mean"),
    "notes of the protocol 'fedfm:digits'": lambda: replace(find_protocol("fedfm:digits"), notes="mean"),
    "notes of the table 'fedfm:III'": lambda: replace(find_table("fedfm:III"), notes="mean"),
    "leading_rows of the gain 'gap'": lambda: Gain("gap", "x", "mean", ("FedAvg",)),
    "other_rows of the gain 'gap'": lambda: Gain("gap", "x", ("FedAvg",), "mean"),
    "columns of the gain 'gap'": lambda: Gain("gap", "x", ("FedAvg",), ("FedFM",), "mean"),
}


@pytest.mark.parametrize("subject", NO_TUPLES)
def test_a_text_in_the_place_of_a_tuple_is_refused_where_it_is_declared(subject):
    with raises_user_error(f"{subject} must be a tuple of ", "(got 'mean'); write ('mean',)."):
        NO_TUPLES[subject]()


# Declarations whose items are no texts, or which have none.
NO_TEXTS = {
    "choices of the option 'Epochs'": lambda: option(1, "Epochs", choices=(1, 5)),
    "only_with['nesterov'] of the option 'Rate'": lambda: option(0.1, "Rate", only_with={"nesterov": (True,)}),
    "only_with['optimizer'] of the option 'Rate'": lambda: option(0.1, "Rate", only_with={"optimizer": True}),
    "optimizers of the method 'fedavg'": lambda: replace(find_method("fedavg"), optimizers=None),
    "notes of the table 'fedfm:III'": lambda: replace(find_table("fedfm:III"), notes=(None,)),
}


@pytest.mark.parametrize("subject", NO_TEXTS)
def test_other_items_than_texts_are_refused_where_they_are_declared(subject):
    with raises_user_error(f"{subject} must be a tuple of ", "; write each as a text, in quotation marks."):
        NO_TEXTS[subject]()


@pytest.mark.parametrize(("field", "value"), [("selection", "Last"), ("evaluation", "Clients")])
def test_a_protocol_of_a_selection_or_an_evaluation_that_is_none_is_refused(field, value):
    words = f"{field} of the protocol 'fedfm:digits' must be "
    with raises_user_error(words, f"(got '{value}'); choose"):
        replace(find_protocol("fedfm:digits"), **{field: value})
