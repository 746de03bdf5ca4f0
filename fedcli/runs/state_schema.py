"""What a checkpoint holds: the rounds before it, and a state like the one that the method begins with.

A checkpoint is checked when it is read, so that whatever goes on from it may rely on it.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fedcli.core.client_states import StoredClientStates, list_versions
from fedcli.core.federation import Federation
from fedcli.core.trees import Tree
from fedcli.runs.schema import CHECKPOINT_RECORD
from fedcli.runs.value_checks import Fault, Place, each, mapping, text, whole, wrong

# What a checkpoint adds to its state; the identity is compared with the record's.
FACTS = mapping({"identity": lambda value: None, "record": CHECKPOINT_RECORD, "states": each(text)})
BEST = mapping({"identity": lambda value: None, "round": whole()})  # what the models of the best round add


def check_facts(facts: Any) -> None:
    """Refuses what a checkpoint says of its run, where a part is missing, of another type or out of range.

    Raises:
        Fault: Says which part, and what it must be.
    """
    FACTS(facts)


def round_of_models(state: Any, facts: Any, num_rounds: int) -> int:
    """Returns the round, from 0, whose models a file holds: a checkpoint, or what is kept of the best round.

    Args:
        state: What the file holds, a method's state or models.
        facts: What the file adds to it.
        num_rounds: The rounds of the run.

    Raises:
        Fault: Says which part of what the file says of its run is wrong, and what it must be.
    """
    if not isinstance(facts, dict) or "record" not in facts:
        BEST(facts)
        return facts["round"]
    check_facts(facts)
    check_names(state, facts)
    check_rounds(facts["record"], num_rounds)
    return facts["record"]["rounds"][-1]["round"]


def check_content(state: Any, facts: dict[str, Any], initial: Any, fed: Federation) -> None:
    """Refuses the content of a checkpoint that does not suit its run.

    Args:
        state: The method's state that the checkpoint holds.
        facts: What the checkpoint adds to it, see `check_facts`.
        initial: The method's state before the first round.
        fed: The federation of the run.

    Raises:
        Fault: Says which part is wrong, and what it must be.
        UserError: If the file of a client's state is missing, damaged or another one.
    """
    with Place("record"):
        check_rounds(facts["record"], fed.config.rounds)
    check_state(state, initial, fed)
    check_names(state, facts)


def check_names(state: Any, facts: dict[str, Any]) -> None:
    """Refuses a checkpoint whose state has other clients' states than those that its facts name."""
    named = sorted(version.file.stem for version in list_versions(state))
    if sorted(facts["states"]) != named:
        with Place("states"):
            raise wrong(f"the names of the clients' states, {', '.join(named):.80}", facts["states"])


def check_rounds(record_part: dict[str, Any], num_rounds: int) -> None:
    """Refuses the part of a record that has no rounds, or not from the first on, or not what they cost."""
    numbers = [entry["round"] for entry in record_part["rounds"]]
    if not 1 <= len(numbers) <= num_rounds or numbers != [*range(len(numbers))]:
        raise Fault(f"must have the rounds from 0 on, {num_rounds} at most (got {numbers!r:.80})")
    lacking = [name for name in ("cost", "seconds_total", "peak_bytes") if record_part.get(name) is None]
    if lacking:
        raise Fault(f"lacks {', '.join(lacking)}")


def check_state(state: Any, initial: Any, fed: Federation) -> None:
    """Refuses a server's state without the types, names, shapes and dtypes of the initial one.

    What it holds by client fills up from round to round. There, those with the same network are like each other.
    """
    if type(state) is not type(initial):
        raise wrong(f"a state of type '{type(initial).__name__}'", type(state).__name__)
    if not hasattr(initial, "_fields"):
        check_like(initial, state, fed.num_clients)
        return
    for name, part, initial_part in zip(initial._fields, state, initial, strict=True):
        with Place(name):
            if initial_part == {}:
                check_clients(part, fed)
            else:
                check_like(initial_part, part, fed.num_clients)


def check_clients(states: Any, fed: Federation) -> None:
    """Refuses what is no mapping of clients to states that are like each other; an empty one is."""
    if not isinstance(states, dict | StoredClientStates):
        raise wrong("states by client", states)
    for client in states:
        if type(client) is not int or client not in range(fed.num_clients):
            raise wrong(f"states by client, 0 to {fed.num_clients - 1}", client)
    first_states: dict[int, Any] = {}  # by the index of the network
    pairs: Iterable[tuple[int, Any]] = states.items()
    if isinstance(states, StoredClientStates):
        pairs = states.read_verified()
    for client, state in pairs:
        first_state = first_states.setdefault(fed.architecture[client], state)
        with Place(client):
            check_like(first_state, state, fed.num_clients)


def check_like(pattern: Tree, value: Any, num_clients: int) -> None:
    """Refuses a tree without the types, names, shapes and dtypes of the pattern."""
    if isinstance(value, StoredClientStates):  # `find_stored_states` would not see it, nor a checkpoint have its files
        raise wrong("a field of the NamedTuple that is the state, and {} at first", _described(value))
    if isinstance(pattern, Tensor):
        check_tensor(pattern, value, num_clients)
    elif isinstance(pattern, dict):
        if not isinstance(value, dict) or value.keys() != pattern.keys():
            raise wrong(f"parts named {', '.join(map(str, pattern)) or 'nothing'}"[:160], _described(value))
        for name, part in pattern.items():
            with Place(name):
                check_like(part, value[name], num_clients)
    elif type(value) is not type(pattern):
        raise wrong(f"of type '{type(pattern).__name__}'", _described(value))
    elif isinstance(pattern, tuple | list):
        if len(value) != len(pattern):
            raise wrong(f"of {len(pattern)} parts", len(value))
        names = getattr(pattern, "_fields", range(len(pattern)))
        for name, part, other in zip(names, pattern, value, strict=True):
            with Place(name):
                check_like(part, other, num_clients)


def check_tensor(pattern: Tensor, value: Any, num_clients: int) -> None:
    """Refuses a tensor without the shape and dtype of the pattern; ids of clients may become fewer."""
    if not isinstance(value, Tensor) or value.dtype != pattern.dtype:
        raise wrong(_described(pattern), _described(value))
    are_ids = pattern.shape == (num_clients,) and not (pattern.is_floating_point() or pattern.is_complex())
    if are_ids and value.ndim == 1 and len(value) <= num_clients:
        return
    if value.shape != pattern.shape:
        raise wrong(_described(pattern), _described(value))


def _described(value: Any) -> str:
    """Returns what a value is, without its numbers."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    if isinstance(value, dict):
        return f"parts named {', '.join(map(str, value)) or 'nothing'}"
    return f"{value!r}" if isinstance(value, int | float | str | None) else type(value).__name__
