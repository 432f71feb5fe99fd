"""The expert budget: how many slots of each size class a setting and a machine allow.

Owns size classes, the parsing of `--expert-cache` and the division of a budget; allocates nothing and reads no
weight, so that it refuses before any is read. Invariant: a plan has at least one layer's top-k slots in every class
and never more slots than experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertserve.errors import CapacityError, ConfigError
from expertserve.experts.layout import SlotLayout
from expertserve.gguf.spans import ExpertTower

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SETTING = "--expert-cache"


@dataclass(frozen=True, slots=True)
class Budget:
    """What the user asked for; exactly one field is set, none for auto."""

    nbytes: int | None = None
    slots: int | None = None
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Layers whose experts have slices of the same sizes."""

    towers: tuple[ExpertTower, ...]
    layout: SlotLayout

    @property
    def num_experts(self) -> int:
        return sum(tower.num_experts for tower in self.towers)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of each class, and how they came about.

    Attributes:
        classes: the size classes.
        slots: slots of each.
        reason: one sentence for the user.
    """

    classes: tuple[SizeClass, ...]
    slots: tuple[int, ...]
    reason: str

    @property
    def arena_bytes(self) -> int:
        return sum(c.layout.slot_bytes * n for c, n in zip(self.classes, self.slots, strict=True))

    @property
    def total_slots(self) -> int:
        return sum(self.slots)

    @property
    def all_resident(self) -> bool:
        return all(n == c.num_experts for c, n in zip(self.classes, self.slots, strict=True))


def parse_budget(text: str) -> Budget:
    """Reads '8GiB', '4000' (slots), '40%' (of all experts) or 'auto'."""
    compact = text.strip().lower().replace(" ", "")
    if compact == "auto":
        return Budget()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%|[kmgt]?i?b?)", compact)
    if match is None:
        raise ConfigError(f"{_SETTING} {text!r} is none of a size (8GiB), slots (4000), a share (40%) or auto")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"{_SETTING} {text!r} must be above 0% and at most 100%")
        return Budget(fraction=number / 100)
    if unit == "":
        if not number.is_integer() or number < 1:
            raise ConfigError(f"{_SETTING} {text!r} must be a whole number of slots, or a size with its unit")
        return Budget(slots=int(number))
    prefix = unit.removesuffix("b")
    return Budget(nbytes=int(number * (_BINARY_UNITS[prefix] if prefix in _BINARY_UNITS else _UNITS[prefix])))


def size_classes(towers: Mapping[int, ExpertTower], align: int) -> tuple[SizeClass, ...]:
    """Groups layers by the sizes of their slices, in layer order; `align` is what the reader needs."""
    members: dict[tuple[int, ...], list[ExpertTower]] = {}
    for layer in sorted(towers):
        tower = towers[layer]
        members.setdefault(tuple(tower.slice_bytes(i) for i in range(len(tower.slices))), []).append(tower)
    return tuple(SizeClass(tuple(group), SlotLayout.plan(sizes, align)) for sizes, group in members.items())


def plan_slots(
    classes: Sequence[SizeClass], budget: Budget, top_k: int, *, available_bytes: int | None = None
) -> SlotPlan:
    """Divides a budget among the classes by the number of their experts.

    Args:
        classes: of `size_classes`.
        budget: what the user asked for.
        top_k: experts a token uses in a layer.
        available_bytes: memory left for slots; None where the caller vouches for the budget. Needed by auto.

    Raises:
        CapacityError: fewer slots than one layer's top-k, or more bytes than there are.
    """
    total = sum(c.num_experts for c in classes)
    all_bytes = sum(c.num_experts * c.layout.slot_bytes for c in classes)
    if budget.slots is not None:
        share = min(1.0, budget.slots / total)
        asked = f"{budget.slots} slots"
    elif budget.fraction is not None:
        share, asked = budget.fraction, f"{budget.fraction:.0%} of the experts"
    else:
        nbytes = budget.nbytes if budget.nbytes is not None else max(0, available_bytes or 0)
        share = min(1.0, nbytes / all_bytes)
        asked = f"{nbytes} bytes" + ("" if budget.nbytes is not None else " of free memory (auto)")
    least = [min(top_k, max(t.num_experts for t in c.towers)) for c in classes]
    slots = _divide(classes, share, least, all_bytes)
    if slots is None:
        need = sum(n * c.layout.slot_bytes for n, c in zip(least, classes, strict=True))
        raise CapacityError(
            f"{asked} are too few expert slots: one layer's top-{top_k} experts need {sum(least)} slots, {need} bytes; "
            f"give {_SETTING} {-(-need // (1 << 20))}MiB or more"
        )
    plan = SlotPlan(tuple(classes), slots, f"{sum(slots)} of {total} experts in slots, from {asked}")
    if available_bytes is not None and plan.arena_bytes > available_bytes:
        raise CapacityError(
            f"{plan.arena_bytes} bytes of expert slots do not fit the {max(0, available_bytes)} bytes of memory left; "
            f"give {_SETTING} {max(0, available_bytes) // (1 << 20)}MiB or less, or auto"
        )
    return plan


def _divide(classes: Sequence[SizeClass], share: float, least: Sequence[int], all_bytes: int) -> tuple[int, ...] | None:
    """Slots by class; where a class's share is under its least, the others give; None where they cannot."""
    budget = share * all_bytes * (1 + 1e-12)
    slots = [max(low, int(share * c.num_experts + 1e-9)) for c, low in zip(classes, least, strict=True)]
    over = sum(n * c.layout.slot_bytes for n, c in zip(slots, classes, strict=True)) - budget
    for i in sorted(range(len(classes)), key=lambda i: least[i] - slots[i]):
        size = classes[i].layout.slot_bytes
        if over > 0:
            given = min(slots[i] - least[i], -int(-over // size))
            slots[i] -= given
            over -= given * size
    return None if over > 0 else tuple(slots)
