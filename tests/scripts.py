"""Imports scripts that are no part of the package."""

import importlib.util
import sys
from unittest.mock import patch


def load_script(file):
    """Imports a script that is no part of the package; it finds modules beside it, as when Python runs it.

    It is imported once: scripts that import it by its name have this same module. Only where another module has that
    name, as the package has that of a script `fedcli.py`, it is imported anew each time.
    """
    name = file.stem
    known = sys.modules.get(name)
    if getattr(known, "__file__", None) == str(file):
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(file.parent), *sys.path]):
        spec.loader.exec_module(module)
    sys.modules.setdefault(name, module)
    return module
