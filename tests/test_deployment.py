"""The files in configs/ that others run: what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

from expertserve.config import SETTINGS
from expertserve.declare import ENV_PREFIX

CONFIGS = Path(__file__).parents[1] / "configs"


def test_the_unit_gives_only_options_that_serve_has() -> None:
    unit = (CONFIGS / "expertserve.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    flags = re.findall(r"--[a-z-]+", command)
    assert flags
    known = {setting.flag for setting in SETTINGS.values() if "serve" in setting.declared.commands}
    assert set(flags) <= known


def test_the_image_sets_only_settings_there_are_and_builds_ggml_for_no_one_processor() -> None:
    dockerfile = (CONFIGS / "Dockerfile").read_text()
    variables = set(re.findall(rf"{ENV_PREFIX}[A-Z_]+", dockerfile))
    assert variables and variables <= {setting.variable for setting in SETTINGS.values()}
    assert "-DGGML_NATIVE=OFF" in dockerfile and "--no-binary ggml-python" in dockerfile
