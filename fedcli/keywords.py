"""What the command line says, in the words of Python.

A message is written once, in the words of the command line, where most are read, and names an option as it is typed
there: `--num-clients`. Who calls `fedcli.run` is told the same of `num_clients`. So no message is needed twice, and no
code that raises one has to know who reads it.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from fedcli.errors import UserError

COMMAND = re.compile(r"('fedcli [^']*')")
KEYWORDS = {"continue": "continue_"}  # where the name of an option is a word of Python
_FILE = r"(?:'[^']*\.py[^']*'|[^\s';]*\.py(?:[^\s';]*\w)?)"  # as `shlex.quote` writes it, also among other values
FLAGS_WITH_FILES = re.compile(rf"--(?P<name>[a-z][a-z0-9-]*) {_FILE}(?: --(?P=name) {_FILE})*")
FLAG = re.compile(r"(?<![\w-])--(?:no-)?(?P<name>[a-z][a-z0-9-]*)")
REMEDIES = {"go on with --continue": "go on with continue_=True, rename the old one by exist_ok=True"}


@contextmanager
def in_keywords() -> Iterator[None]:
    """Lets a refusal name keyword arguments where it names flags."""
    try:
        yield
    except UserError as error:
        raise type(error)(keywords_for_flags(str(error))) from error


def keywords_for_flags(text: str) -> str:
    """Writes the flags in a message as keyword arguments; commands in quotation marks stay as they are typed.

    A flag with a user's file, such as `--backbone nets.py:tiny`, becomes `backbone='nets.py:tiny'`.
    """
    for typed, in_python in REMEDIES.items():
        text = text.replace(typed, in_python)
    pieces = []
    for piece in COMMAND.split(text):
        if not COMMAND.fullmatch(piece):
            piece = FLAGS_WITH_FILES.sub(_keyword_with_files, piece)
            piece = FLAG.sub(_keyword, piece)
        pieces.append(piece)
    return "".join(pieces)


def _keyword(flag: re.Match) -> str:
    """A flag as the name of a keyword argument."""
    name = flag["name"]
    return KEYWORDS.get(name, name.replace("-", "_"))


def _keyword_with_files(flags: re.Match) -> str:
    """A flag with a file, or the same one with several, as a keyword argument."""
    files = [word for word in shlex.split(flags[0]) if not word.startswith("--")]
    value = files[0] if len(files) == 1 else files
    return f"{_keyword(flags)}={value!r}"
