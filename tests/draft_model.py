"""A model whose draft layer is right most of the time, made of a fixture whose drafts are hardly ever.

What the layers add to the residual stream is made small, so that the trunk mostly answers by the last token alone, and
the draft layer is made to answer by the same token in the same way. Where the layers still decide, it is wrong.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.file import GGUFFile

SMALL = ("attn_output", "ssm_out", "ffn_down_exps", "ffn_down_shexp")


def make_agreeable(source: Path, target: Path, *, scale: float) -> Path:
    """Writes `source`, an F16 file with a draft layer, to `target` with its layers' outputs times `scale`."""
    shutil.copyfile(source, target)
    file = GGUFFile.open(target)

    def change(name: str, edit: Callable[[NDArray[np.floating]], NDArray[np.floating]]) -> None:
        info = file.tensors[name]
        dtype = {"F16": np.float16, "F32": np.float32}[info.type.name]
        raw = bytearray(info.nbytes)
        file.read_tensor(name, memoryview(raw))
        values = np.frombuffer(raw, dtype).reshape(info.shape)
        with target.open("r+b") as out:
            out.seek(info.offset)
            out.write(edit(values).astype(dtype).tobytes())

    for name in file.tensors:
        if name.split(".")[-2] in SMALL:
            change(name, lambda values: values * scale)
    (nextn,) = {name.rsplit(".", 2)[0] for name in file.tensors if name.endswith("eh_proj.weight")}
    with_norm = np.frombuffer(_read(file, "output_norm.weight"), np.float32)
    change(f"{nextn}.eh_proj.weight", lambda values: np.eye(*values.shape))
    change(f"{nextn}.enorm.weight", np.ones_like)
    change(f"{nextn}.shared_head_norm.weight", lambda values: with_norm)
    return target


def _read(file: GGUFFile, name: str) -> bytes:
    raw = bytearray(file.tensors[name].nbytes)
    file.read_tensor(name, memoryview(raw))
    return bytes(raw)
