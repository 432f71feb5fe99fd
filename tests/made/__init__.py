"""Tiny models of the families that have no oracle fixture: one description a file in `families`, random weights.

What each says of itself (metadata, tensor names, shapes) is what llama.cpp's converter writes; whether it computes the
right thing is settled by llama.cpp itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.made import families
from tests.made.model import Made

MADE: dict[str, Made] = {
    made.architecture: made
    for module in pkgutil.iter_modules(families.__path__)
    for made in [importlib.import_module(f"{families.__name__}.{module.name}").MADE]
}
