"""The expert budget: how many slots of each size class a setting and a machine allow.

Owns size classes and the division of a budget among them; allocates nothing and reads no weight, so that it refuses
before any is read. Invariant: a plan has at least one layer's top-k slots in every class and never more slots than
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertserve.errors import CapacityError
from expertserve.experts.layout import SlotLayout
from expertserve.gguf.spans import ExpertTower
from expertserve.values import MIB, ExpertBudget, size_text

_SETTING = "--expert-cache"


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Layers whose experts have slices of the same sizes."""

    towers: tuple[ExpertTower, ...]
    layout: SlotLayout

    @property
    def num_experts(self) -> int:
        return sum(tower.num_experts for tower in self.towers)

    @property
    def all_bytes(self) -> int:
        return self.num_experts * self.layout.slot_bytes


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of each class, and how they came about.

    Attributes:
        classes: the size classes.
        slots: slots of each.
        reason: one phrase for the user.
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


def size_classes(towers: Mapping[int, ExpertTower], align: int) -> tuple[SizeClass, ...]:
    """Groups layers by the sizes of their slices, in layer order; `align` is what the reader needs."""
    members: dict[tuple[int, ...], list[ExpertTower]] = {}
    for layer in sorted(towers):
        tower = towers[layer]
        members.setdefault(tuple(tower.slice_bytes(i) for i in range(len(tower.slices))), []).append(tower)
    return tuple(SizeClass(tuple(group), SlotLayout.plan(sizes, align)) for sizes, group in members.items())


def least_slots(classes: Sequence[SizeClass], top_k: int) -> tuple[int, ...]:
    """Slots each class needs at the least: one token's experts of its widest layer."""
    return tuple(min(top_k, max(tower.num_experts for tower in c.towers)) for c in classes)


def plan_slots(
    classes: Sequence[SizeClass], budget: ExpertBudget, top_k: int, *, available_bytes: int | None = None
) -> SlotPlan:
    """Divides a budget among the classes by the number of their experts.

    Args:
        classes: of `size_classes`.
        budget: what the user asked for; auto takes what is available.
        top_k: experts a token uses in a layer.
        available_bytes: memory left for slots; None where the caller vouches for the budget.

    Raises:
        CapacityError: fewer slots than one layer's top-k, or more bytes than there are.
    """
    total, all_bytes = sum(c.num_experts for c in classes), sum(c.all_bytes for c in classes)
    share, asked = _share(budget, total, all_bytes, available_bytes)
    least = least_slots(classes, top_k)
    slots = _divide(classes, share, least, all_bytes)
    if slots is None and budget.kind == "slots" and budget.amount >= sum(least):
        slots = least  # by their share of the bytes they would be too few: the classes' slots differ in size
    if slots is None:
        need = sum(n * c.layout.slot_bytes for n, c in zip(least, classes, strict=True))
        remedy = f"give {_SETTING} {-(-need // MIB)}MiB or more"
        if budget.kind == "auto":
            remedy = "lower --ctx or free memory"
        raise CapacityError(
            f"{asked} is too little room for experts: "
            f"a layer's top-{top_k} needs {sum(least)} slots, {size_text(need)}; {remedy}"
        )
    plan = SlotPlan(tuple(classes), slots, f"{sum(slots)} of {total} experts in slots, from {asked}")
    if available_bytes is not None and plan.arena_bytes > available_bytes:
        left = max(0, available_bytes)
        raise CapacityError(
            f"{size_text(plan.arena_bytes)} of expert slots do not fit the {size_text(left)} of memory left; "
            f"give {_SETTING} {left // MIB}MiB or less, or auto"
        )
    return plan


def tier_places(plan: SlotPlan, budget: ExpertBudget, available_bytes: int) -> tuple[int, ...]:
    """Experts of each class that host memory holds beside the slots, by the number that have none.

    Args:
        plan: the slots.
        budget: what the user asked for; auto takes what is available.
        available_bytes: host memory there is.

    Raises:
        CapacityError: more than there is.
    """
    absent = [c.num_experts - n for c, n in zip(plan.classes, plan.slots, strict=True)]
    sizes = [c.layout.slot_bytes for c in plan.classes]
    total, total_bytes = sum(absent), sum(n * size for n, size in zip(absent, sizes, strict=True))
    if not total:
        return tuple(absent)
    share, _ = _share(budget, total, total_bytes, available_bytes - sum(sizes))
    places = tuple(int(share * n + 1e-9) for n in absent)
    nbytes = sum((n + 1) * size for n, size in zip(places, sizes, strict=True))
    if nbytes > available_bytes and budget.kind != "auto":
        left = max(0, available_bytes)
        raise CapacityError(
            f"{size_text(nbytes)} for experts on the host do not fit the {size_text(left)} of its memory left; "
            f"give --host-cache {left // MIB}MiB or less, auto or off"
        )
    return places


def _share(budget: ExpertBudget, total: int, all_bytes: int, available_bytes: int | None) -> tuple[float, str]:
    """The share of all experts a budget pays for, and its name."""
    if budget.kind == "slots":
        return min(1.0, budget.amount / total), f"{budget.amount:g} slots"
    if budget.kind == "percent":
        return budget.amount / 100, f"{budget.amount:g}% of the experts"
    if budget.kind == "bytes":
        return min(1.0, budget.amount / all_bytes), size_text(budget.amount)
    if available_bytes is None:
        return 1.0, "all of them (auto)"
    left = max(0, available_bytes)
    return min(1.0, left / all_bytes), f"{size_text(left)} of memory left (auto)"


def _divide(classes: Sequence[SizeClass], share: float, least: Sequence[int], all_bytes: int) -> tuple[int, ...] | None:
    """Slots by class; where a class's share is under its least, the others give; None where they cannot."""
    slots = [max(low, int(share * c.num_experts + 1e-9)) for c, low in zip(classes, least, strict=True)]
    sizes = [c.layout.slot_bytes for c in classes]
    over = sum(n * size for n, size in zip(slots, sizes, strict=True)) - share * all_bytes
    for i in sorted(range(len(classes)), key=lambda i: least[i] - slots[i]):
        if over > sizes[i] * 1e-6:
            given = min(slots[i] - least[i], -int(-over // sizes[i]))
            slots[i] -= given
            over -= given * sizes[i]
    return None if over > min(sizes) * 1e-6 else tuple(slots)
