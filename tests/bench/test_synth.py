"""Synthetic models: real sizes, files that load and decode, routing as skewed as the trace it was taken from."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from expertserve.bench import synth
from expertserve.bench.lab import LayerStats, read_decode, trace_stats
from expertserve.bench.presets import PRESETS, Latent, Planned, Preset
from expertserve.bench.random_blocks import random_blocks
from expertserve.bench.skew import LayerSkew, Skew
from expertserve.bench.synth import Recipe, made, recipe_of, write
from expertserve.cli import main
from expertserve.config import resolve
from expertserve.errors import CapacityError, ConfigError
from expertserve.experts.router import RouterRule
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import find_towers
from expertserve.gguf.tensor import TensorType
from expertserve.models.registry import load_model
from expertserve.text.tokenizer import Tokenizer
from tests.models.build import greedy, open_forward

TRACE = Path(__file__).parents[1] / "data" / "demo_routing.trace.xz"
# Billions of parameters: all, and active for a token as published, some with the table of embeddings and some without.
PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "deepseek-v3": (671.0, 37.0),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "mixtral-8x7b": (46.7, 12.9),
}


def narrow(name: str, layers: int = 4, **sizes: Any) -> Preset:
    """A preset of small matrices with everything else as it is."""
    preset = PRESETS[name]
    latent = Latent(query=64, keys=64, nope=32, rotated=32, value=32) if preset.latent else None
    small = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "vocab": 3000, "latent": latent}
    small |= {"shared_ffn": 256 * bool(preset.shared_ffn), "dense_ffn": 256 * bool(preset.dense_ffn), "context": 4096}
    small |= {"experts": min(preset.experts, 64)}
    return dataclasses.replace(preset, **(small | sizes)).with_layers(layers)


def recipe(preset: Preset, skew: Skew | None = None, seed: int = 0) -> Recipe:
    return Recipe("narrow", preset, skew or Skew.shipped(), seed)


def settings(**flags: Any) -> Any:
    return resolve({"synth": "qwen3-30b-a3b", **flags}, command="bench")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_the_real_model(name: str) -> None:
    preset = PRESETS[name]
    total, active = preset.parameters()
    published_total, published_active = PUBLISHED[name]
    assert total / 1e9 == pytest.approx(published_total, rel=0.002)
    with_table = active + preset.vocab * preset.hidden
    assert active / 1e9 * 0.99 <= published_active <= with_table / 1e9 * 1.01


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_decodes_from_few_slots(name: str, tmp_path: Path) -> None:
    preset = narrow(name)
    path = tmp_path / "model.gguf"
    write(recipe(preset), path)
    with GGUFFile.open(path) as file:
        model, tokenizer = load_model(file), Tokenizer.from_gguf(file)
        assert sorted(model.towers) == [layer for layer in range(4) if preset.routed(layer)]
        assert model.router == dataclasses.replace(preset.rule, group_judges=model.router.group_judges)
        text = "The tea is at nine, 42 \u20ac: \u00fcber\n\n"
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
        assert tokenizer.vocab_size == preset.vocab and len(tokenizer.encode("internationalisation")) < 20
    with open_forward(path, budget="20%") as forward:
        tokens, gaps = greedy(forward, [300, 400, 500], 60)
    assert np.isfinite(gaps).all() and len(set(tokens)) == 60


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K, TensorType.MXFP4])
def test_random_blocks_have_the_deviation_asked_for(type: TensorType) -> None:
    for std in (0.02, 0.7):
        blocks = random_blocks(np.random.Generator(np.random.SFC64(1)), type, std)(20000)
        values = gguf.quants.dequantize(blocks, type)
        assert values.std() == pytest.approx(std, rel=0.02)
        assert abs(values.mean()) < 0.01 * std
        assert len(zlib.compress(blocks[:2000].tobytes())) > 0.9 * blocks[:2000].nbytes


def test_a_tensor_of_any_size_is_made_in_small_pieces() -> None:
    for name, preset in PRESETS.items():
        made_of = Recipe(name, preset, Skew.shipped(), 0)
        for tensor in {t.name.split(".", 2)[-1]: t for t in preset.tensors()}.values():
            assert next(made_of.chunks(tensor)).nbytes <= 9 << 20


def routing(preset: Preset, skew: Skew, folder: Path, steps: int = 500) -> list[LayerStats]:
    """How a model made with `skew` routes over a greedy answer, by its recorded trace."""
    write(recipe(preset, skew), folder / "model.gguf")
    with open_forward(folder / "model.gguf", cells=1024, trace=folder / "trace") as forward:
        greedy(forward, [300, 900, 1500, 2100], steps)
    return trace_stats(read_decode(folder / "trace")).layers


def deficits(layers: list[LayerStats]) -> np.ndarray[Any, Any]:
    """Bits that each layer's entropy lacks of an even choice."""
    return np.array([np.log2(layer.experts) - layer.entropy_bits for layer in layers])


def test_the_shipped_skew_is_that_of_the_recorded_trace() -> None:
    assert Skew.of_trace(TRACE) == Skew.shipped()


