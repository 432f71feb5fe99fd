"""Which files make up a model: names of the splits and the agreement of their metadata.

A split model is `NAME-00001-of-0000N.gguf` to `NAME-0000N-of-0000N.gguf`; each file says in its metadata which one it
is. Owns naming and those checks, not the parsing of a file. Invariant: a model is one file or all N of one set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertserve.errors import GGUFError
from expertserve.gguf.cursor import shown
from expertserve.gguf.header import Header

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_REMEDY = "put all splits of one model, unrenamed, in one folder"


def split_count(metadata: dict[str, Any], path: Path) -> int:
    """Number of files the model is split into; 1 for a whole one."""
    return max(1, _integer(metadata, "split.count", path, default=1))


def split_paths(path: Path, count: int) -> list[Path]:
    """Paths of all `count` splits, given any one of them; refuses by name a set with a gap."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        raise GGUFError(
            f"{path}: metadata 'split.count' says {count} files, which does not fit the name "
            f"(NAME-00001-of-{count:05d}.gguf is expected); {_REMEDY}"
        )
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GGUFError(f"{path}: split {missing[0]}{more} of {count} is missing; {_REMEDY}")
    return paths


def check_splits(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    """Refuse splits that are not the files of one model, each once and in order."""
    total = sum(len(header.tensors) for header in headers)
    architecture = headers[0].metadata.get("general.architecture")
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        expected = {"split.no": index, "split.count": len(paths), "split.tensors.count": total}
        for key, value in expected.items():
            found = _integer(header.metadata, key, path)
            if found != value:
                raise GGUFError(f"{path}: metadata {key!r} is {found}, but {value} is expected; {_REMEDY}")
        if header.metadata.get("general.architecture", architecture) != architecture:
            raise GGUFError(f"{path}: the architecture differs from that of {paths[0].name}; {_REMEDY}")
    _check_duplicates(paths, headers)


def _check_duplicates(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    owner: dict[str, Path] = {}
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in owner:
                raise GGUFError(f"{path}: tensor {shown(tensor.name)} is also in {owner[tensor.name].name}; {_REMEDY}")
            owner[tensor.name] = path


def _integer(metadata: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise GGUFError(f"{path}: metadata {key!r} is {'missing' if value is None else 'not an integer'}; {_REMEDY}")
    return value
