"""How what is declared is named: an option by its flag, and `paper:ID` by its paper."""


def flag_of(name: str) -> str:
    """Returns an option's name as it is typed on the command line."""
    return "--" + name.strip("-_").replace("_", "-")


def paper_of(name: str) -> str:
    """Returns the paper of a protocol, a table or a claim, whose names are `paper:ID`."""
    paper, _, _ = name.partition(":")
    return paper
