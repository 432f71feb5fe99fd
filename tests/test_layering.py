"""The package's own order: imports point down, devices and the environment have places, modules say what they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "expertserve"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Each name may import names of the layers below its own, and its own package.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("terminal", "doctor", "server", "bench"),
    ("engine",),
    ("models", "text"),
    ("experts", "kv"),
    ("ops",),
    ("gguf",),
    ("config", "log", "anonymous"),
    ("cpus", "declare", "values", "data", "errors", "__init__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
DEVICE_WORDS = re.compile(r"\b(?:cuda|cupy|nvidia|gpus?|nvrtc)\b", re.IGNORECASE)
DEVICE_PLACES = ("ops/", "experts/device_store.py", "experts/factory.py", "config.py", "cli.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`, which run never."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from run_time_nodes(node)


def imported(source: str) -> set[str]:
    """The top-level names of the package that `source` imports, also inside functions."""
    names = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            modules = [f"{node.module}.{alias.name}" if node.module == "expertserve" else str(node.module)
                       for alias in node.names]  # fmt: skip
        else:
            continue
        names |= {module.split(".")[1] for module in modules if module.startswith("expertserve.")}
    return {name if name in LEVEL else "__init__" for name in names}


def upward_imports(name: str, source: str) -> set[str]:
    return {other for other in imported(source) if other != name and LEVEL[other] <= LEVEL[name]}


def shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_imports_point_down(path: Path) -> None:
    assert name_of(path) in LEVEL, "a new part of the package needs its place in LAYERS and in docs/DESIGN.md"
    assert not upward_imports(name_of(path), path.read_text())


def test_an_upward_import_would_be_seen() -> None:
    assert upward_imports("ops", "def f():\n    from expertserve.models import registry") == {"models"}
    assert upward_imports("kv", "import expertserve.experts.cache") == {"experts"}
    assert not upward_imports("engine", "from expertserve.kv.cache import KVCells\nfrom expertserve import config")


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_device_names_stay_in_their_places(path: Path) -> None:
    if not shown(path).startswith(DEVICE_PLACES):
        assert not DEVICE_WORDS.findall(path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_only_config_reads_the_environment(path: Path) -> None:
    found = re.findall(r"\b(?:environb?|getenvb?|putenv)\b", path.read_text())
    assert not found or shown(path) in ("config.py", "declare.py") or _only_in_strings(path.read_text())


def _only_in_strings(source: str) -> bool:
    names = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
              for alias in node.names}  # fmt: skip
    return not names & {"environ", "environb", "getenv", "getenvb", "putenv"}


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_module_says_what_it_is(path: Path) -> None:
    source = path.read_text()
    if source.strip():
        assert ast.get_docstring(ast.parse(source))
