"""Budgets, the memory there is, and the knee."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertserve.errors import CapacityError
from expertserve.experts.budget import SizeClass, least_slots, plan_slots, size_classes
from expertserve.experts.knee import fewest_within, knee_slots
from expertserve.experts.memory import LEAST_RESERVE_BYTES, AvailableMemory, available_memory
from expertserve.values import MIB, ExpertBudget, size_text
from tests.experts.worlds import make_world

UNEVEN = make_world(layers=6, experts=16, odd_layers={1: (1536, 1024, 9000), 4: (40_000, 40_000, 40_000)})
KINDS = st.sampled_from(["bytes", "slots", "percent"])


def classes(align: int = 512) -> tuple[SizeClass, ...]:
    return size_classes(UNEVEN.towers, align)


def test_layers_are_classed_by_the_sizes_of_their_slices() -> None:
    assert [[tower.layer for tower in group.towers] for group in classes()] == [[0, 2, 3, 5], [1], [4]]


@given(kind=KINDS, amount=st.floats(0.01, 1.0), top_k=st.integers(1, 20))
def test_a_plan_keeps_its_budget_and_its_floor(kind: str, amount: float, top_k: int) -> None:
    groups = classes()
    total = sum(group.num_experts for group in groups)
    all_bytes = sum(group.all_bytes for group in groups)
    scale = {"bytes": all_bytes, "slots": total, "percent": 100}[kind]
    budget = ExpertBudget(kind, max(1, round(amount * scale)))  # type: ignore[arg-type]
    try:
        plan = plan_slots(groups, budget, top_k)
    except CapacityError as error:
        floor = sum(n * g.layout.slot_bytes for n, g in zip(least_slots(groups, top_k), groups, strict=True))
        assert size_text(floor) in str(error) and "--expert-cache" in str(error)
        assert budget.amount / scale * all_bytes < floor + max(g.layout.slot_bytes for g in groups)
        return
    for slots, least, group in zip(plan.slots, least_slots(groups, top_k), groups, strict=True):
        assert least <= slots <= group.num_experts
    if kind == "slots" and plan.slots == least_slots(groups, top_k):
        assert plan.total_slots <= budget.amount
    else:
        assert plan.arena_bytes <= budget.amount / scale * all_bytes * (1 + 1e-9)
    if kind == "bytes":
        assert plan.arena_bytes <= budget.amount


def test_a_whole_number_of_slots_gives_exactly_that_many_where_layers_are_alike() -> None:
    world = make_world(layers=3, experts=16)
    for slots in (2, 7, 33, 48, 1000):
        plan = plan_slots(size_classes(world.towers, 512), ExpertBudget("slots", slots), 2)
        assert plan.total_slots == min(48, slots)
    assert plan.all_resident


def test_the_fewest_slots_are_enough_where_layers_differ() -> None:
    groups = classes()
    fewest = sum(least_slots(groups, 2))
    assert plan_slots(groups, ExpertBudget("slots", fewest), 2).slots == least_slots(groups, 2)
    with pytest.raises(CapacityError, match=f"needs {fewest} slots"):
        plan_slots(groups, ExpertBudget("slots", fewest - 1), 2)


@pytest.mark.parametrize("kind", ["bytes", "slots"])
def test_a_budget_under_one_layers_top_k_is_refused_with_number_and_setting(kind: str) -> None:
    with pytest.raises(CapacityError, match=r"top-8 needs 24 slots, \d+\.\d MiB; give --expert-cache \d+MiB or more"):
        plan_slots(classes(), ExpertBudget(kind, 4), 8)  # type: ignore[arg-type]


def test_the_budget_named_in_a_refusal_is_accepted() -> None:
    with pytest.raises(CapacityError) as refused:
        plan_slots(classes(), ExpertBudget("bytes", 1), 8)
    named = int(str(refused.value).rsplit("--expert-cache ", 1)[1].split("MiB")[0])
    assert plan_slots(classes(), ExpertBudget("bytes", named * MIB), 8).total_slots >= 24


def test_more_slots_than_memory_are_refused_and_auto_takes_what_there_is() -> None:
    all_bytes = sum(group.all_bytes for group in classes())
    with pytest.raises(CapacityError, match=r"do not fit the \d+\.\d MiB of memory left.*or auto"):
        plan_slots(classes(), ExpertBudget("percent", 100), 2, available_bytes=all_bytes - 1)
    plan = plan_slots(classes(), ExpertBudget("auto"), 2, available_bytes=all_bytes // 2)
    assert all_bytes // 4 < plan.arena_bytes <= all_bytes // 2
    assert plan_slots(classes(), ExpertBudget("auto"), 2, available_bytes=2 * all_bytes).all_resident
    with pytest.raises(CapacityError):
        plan_slots(classes(), ExpertBudget("auto"), 2, available_bytes=-5)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 1000000 kB\n"}


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    memory = available_memory(write(tmp_path, MEMINFO))
    assert memory == AvailableMemory(1_000_000 * 1024, "the machine's memory")


def test_a_version_1_limit_counts_less_what_is_used_but_not_file_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/jobs/one"
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "5:cpu:/\n4:memory:/jobs/one\n",
            f"{group}/memory.limit_in_bytes": "500000000\n",
            f"{group}/memory.usage_in_bytes": "300000000\n",
            f"{group}/memory.stat": "cache 1\ntotal_inactive_file 150000000\ntotal_active_file 50000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    memory = available_memory(root)
    assert memory.nbytes == 400_000_000 and "476.8 MiB (/jobs/one)" in memory.limited_by


def test_a_version_2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/user/service\n",
            "sys/fs/cgroup/user/service/memory.max": "max\n",
            "sys/fs/cgroup/user/service/memory.current": "100\n",
            "sys/fs/cgroup/user/memory.max": "200000000\n",
            "sys/fs/cgroup/user/memory.current": "150000000\n",
            "sys/fs/cgroup/user/memory.stat": "inactive_file 20000000\nactive_file 0\n",
        },
    )
    assert available_memory(root).nbytes == 70_000_000


def test_a_container_that_sees_its_group_as_the_root_is_limited_too(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "300000000\n",
            "sys/fs/cgroup/memory.current": "100000000\n",
        },
    )
    assert available_memory(root).nbytes == 200_000_000


def test_a_reserve_is_left_alone() -> None:
    assert AvailableMemory(1 << 30, "").reserve_bytes == LEAST_RESERVE_BYTES
    assert AvailableMemory(1 << 40, "").reserve_bytes > 1 << 34


def test_the_knee_is_where_more_slots_answer_no_more() -> None:
    scores = np.array([100.0] * 10 + [0.01] * 90)
    assert fewest_within(scores, 100) <= 10
    assert fewest_within(np.ones(100), 100) == 100
    assert fewest_within(np.zeros(100), 60) == 60


def test_the_knee_only_cuts_and_keeps_the_floor() -> None:
    world = make_world(layers=2, experts=50)
    plan = plan_slots(size_classes(world.towers, 1), ExpertBudget("auto"), 8)
    one_hot = {0: np.eye(50)[3] * 9, 1: np.zeros(50)}
    cut = knee_slots(plan, one_hot, 8)
    assert cut.slots == (8,) and "profile" in cut.reason
    assert knee_slots(plan, {0: np.ones(50), 1: np.ones(50)}, 8) is plan
