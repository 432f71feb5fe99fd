"""`expertserve bench --synth`: a model of a real one's shapes with random weights and the routing skew of a trace.

Owns the file: its size before anything is written, its bytes as they stream to the disk, and that nobody ever sees half
of it. Memory does not grow with the model. The same recipe gives the same file; a file that says in its header that it
is of the recipe is not written again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from expertserve.bench.made_vocabulary import add_vocabulary, word_ids
from expertserve.bench.presets import BRANCHES, PRESETS, Planned, Preset
from expertserve.bench.random_blocks import Bytes, quantised, random_blocks
from expertserve.bench.skew import Directions, LayerSkew, Skew, chances, constants
from expertserve.config import SETTINGS, Settings
from expertserve.errors import CapacityError, ConfigError, GGUFError
from expertserve.experts.router import RouterRule
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.tensor import block_elements, row_bytes
from expertserve.values import ExpertBudget

RECIPE_KEY = "expertserve.recipe"
_CHUNK = 8 << 20
_SPARE = 64 << 20  # header and vocabulary, and what a file system wants for itself


@dataclass(frozen=True)
class Recipe:
    """What a synthetic file depends on."""

    name: str
    preset: Preset
    skew: Skew
    seed: int

    @property
    def text(self) -> str:
        """Says in the header what the file was made from; changes with whatever would change its bytes."""
        digest = zlib.crc32(repr((self.preset, self.skew)).encode())
        return f"1 {self.name} layers={self.preset.layers} seed={self.seed} {digest:08x}"

    def draws(self, name: str) -> np.random.Generator:
        """Randomness of one tensor, which depends on no other."""
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, zlib.crc32(name.encode())])))

    @cached_property
    def directions(self) -> Directions:
        preset = self.preset
        return Directions(self.seed, preset.hidden, word_ids(preset.vocab), preset.vocab)

    def chunks(self, tensor: Planned) -> Iterator[Bytes]:
        """The tensor's bytes, a few MiB at a time."""
        draws, columns = self.draws(tensor.name), tensor.shape[-1]
        rows = max(1, _CHUNK // (4 * columns))
        if tensor.name in ("token_embd.weight", "output.weight"):
            for first in range(0, tensor.shape[0], rows):
                count = min(rows, tensor.shape[0] - first)
                yield quantised(self._token_rows(tensor.name, draws, first, count), tensor.type)
        elif tensor.name.endswith("ffn_gate_inp.weight"):
            yield quantised(self._router(int(tensor.name.split(".")[1]), draws), tensor.type)
        elif tensor.type.name == "F32":
            values = draws.standard_normal(tensor.elements, np.float32) * np.float32(tensor.std)
            yield (values + np.float32(tensor.mean)).view(np.uint8)
        else:
            per_block = block_elements(tensor.type)
            source = random_blocks(draws, tensor.type, tensor.std)
            left, most = tensor.elements // per_block, _CHUNK // row_bytes(per_block, tensor.type)
            while left:
                yield source(min(left, most))
                left -= min(left, most)

    def _token_rows(self, name: str, draws: np.random.Generator, first: int, count: int) -> NDArray[np.float32]:
        if name == "token_embd.weight":
            return self.directions.embeddings(first, count)
        return self.directions.output(draws, first, count, 1 + BRANCHES)

    def _router(self, layer: int, draws: np.random.Generator) -> NDArray[np.float32]:
        preset = self.preset
        skew = self.skew.at((layer - preset.dense_layers) / (preset.layers - preset.dense_layers))
        energy = 1 + BRANCHES * (layer + 0.5) / preset.layers
        return self.directions.router(draws, skew, _constants(skew, preset.experts, preset.rule), energy)


@lru_cache(maxsize=256)
def _constants(skew: LayerSkew, experts: int, rule: RouterRule) -> NDArray[np.float64]:
    return constants(chances(skew, experts, rule.top_k), rule)


def recipe_of(settings: Settings) -> Recipe:
    """The recipe that the settings ask for.

    Raises:
        ConfigError: no such preset, or more layers than it has.
    """
    name = settings.synth or ""
    if name not in PRESETS:
        raise ConfigError(f"--synth {name}: no such preset; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    layers = settings.layers or _layers_for(preset, settings.scale)
    if layers > preset.layers:
        raise ConfigError(f"--layers {layers}: {name} has {preset.layers}; give at most as many")
    skew = Skew.shipped() if settings.skew is None else Skew.of_trace(settings.skew)
    return Recipe(name, preset.with_layers(layers), skew, settings.synth_seed)


def _layers_for(preset: Preset, scale: ExpertBudget) -> int:
    """How many layers come to the share or the size asked for."""
    if scale.kind == "percent":
        return max(1, round(preset.layers * scale.amount / 100))
    if scale.kind != "bytes":
        return preset.layers
    fitting = [n for n in range(1, preset.layers + 1) if preset.with_layers(n).nbytes + _SPARE <= scale.amount]
    if not fitting:
        least = preset.with_layers(1).nbytes + _SPARE
        raise ConfigError(f"--scale {scale}: one layer with the vocabulary is {least / 1e9:.1f} GB; give at least that")
    return fitting[-1]


def made(settings: Settings) -> Path:
    """The synthetic model that the settings ask for, written unless it is there already.

    Raises:
        ConfigError: there is no such preset, or another file has its name.
        CapacityError: it does not fit the disk.
    """
    recipe = recipe_of(settings)
    path = settings.output or Path(f"{recipe.name}-synthetic.gguf")
    total, active = recipe.preset.parameters()
    about = f"{recipe.preset.layers} layers, {total / 1e9:.2f}B parameters, {active / 1e9:.2f}B active a token"
    if path.exists():
        if _recipe_in(path) != recipe.text:
            raise ConfigError(f"{path}: is there and of another recipe; remove it or give --output another name")
        print(f"{path}: there already: {about}", flush=True)
        return path
    write(recipe, path)
    print(f"{path}: {about}, {path.stat().st_size / 1e9:.2f} GB", flush=True)
    return path


def _recipe_in(path: Path) -> str | None:
    try:
        with GGUFFile.open(path) as file:
            text = file.metadata.get(RECIPE_KEY)
    except GGUFError:
        return None
    return text if isinstance(text, str) else None


def write(recipe: Recipe, path: Path) -> None:
    """Writes the model beside `path` and moves it there when it is whole; whatever ends it early leaves nothing.

    Raises:
        CapacityError: the disk is too small, or filled up.
    """
    needed = recipe.preset.nbytes + _SPARE
    try:
        free = shutil.disk_usage(path.absolute().parent).free
        if needed > free:
            raise CapacityError(
                f"{path}: needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free; "
                "shrink it with --layers or --scale, or give --output a place elsewhere"
            )
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            _write_header(recipe, temporary)
            _append_tensors(recipe, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CapacityError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_header(recipe: Recipe, path: Path) -> None:
    logging.getLogger("gguf").setLevel(logging.WARNING)  # it would announce the temporary file
    writer = gguf.GGUFWriter(path, recipe.preset.architecture)
    writer.add_name(f"synthetic {recipe.name}")
    writer.add_string(RECIPE_KEY, recipe.text)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in recipe.preset.metadata().items():
        kind = gguf.GGUFValueType.get_type(value)
        unsigned = kind is gguf.GGUFValueType.INT32
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if unsigned else kind)
    add_vocabulary(writer, recipe.preset.vocab, pre=recipe.preset.pre, score_merged=recipe.preset.score_merged)
    for tensor in recipe.preset.tensors():
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _append_tensors(recipe: Recipe, path: Path) -> None:
    total, done, shown = recipe.preset.nbytes, 0, 0.0
    with open(path, "ab") as out:
        for tensor in recipe.preset.tensors():
            out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for chunk in recipe.chunks(tensor):
                out.write(chunk.data)
                done += chunk.nbytes
                if sys.stderr.isatty() and time.monotonic() - shown > 0.5:
                    shown = time.monotonic()
                    print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB written", end="", file=sys.stderr, flush=True)
        out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def of_made_model(settings: Settings) -> Settings:
    """Settings that measure the synthetic model of these, which is made now unless it is there."""
    path = made(settings)
    defaults = {name: SETTINGS[name].default for name in ("synth", "output", "layers", "scale", "skew", "synth_seed")}
    return dataclasses.replace(settings, model=str(path), **defaults)


def write_only(settings: Settings) -> int:
    """Writes the model and says in one JSON line what it is."""
    path = made(settings)
    preset = recipe_of(settings).preset
    total, active = preset.parameters()
    print(
        json.dumps(
            {
                "model": str(path),
                "file_bytes": path.stat().st_size,
                "layers": preset.layers,
                "parameters": total,
                "active_parameters": active,
            }
        )
    )
    return 0
