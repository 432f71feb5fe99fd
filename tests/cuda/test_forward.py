"""Whole forwards through the CUDA backend and the device slot store, on emulated kernels."""

from __future__ import annotations

import numpy as np
import pytest

from expertserve.errors import CapacityError, KernelUnavailableError, UnsupportedModelError
from expertserve.experts.budget import size_classes
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from expertserve.ops.base import KVType
from expertserve.ops.cuda import device
from expertserve.ops.cuda.backend import LEAST_WORKSPACE_BYTES, CudaBackend
from expertserve.ops.factory import best_device, make_backend
from tests.cuda.emulator import available
from tests.cuda.fake_device import FakeDevice, installed
from tests.models.build import greedy, make_batch, open_forward
from tests.parity.oracle import FAMILIES, FIXTURES, ORACLE, assert_parity, exact_tolerance, reference
from tests.parity.test_keystone import cells_of, logits_of

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not available, reason="needs g++"),
    pytest.mark.skipif(not FIXTURES, reason="needs the oracle fixtures beside the checkout"),
]
ONE_OF_EACH = [
    min((f for f in FIXTURES if f.startswith(f"{family}/")), key=lambda f: ("q4_k" not in f, f))
    for family in FAMILIES
    if FIXTURES
]
DRAFTING = [f for f in ONE_OF_EACH if f.startswith(("qwen35moe", "qwen3next"))]


@pytest.mark.parametrize("fixture", ONE_OF_EACH)
def test_logits_are_the_exact_ones(fixture: str) -> None:
    ref = reference(fixture)
    with installed(FakeDevice()), open_forward(ORACLE / fixture, device="cuda", kv_type="f32", cells=256) as forward:
        logits = forward(make_batch(ref.tokens.tolist())).copy()
    assert np.abs(logits - ref.exact).max() <= exact_tolerance(fixture)


@pytest.mark.parametrize("fixture", ONE_OF_EACH)
def test_greedy_tokens_are_the_cpu_s_but_for_near_ties(fixture: str) -> None:
    """A near-tie: the two best logits are closer than four times the CPU's largest error on the prompt."""
    ref = reference(fixture)
    prompt, found, error = ref.tokens.tolist(), {}, 0.0
    for name in ("cuda", "cpu"):
        with installed(FakeDevice()), open_forward(ORACLE / fixture, device=name, cells=256) as forward:
            logits = forward(make_batch(prompt)).copy()
            assert_parity(logits, ref, 2.0, positions=2)
            error = float(np.abs(logits - ref.exact).max())
            found[name] = greedy(forward, prompt, 6)
    for ours, gap, theirs in zip(*found["cuda"], found["cpu"][0], strict=True):
        if ours != theirs:
            assert gap < 4 * error
            break


