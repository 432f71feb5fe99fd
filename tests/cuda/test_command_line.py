"""`expertserve run --device cuda` as a user starts it, in a process whose GPU is the emulated one."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from expertserve.ops.cuda.backend import LEAST_WORKSPACE_BYTES
from tests.cuda.emulator import available

pytestmark = pytest.mark.skipif(not available, reason="needs g++")

CODE = """
import sys
from expertserve.cli import main
from tests.cuda.fake_device import FakeDevice, installed
with installed(FakeDevice(int(sys.argv[1]))):
    status = main(sys.argv[2:])
sys.exit(status)
"""
ASKED = ("--prompt", "Why is the sky blue?", "--temperature", "0", "--max-tokens", "5", "--ctx", "256", "--chunk", "32")


def command_line(*arguments: str, vram_bytes: int = 8 << 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, str(vram_bytes), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def run(*options: str, vram_bytes: int = 8 << 30) -> subprocess.CompletedProcess[str]:
    return command_line("run", "demo", *ASKED, *options, vram_bytes=vram_bytes)


def test_auto_takes_the_gpu_and_any_budget_gives_the_same_answer() -> None:
    resident, streamed = run("--device", "cuda", "--expert-cache", "100%"), run("--expert-cache", "25%")
    assert resident.returncode == streamed.returncode == 0, resident.stderr + streamed.stderr
    assert resident.stdout == streamed.stdout and len(streamed.stdout.split()) > 2
    on = re.search(r"\[expert-stream\] ON slots=\d+ .* host_slots=(\d+)", streamed.stderr)
    assert on is not None and int(on[1]) > 0
    final = dict(re.findall(r"(\w+)=(\d+)", streamed.stderr.strip().splitlines()[-1]))
    assert int(final["steps"]) >= 5 and int(final["misses"]) > 0 and int(final["exhausted"]) == 0
    assert int(final["kept"]) > 0 and int(final["lifted"]) > 0


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_setting() -> None:
    dense = run(vram_bytes=LEAST_WORKSPACE_BYTES + (1 << 20))
    assert dense.returncode == 5
    assert re.search(r"error: [\d.]+ MiB of dense .* 769\.0 MiB .* reserve of 768\.0 MiB .* --ctx", dense.stderr)
    slots = run("--expert-cache", "100%", vram_bytes=LEAST_WORKSPACE_BYTES + (8 << 20))
    assert slots.returncode == 5
    assert re.search(r"error: [\d.]+ MiB of expert slots do not fit .*--expert-cache \d+MiB or less", slots.stderr)
    host = run("--expert-cache", "50%", "--host-cache", "1000TiB")
    assert host.returncode == 0, "a tier is as large as what has no slot, not as what was allowed"


@pytest.mark.slow
def test_plan_runs_the_first_layers_on_the_gpu() -> None:
    done = command_line("plan", "demo", "--device", "cuda", "--expert-cache", "50%", "--json", vram_bytes=2 << 30)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["device"], report["memory_bytes"], report["slots"]) == ("cuda", 2 << 30, 120)
    assert report["reserve_bytes"] == LEAST_WORKSPACE_BYTES and report["decode_tok_s"] > 0
    assert "--host-cache" in report["not_counted"]


def test_settings_of_the_other_device_are_named_as_without_effect() -> None:
    done = run("--device", "cuda", "--threads", "2", "--flash-attn", "off")
    assert "--threads has no effect: the GPU computes" in done.stderr
    assert "--flash-attn has no effect: the GPU computes" in done.stderr
    done = run("--device", "cpu", "--host-cache", "1GiB")
    assert "--host-cache has no effect: experts lie in host memory already" in done.stderr


def test_without_a_gpu_it_is_one_line_and_nothing_is_loaded() -> None:
    command = [sys.executable, "-m", "expertserve.cli", "run", "demo", "--device", "cuda", "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: --device cuda cannot be used: ")
    assert "steps=0" in done.stderr.strip().splitlines()[-1] or "steps=0" in done.stderr


def test_the_cpu_imports_nothing_of_it() -> None:
    code = """
import sys
from expertserve.cli import main
status = main(["run", "demo", "--device", "cpu", "--prompt", "x", "--max-tokens", "1"])
assert not [name for name in sys.modules if name.startswith(("cupy", "expertserve.ops.cuda"))], "CUDA was imported"
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
