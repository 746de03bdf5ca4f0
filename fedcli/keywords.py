"""Messages of the command line in the words of Python.

A message is written once, in the words of the command line, where most are read, and names an option as it is typed
there: `--num-clients`. Who calls `fedcli.run` is told the same of `num_clients`. So no message is needed twice, and no
code that raises one has to know who reads it.

Of a message these become keyword arguments, and nothing else of it is touched:

    --num-clients                  num_clients
    --from                         from_             as Python keeps the word for itself
    --no-drop-last                 drop_last=False
    --backbone nets.py:tiny        backbone='nets.py:tiny'

A command in quotation marks, `'fedcli run fedavg --help'`, stays as it is typed. What is an option of the command line
alone, as `--workers`, is refused as such (`unknown_option` in fedcli/runs/options.py), and so named in such a command.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from keyword import iskeyword

from fedcli.errors import UserError

COMMAND = re.compile(r"('fedcli [^']*')")
_FILE = r"(?:'[^']*\.py[^']*'|[^\s';]*\.py(?:[^\s';]*\w)?)"  # as `shlex.quote` writes it, also among other values
_BEGIN = r"(?<![\w/-])--"  # of a flag, and not of a folder in a path
FLAGS_WITH_FILES = re.compile(rf"{_BEGIN}(?P<name>[a-z][a-z0-9-]*) {_FILE}(?: --(?P=name) {_FILE})*")
FLAG = re.compile(rf"{_BEGIN}(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)(?![a-z0-9/-])")
REMEDIES = {"go on with --continue": "go on with continue_=True, rename the old one by exist_ok=True"}


@contextmanager
def in_keywords() -> Iterator[None]:
    """Lets a refusal name keyword arguments where it names flags."""
    try:
        yield
    except UserError as error:
        raise type(error)(keywords_for_flags(str(error))) from error


def keywords_for_flags(text: str) -> str:
    """Writes the flags in a message as keyword arguments, as the top of this file says."""
    for typed, in_python in REMEDIES.items():
        text = text.replace(typed, in_python)
    pieces = []
    for piece in COMMAND.split(text):
        if not COMMAND.fullmatch(piece):
            piece = FLAGS_WITH_FILES.sub(_keyword_with_files, piece)
            piece = FLAG.sub(_keyword, piece)
        pieces.append(piece)
    return "".join(pieces)


def _keyword_name(flag_name: str) -> str:
    """Returns the name of a flag as that of a keyword argument."""
    name = flag_name.replace("-", "_")
    return f"{name}_" if iskeyword(name) else name


def _keyword(flag: re.Match) -> str:
    """Returns a flag as a keyword argument: its name, or its name and value where the flag says no."""
    name = _keyword_name(flag["name"])
    return f"{name}=False" if flag["no"] else name


def _keyword_with_files(flags: re.Match) -> str:
    """Returns a flag with a file, or the same one with several, as a keyword argument."""
    files = [word for word in shlex.split(flags[0]) if not word.startswith("--")]
    value = files[0] if len(files) == 1 else files
    return f"{_keyword_name(flags['name'])}={value!r}"