def test_a_model_routes_as_unevenly_as_the_trace_its_skew_came_from(tmp_path: Path) -> None:
    source = trace_stats(read_decode(TRACE)).layers
    preset = narrow("qwen3-30b-a3b", layers=6, hidden=512, experts=40, top_k=4, rule=RouterRule(4))
    synthetic = routing(preset, Skew.shipped(), tmp_path)
    assert np.abs(deficits(synthetic) - deficits(source)).max() < 0.3
    assert np.mean([a.hottest_quarter - b.hottest_quarter for a, b in zip(synthetic, source, strict=True)]) < 0.06
    # An even choice would repeat a tenth of the experts.
    assert np.mean([layer.repeated for layer in synthetic]) == pytest.approx(
        np.mean([layer.repeated for layer in source]), abs=0.06
    )


def test_an_even_skew_gives_an_even_choice_without_memory(tmp_path: Path) -> None:
    preset = narrow("qwen3-30b-a3b", layers=6, hidden=512, experts=40, top_k=4, rule=RouterRule(4))
    layers = routing(preset, Skew((LayerSkew((1.0,) * 40, 0.0),)), tmp_path)
    assert deficits(layers).max() < 0.25
    assert np.mean([layer.repeated for layer in layers]) < 0.15


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(recipe(narrow("gpt-oss-20b"), seed=seed), tmp_path / name)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b and len(a) == len(c) and a != c
    with GGUFFile.open(tmp_path / "a") as file:
        size = sum(tensor.nbytes for tower in find_towers(file).values() for tensor in tower.slices)
        tensors = [(t.name, t.shape, t.nbytes) for t in narrow("gpt-oss-20b").tensors()]
        assert [(t.name, t.shape, t.nbytes) for t in file.tensors.values()] == tensors
    assert size > 0.5 * len(a) and len(zlib.compress(a, 1)) > 0.85 * len(a)


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs \d+\.\d GB and the disk has \d+\.\d GB free; .*--scale"):
        write(dataclasses.replace(recipe(PRESETS["deepseek-v3"]), preset=_huge()), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def _huge() -> Preset:
    """More than any disk: a petabyte."""
    return dataclasses.replace(PRESETS["deepseek-v3"], experts=1 << 20)


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])
def test_whatever_ends_the_writing_leaves_no_file(
    ended_by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def chunks(self: Recipe, tensor: Planned) -> Iterator[Any]:
        if tensor.name == "blk.1.attn_q.weight":
            seen.extend(path.name for path in tmp_path.iterdir())
            raise ended_by
        yield from original(self, tensor)

    original = Recipe.chunks
    monkeypatch.setattr(Recipe, "chunks", chunks)
    expected = CapacityError if isinstance(ended_by, OSError) else ended_by
    with pytest.raises(expected):
        write(recipe(narrow("small")), tmp_path / "model.gguf")
    assert len(seen) == 1 and "model.gguf" not in seen and not list(tmp_path.iterdir())


def test_a_file_of_the_recipe_is_used_and_any_other_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth, "PRESETS", {"narrow": narrow("small")})
    path = tmp_path / "model.gguf"
    wanted = settings(synth="narrow", output=str(path), layers="2")
    before = made(wanted).stat()
    assert made(wanted).stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ConfigError, match="another recipe; remove it or give --output"):
        made(settings(synth="narrow", output=str(path), layers="3"))
    shutil.copy(TRACE, path)
    with pytest.raises(ConfigError, match="another recipe"):
        made(wanted)
    assert path.read_bytes() == TRACE.read_bytes()


def test_layers_and_scale_say_how_many_layers() -> None:
    def layers(**flags: Any) -> int:
        return recipe_of(settings(**flags)).preset.layers

    assert (layers(), layers(layers="7"), layers(scale="25%")) == (48, 7, 12)
    fitting = layers(scale="4GiB")
    preset = PRESETS["qwen3-30b-a3b"]
    assert preset.with_layers(fitting).nbytes <= 4 * 2**30 < preset.with_layers(fitting + 1).nbytes + (64 << 20)
    deep = PRESETS["deepseek-v3"].with_layers(2)
    assert (deep.dense_layers, deep.routed(0), deep.routed(1)) == (1, False, True)
    with pytest.raises(ConfigError, match="--layers 49: qwen3-30b-a3b has 48"):
        layers(layers="49")
    with pytest.raises(ConfigError, match="one layer with the vocabulary is"):
        layers(scale="100MB")


def test_the_command_line_names_the_presets_and_benches_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--synth", "qwen"]) == 2
    error = capsys.readouterr().err
    assert "--synth qwen: no such preset; there are qwen3-30b-a3b, " in error and "deepseek-v3" in error
    monkeypatch.setattr(synth, "PRESETS", {"narrow": narrow("small")})
    assert main(["bench", "--synth", "narrow", "--layers", "2", "--write-only"]) == 0
    assert '"layers": 2' in capsys.readouterr().out and (tmp_path / "narrow-synthetic.gguf").exists()
    sizes = ("--prompt-tokens", "8", "--decode-tokens", "4", "--repetitions", "1", "--device", "cpu")
    assert main(["bench", "--synth", "narrow", "--layers", "2", *sizes]) == 0
    out = capsys.readouterr().out
    assert "there already" in out and '"decode_tok_s"' in out.splitlines()[-1]
    assert main(["bench", "--synth", "narrow", "--layers", "2", *sizes, "--budgets", "50"]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["void"] for row in compared["rows"]] == [None] * 3


def test_a_trace_too_short_for_a_skew_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(recipe(narrow("small")), path)
    with open_forward(path, trace=tmp_path / "trace") as forward:
        greedy(forward, [300], 3)
    with pytest.raises(ConfigError, match="too short for a skew"):
        Skew.of_trace(tmp_path / "trace")
