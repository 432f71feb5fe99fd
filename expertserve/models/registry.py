"""Which model class serves a GGUF architecture.

A family registers itself by decorating its class; anything else is refused by name with the list of what is served.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from expertserve.errors import UnsupportedModelError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import find_towers

if TYPE_CHECKING:
    from expertserve.models.model import Model

M = TypeVar("M", bound="type[Model]")
_REGISTRY: dict[str, type[Model]] = {}


def register(architecture: str) -> Callable[[M], M]:
    """Class decorator: the class serves files whose `general.architecture` is `architecture`."""

    def decorate(cls: M) -> M:
        _REGISTRY[architecture] = cls
        return cls

    return decorate


def architectures() -> dict[str, type[Model]]:
    """Every registered family, by architecture name."""
    import expertserve.models as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def load_model(file: GGUFFile, *, draft: bool = False) -> Model:
    """The model described by `file`, with its draft layer or without; reads no weight.

    Raises:
        UnsupportedModelError: the architecture is not served, the file has no routed experts, or it has no draft layer.
    """
    known = architectures()
    if file.architecture not in known:
        raise UnsupportedModelError(
            f"{file.paths[0].name}: architecture {file.architecture!r} is not served; served: {', '.join(known)}"
        )
    towers = find_towers(file)
    if not towers:
        raise UnsupportedModelError(
            f"{file.paths[0].name}: a {file.architecture} model without routed experts; "
            "only Mixture-of-Experts models are served, run dense models with llama.cpp"
        )
    return known[file.architecture](file, towers, draft=draft)
