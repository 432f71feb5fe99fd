"""The command `doctor`: what of this machine the program would use, and what is in its way.

Owns the checks and how they are printed. Each check answers for itself; one that fails does not end the others.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from expertserve import __version__
from expertserve.config import resolve
from expertserve.cpus import physical_cores
from expertserve.data import DEMO_NAME, model_path
from expertserve.errors import ExpertServeError
from expertserve.experts.disk_trial import open_trial
from expertserve.experts.memory import available_memory
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from expertserve.ops.devices import device_reports
from expertserve.values import size_text

LEAST_DESCRIPTORS = 1024
_PACKAGES = ("numpy", "ggml-python", "llguidance", "fastapi", "uvicorn")
_TRIAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check: fine, worth knowing, or in the way."""

    verdict: Literal["ok", "note", "FAIL"]
    subject: str
    text: str


def doctor(model: str | None) -> int:
    """Prints what is found; returns 1 where something is in the way of serving."""
    findings = list(_findings(model))
    for finding in findings:
        print(f"{finding.verdict:4}  {finding.subject:10}  {finding.text}")
    return int(any(finding.verdict == "FAIL" for finding in findings))


def _findings(model: str | None) -> Iterator[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [_environment, _devices, _memory, _limits]
    for check in checks:
        yield from check()
    yield from _file(model or DEMO_NAME)


def _environment() -> Iterator[Finding]:
    yield Finding(
        "ok", "program", f"expertserve {__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    for name in _PACKAGES:
        try:
            yield Finding("ok", "package", f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("FAIL", "package", f"{name} is not installed: install expertserve with pip")
    cores = physical_cores()
    yield Finding("ok", "processor", f"{cores} physical cores may be used; --threads takes them by default")


def _devices() -> Iterator[Finding]:
    for device, (works, text) in device_reports().items():
        yield Finding("ok" if works else "FAIL" if device == "cpu" else "note", "device", f"{device}: {text}")


def _memory() -> Iterator[Finding]:
    memory = available_memory()
    yield Finding("ok", "memory", f"{size_text(memory.nbytes)} to be had, by {memory.limited_by}")


def _limits() -> Iterator[Finding]:
    if os.name != "posix":
        return
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= LEAST_DESCRIPTORS
    advice = "" if enough else f"; each client needs one: raise it to {LEAST_DESCRIPTORS} or more (ulimit -n)"
    yield Finding("ok" if enough else "note", "limits", f"{soft} open files{advice}")


def _file(model: str) -> Iterator[Finding]:
    try:
        file = GGUFFile.open(model_path(model))
        nbytes = sum(path.stat().st_size for path in file.paths)
        count = "1 file" if len(file.paths) == 1 else f"{len(file.paths)} files"
        yield Finding("ok", "model", f"{model}: {file.architecture}, {size_text(nbytes)} in {count}")
        threads = resolve({"model": model}).io_threads
        with open_trial(load_model(file).towers, file.paths, threads) as (trial, mode):
            if mode != "direct":
                yield Finding("note", "disk", "no direct reads on this file system: they go through the page cache")
            if trial is None:
                yield Finding("note", "disk", "not timed: hardly an expert is in the file")
                return
            trial.take(_TRIAL_S)
            trial.take(_TRIAL_S)
    except (ExpertServeError, OSError) as error:
        yield Finding("FAIL", "model", " ".join(str(error).split()))
        return
    rate = trial.rate()
    yield Finding(
        "ok",
        "disk",
        f"{rate.bandwidth / 1e9:.2f} GB/s in reads of experts at random, {trial.reads} x "
        f"{trial.expert_bytes / trial.reads / 1e6:.2f} MB each, by {threads} threads ({mode})",
    )
