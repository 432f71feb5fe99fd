"""The forms that values of settings take as text: sizes (how people are shown them, too), expert budgets, lists, files.

Each parser takes what a flag, variable or TOML key held and returns the typed value, or raises ValueError with a phrase
that starts with "should be". Which setting uses which form is declared in config.py.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

MIB, GIB = 1 << 20, 1 << 30
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for tail, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """How much room the experts' slots may take: `amount` in the unit that `kind` names (0 for auto)."""

    kind: Literal["auto", "bytes", "slots", "percent"]
    amount: float = 0

    def __str__(self) -> str:
        words = {"auto": "auto", "slots": f"{self.amount:.0f}", "percent": f"{self.amount:g}%"}
        return words.get(self.kind, f"{self.amount:.0f}B" if self.amount else "off")


def parse_bytes(value: object) -> int:
    """Bytes in `value`: a number, or a number with B, KB, KiB ... TiB (8GiB, 512M; a bare letter is binary)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("should be a size such as 8GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def size_text(nbytes: float) -> str:
    """Bytes for people: 512 bytes, 12.3 MiB, 4.56 GiB."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:,.2f} GiB"
    return f"{nbytes / MIB:.1f} MiB" if abs(nbytes) >= MIB / 10 else f"{nbytes:.0f} bytes"


def parse_budget(value: object) -> ExpertBudget:
    """An expert-cache budget: `auto`, bytes with a unit (8GiB), a number of slots (4000) or a share of the experts."""
    text = str(value).strip().lower()
    if text == "auto":
        return ExpertBudget("auto")
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        if 0 < float(match[1]) <= 100:
            return ExpertBudget("percent", float(match[1]))
    elif text.isdecimal():
        if int(text) > 0:
            return ExpertBudget("slots", int(text))
    else:
        try:
            if (size := parse_bytes(text)) > 0:
                return ExpertBudget("bytes", size)
        except ValueError:
            pass
    raise ValueError("should be auto, a size (8GiB), a number of experts (4000) or a share of the experts (40%)")


def parse_budget_or_off(value: object) -> ExpertBudget:
    """As `parse_budget`; `off` is no room at all."""
    return ExpertBudget("bytes") if str(value).strip().lower() == "off" else parse_budget(value)


def parse_scale(value: object) -> ExpertBudget:
    """A share (25%) or a size (8GiB) of a model."""
    return _share_or_size(value, "a share of the layers (25%) or a size (8GiB)")


def _share_or_size(value: object, expected: str) -> ExpertBudget:
    try:
        budget = parse_budget(value)
    except ValueError:
        budget = ExpertBudget("auto")
    if budget.kind not in ("percent", "bytes"):
        raise ValueError(f"should be {expected}")
    return budget


def parse_list(value: object) -> object:
    """A repeatable setting in one string: a JSON list, or words separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [word for word in value.split(",") if word]


def parse_origins(value: object) -> object:
    """Origins in the form in which browsers send them; `*` is any, and `null` a page without one."""
    strings = parse_list(value)
    return [_origin(string) for string in strings] if isinstance(strings, list | tuple) else strings


def _origin(value: object) -> object:
    if not isinstance(value, str) or value in ("*", "null"):
        return value
    match = re.fullmatch(
        r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]*]+)(:\d{1,5})?/?", value.strip().lower()
    )
    if not match:
        raise ValueError(
            "should be a scheme and a host, with a port where there is one, as in https://chat.example:8443"
        )
    scheme, host, port = match.groups(default="")
    return f"{scheme}://{host}{'' if (scheme, port) in (('http', ':80'), ('https', ':443')) else port}"


def parse_words(value: object) -> list[str]:
    """Several values in one string, or in several, separated by commas."""
    strings = [value] if isinstance(value, str | int | float) else value
    assert isinstance(strings, list | tuple)
    return [word.strip() for string in strings for word in str(string).split(",") if word.strip()]


def parse_counts(value: object) -> list[int]:
    """Numbers from 1 to 4096 separated by commas."""
    words = parse_words(value)
    if not words or not all(word.isdecimal() and len(word) < 5 and 1 <= int(word) <= 4096 for word in words):
        raise ValueError("should be numbers from 1 to 4096, as in 1,2,4,8")
    return [int(word) for word in words]


def parse_rates(value: object) -> list[float]:
    """Positive numbers separated by commas."""
    try:
        rates = [float(word) for word in parse_words(value)]
    except ValueError:
        rates = []
    if not rates or not all(1e-6 <= rate <= 1e6 for rate in rates):
        raise ValueError("should be numbers a second, as in 0.5,1,2")
    return rates


def parse_server(value: object) -> str:
    """An address of HTTP, without the /v1 and the slash that it may end with."""
    url = str(value).strip()
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) and not parts.query
    except ValueError:
        right = None
    if not right:
        raise ValueError("should be the address of a server, as in http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def parse_key(value: object) -> str:
    """A key that a header can hold."""
    key = str(value).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError("should be one line of printable ASCII")
    return key


def parse_budgets(value: object) -> list[ExpertBudget]:
    """Budgets separated by commas; a bare number is a share of the experts in percent."""
    budgets = []
    for word in parse_words(value):
        try:
            budgets.append(parse_budget(f"{word}%" if word.replace(".", "", 1).isdecimal() else word))
        except ValueError:
            raise ValueError(
                "should be shares of the experts in percent or sizes, as in 10,25,50 or 4GiB,8GiB"
            ) from None
    return budgets


def parse_cap(value: object) -> ExpertBudget | None:
    """A size, or a share of something in percent; nothing where nothing is given."""
    return None if value is None else _share_or_size(value, "a size (8GiB) or a share of the model's file (50%)")


def readable_file(value: object) -> Path:
    path = Path(str(value)).expanduser()
    if not os.path.isfile(path):  # pathlib raises for a name too long, such as the text of a template
        raise ValueError("should be a file that exists")
    return path


def file_to_write(value: object) -> Path:
    path = Path(str(value)).expanduser()
    folder = path.absolute().parent
    if os.path.isdir(path) or not os.path.isdir(folder):
        raise ValueError("should be a file to write, in a folder that exists")
    try:
        os.stat(path)
        written = path
    except FileNotFoundError:
        written = folder
    except OSError as error:
        raise ValueError(f"cannot be written: {error.strerror}") from None
    if not os.access(written, os.W_OK):
        raise ValueError("cannot be written: permission denied, or a read-only file system")
    return path


def file_or_off(value: object) -> Path | None:
    """A file that is read and replaced, so no device or pipe; None for `off`."""
    if value is None or str(value) == "off":
        return None
    path = file_to_write(value)
    if path.exists() and not path.is_file():
        raise ValueError("should be a regular file")
    return path
