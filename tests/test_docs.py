"""Documents agree with the program: generated parts, links, and the commands that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from expertserve.models.registry import architectures

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_generated_parts_are_up_to_date() -> None:
    checked = subprocess.run([sys.executable, "tools/gen_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_are_named_exist(path: Path) -> None:
    for block in re.findall(r"`+([^`]+)`+", path.read_text()):
        assert set(re.findall(r"\bmake ([a-z][a-z-]*)", block)) <= TARGETS, block


def test_ci_runs_the_test_command_of_the_readme() -> None:
    _, _, section = (ROOT / "README.md").read_text().partition("## Test")
    command = re.search(r"```\n(.+)\n```", section)
    assert command is not None
    assert command[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_architecture_that_is_served_is_listed() -> None:
    text = (ROOT / "docs" / "MODELS.md").read_text()
    assert [name for name in architectures() if f"`{name}`" not in text] == []
