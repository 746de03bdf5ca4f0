"""Scripts outside of the package: as modules, and one that evaluates exported models."""

import importlib.util
import sys

# Prints the accuracy of each exported model on a file of images with labels, by PyTorch alone.
EVALUATE_MODELS = """
import sys, torch
images, labels = torch.load(sys.argv[1])
for file in sys.argv[2:]:
    logits = torch.export.load(file).module()(images)
    print((logits.argmax(1) == labels).double().mean().item())
assert "fedcli" not in sys.modules
"""


def load_script(file):
    """Imports a script that is no part of the package; it finds modules beside it, as when Python runs it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(file.parent))
    return module
