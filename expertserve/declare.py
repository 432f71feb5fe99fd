"""How a setting is declared, read back and shown.

A field of the settings dataclass made by `setting` carries a Declared; `declarations` turns such a class into Setting
objects, from which options, help and documents are made. Which settings there are is for config.py alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

ENV_PREFIX = "EXPERTSERVE_"
COMMANDS = ("run", "serve", "bench")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Declared:
    """What is known of a setting besides its name, type and default."""

    reason: str
    commands: tuple[str, ...] = COMMANDS
    short: str | None = None
    metavar: str | None = None
    default_text: str | None = None
    switch: bool = False
    secret: bool = False
    parse: Callable[[Any], Any] | None = None
    bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inert: Callable[[Any], str | None] | None = None

    def offered_by(self, command: str) -> bool:
        """Whether `command` has the option, be it for one of its modes (`bench --serve`) only."""
        return any(each.split()[0] == command for each in self.commands)


def setting(default: T, reason: str, **known: Any) -> T:
    """Declares a field of the settings dataclass; `known` are fields of Declared."""
    declared = Declared(reason, **known)
    return dataclasses.field(default=default, repr=not declared.secret, metadata={"declared": declared})


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting as commands and documents present it."""

    name: str
    type: Any
    default: Any
    declared: Declared

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{ENV_PREFIX}{self.name.upper()}"

    @property
    def repeatable(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def metavar(self) -> str:
        kinds = [kind for kind in get_args(self.type) or (self.type,) if kind not in (type(None), ...)]
        if self.declared.metavar:
            return self.declared.metavar
        if get_origin(self.type) is Literal:
            return "|".join(kinds)
        return {bool: "on|off", int: "N", float: "X", Path: "FILE"}.get(kinds[0], "TEXT")

    @property
    def default_text(self) -> str:
        if self.declared.default_text is not None:
            return self.declared.default_text
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return "none" if self.default in ((), "") else str(self.default)


def declarations(settings: type[Any]) -> dict[str, Setting]:
    """The settings that the dataclass `settings` declares, by name, in its order."""
    types = get_type_hints(settings)
    return {
        field.name: Setting(field.name, types[field.name], field.default, field.metadata["declared"])
        for field in dataclasses.fields(settings)
        if "declared" in field.metadata
    }