@pytest.mark.parametrize(
    ("fixture", "slots"), [*((fixture, "fewest") for fixture in ONE_OF_EACH), *((f, "half") for f in ONE_OF_EACH[:1])]
)
def test_streamed_equals_resident_bit_for_bit(fixture: str, slots: str) -> None:
    file = GGUFFile.open(ORACLE / fixture)
    model = load_model(file)
    fewest = model.hp.top_k * len(size_classes(model.towers, 1))
    experts = sum(tower.num_experts for tower in model.towers.values())
    stats = ExpertStats(every=0, emit=lambda line: None)
    outputs = []
    for budget in (str(max(fewest, experts // 2) if slots == "half" else fewest), "100%"):
        with (
            installed(FakeDevice()) as fake,
            open_forward(
                ORACLE / fixture,
                device="cuda",
                budget=budget,
                max_rows=12,
                cells=cells_of(2),
                state_slots=4,
                stats=stats,
            ) as forward,
        ):
            outputs.append(logits_of(forward, 12, 2))
        assert fake.used_bytes == 0
    assert np.isfinite(outputs[0]).all() and np.array_equal(*outputs)
    assert stats.total().misses > 0 and stats.total().exhausted == 0


def test_the_host_waits_once_a_layer_and_once_for_the_logits() -> None:
    fixture = ONE_OF_EACH[0]
    with installed(FakeDevice()) as fake, open_forward(ORACLE / fixture, device="cuda", cells=256) as forward:
        forward(make_batch([5, 6, 7]))
        before = fake.synchronizations
        forward(make_batch([8], 3))
        assert fake.synchronizations - before == forward.model.hp.num_layers + 1


@pytest.mark.parametrize("fixture", DRAFTING)
def test_the_draft_layer_runs_there_too(fixture: str) -> None:
    tokens = reference(fixture).tokens.tolist()
    found = []
    for name, fake in (("cuda", FakeDevice()), ("reference", FakeDevice())):
        with (
            installed(fake),
            open_forward(ORACLE / fixture, device=name, kv_type="f32", cells=256, draft=True) as forward,
        ):
            forward(make_batch(tokens))
            found.append(
                forward.draft(make_batch(tokens[1:], ahead=1), forward.hidden[: len(tokens) - 1].copy()).copy()
            )
    assert np.abs(found[0] - found[1]).max() <= 1e-3


def test_a_prompt_in_chunks_and_the_table_of_products_agree_with_single_rows() -> None:
    """Wide batches multiply by another way than narrow ones: both are right."""
    fixture = ONE_OF_EACH[0]
    ref = reference(fixture)
    with installed(FakeDevice()), open_forward(ORACLE / fixture, device="cuda", kv_type="f32", cells=256) as forward:
        parts, start = [], 0
        for size in (1, 7, len(ref.tokens) - 8):
            parts.append(forward(make_batch(ref.tokens[start : start + size].tolist(), start)).copy())
            start += size
    assert np.abs(np.concatenate(parts) - ref.exact).max() <= 1e-3


def test_device_memory_is_what_the_plan_says() -> None:
    fixture, cells, rows = ONE_OF_EACH[0], 256, 24
    with (
        installed(FakeDevice()) as fake,
        open_forward(ORACLE / fixture, device="cuda", budget="50%", cells=cells, max_rows=rows) as forward,
    ):
        forward(make_batch(reference(fixture).tokens.tolist()[:rows]))
        model, plan = forward.model, forward._lane.plan
        dense = sum(-(-info.nbytes // 256) * 256 for info in model.dense_weights())
        kv = sum(cells * kv.cell_bytes(KVType.F16) for kv in model.kv_layouts())
        workspace = fake.peak_bytes - dense - kv - plan.arena_bytes
        assert 0 < workspace < 4 << 20 < LEAST_WORKSPACE_BYTES
        assert fake.used_bytes <= fake.peak_bytes == dense + kv + plan.arena_bytes + workspace
    assert fake.used_bytes == 0


def test_what_does_not_fit_is_refused_before_weights_are_read() -> None:
    backend = CudaBackend(FakeDevice(vram_bytes=4 << 30))
    assert backend.memory() == (4 << 30, LEAST_WORKSPACE_BYTES)
    with (
        installed(FakeDevice(vram_bytes=1 << 20)),
        pytest.raises(CapacityError, match="the GPU refused .* (bytes|MiB) for"),
    ):
        with open_forward(ORACLE / ONE_OF_EACH[0], device="cuda"):
            pass


def test_a_cache_type_without_kernels_is_refused_by_name() -> None:
    with installed(FakeDevice()), pytest.raises(UnsupportedModelError, match="q8_0.*--kv-type f16"):
        with open_forward(ORACLE / ONE_OF_EACH[0], device="cuda", kv_type="q8_0"):
            pass


def test_a_device_that_is_missing_is_one_line_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    device.open_device.cache_clear()
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(KernelUnavailableError, match=r"CuPy is not installed: pip install 'expertserve\[cuda\]'"):
        make_backend("cuda", threads=1, flash_attention=True)
    assert best_device() == "cpu"
    with installed(FakeDevice()):
        assert best_device() == "cuda"
