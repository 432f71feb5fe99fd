"""The final line: exactly once per process, whatever ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PREAMBLE = """
import ctypes, os, signal, sys, threading, time
from expertserve.experts.final_line import flush_final_line, install_final_line
from expertserve.experts.stats import ExpertStats
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test runner was started under
signal.signal(signal.SIGHUP, signal.SIG_DFL)
stats = ExpertStats(every=2)
install_final_line(stats, json_path=os.environ.get("JSON"))
def step():
    stats.enter_phase(1, 0)
    stats.current.hits += 3
    stats.leave_phase(draft=False)
"""
FINAL = re.compile(
    r"^\[expert-stream\] steps=(\d+) hits=\d+ misses=\d+ evictions=\d+ fills=\d+ bytes=\d+ "
    r"exhausted=\d+ advised=\d+( |$)"
)
READY = "print('ready', flush=True); "


def run(code: str, *, send: signal.Signals | None = None, json_path: Path | None = None) -> tuple[int, list[str]]:
    """Runs code after the preamble; returns the exit status and the statistics lines."""
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    if json_path is not None:
        environment["JSON"] = str(json_path)
    command = [sys.executable, "-c", PREAMBLE + code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            if send is not None:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
                process.send_signal(send)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()  # nothing where it has ended
    return process.returncode, [line for line in err.splitlines() if line.startswith("[expert-stream]")]


WAYS = {
    "normal exit": ("step()", None, 0, 1),
    "zero steps": ("", None, 0, 0),
    "sys.exit": ("step(); sys.exit(4)", None, 4, 1),
    "exception": ("step(); raise RuntimeError('x')", None, 1, 1),
    "refused load": ("raise SystemExit('error: the model does not fit')", None, 1, 0),
    "SIGTERM": ("step(); " + READY + "time.sleep(20)", signal.SIGTERM, 128 + 15, 1),
    "SIGHUP": ("step(); " + READY + "time.sleep(20)", signal.SIGHUP, 128 + 1, 1),
    "SIGINT": ("step(); " + READY + "time.sleep(20)", signal.SIGINT, -2, 1),
    "SIGTERM while a thread never ends": (
        "threading.Thread(target=time.sleep, args=(3,)).start(); " + READY + "time.sleep(20)",
        signal.SIGTERM,
        128 + 15,
        0,
    ),
    "SIGTERM then another": (
        "\ntry:\n    " + READY + "time.sleep(20)\nfinally:\n    os.kill(os.getpid(), signal.SIGTERM)",
        signal.SIGTERM,
        128 + 15,
        0,
    ),
    "abort callback": (
        "step(); back = ctypes.CFUNCTYPE(None)(flush_final_line); back(); os.abort()",
        None,
        -signal.SIGABRT,
        1,
    ),
    "abort callback on a thread Python did not start": (
        "step(); back = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda a: flush_final_line())\n"
        "libc = ctypes.CDLL(None); handle = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(handle), None, back, None); libc.pthread_join(handle, None); os._exit(7)",
        None,
        7,
        1,
    ),
    "os._exit after flushing": ("step(); flush_final_line(); os._exit(5)", None, 5, 1),
    "flushed by hand and at exit": ("step(); flush_final_line(); flush_final_line()", None, 0, 1),
    "installed twice": ("install_final_line(stats); step()", None, 0, 1),
    "stderr replaced": ("import io; sys.stderr = io.StringIO(); step()", None, 0, 1),
    "stderr closed by Python": ("sys.stderr.close(); sys.stderr = None; step()", None, 0, 1),
    "a forked child ends first": (
        "pid = os.fork()\nif pid == 0:\n    step(); sys.exit(0)\nos.waitpid(pid, 0); step()",
        None,
        0,
        1,
    ),
    "a step ends after the line": ("step(); flush_final_line(); step()", None, 0, 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_final_line_is_printed_exactly_once(way: str) -> None:
    code, send, status, steps = WAYS[way]
    returned, lines = run(code, send=send)
    assert returned == status
    assert len(lines) == 1, lines
    match = FINAL.match(lines[0])
    assert match is not None and int(match[1]) == steps


def test_the_final_line_comes_after_the_periodic_ones_and_has_the_last_counts() -> None:
    _, lines = run("for _ in range(5): step()")
    assert [int(FINAL.match(line)[1]) for line in lines] == [2, 4, 5]  # type: ignore[index]


def test_statistics_of_two_models_end_in_one_line_with_the_sums() -> None:
    _, lines = run(
        "other = ExpertStats(every=0); install_final_line(other); step(); other.enter_phase(1, 0)\n"
        "other.leave_phase(draft=True)"
    )
    assert len(lines) == 1 and "steps=2 hits=3 " in lines[0]


def test_the_json_file_holds_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    _, lines = run("step(); step(); step()", json_path=path)
    written = json.loads(path.read_text())
    assert (written["steps"], written["hits"]) == (3, 9) and "steps=3 hits=9" in lines[-1]
    assert written["phases"]["decode"]["steps"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]


def test_a_json_file_that_cannot_be_written_costs_a_warning_not_the_line(tmp_path: Path) -> None:
    status, lines = run("step()", json_path=tmp_path / "absent" / "stats.json")
    assert status == 0 and len(lines) == 1


def test_statistics_go_into_a_pipe_without_replacing_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    run("step()", json_path=pipe)
    reader.join(20)
    assert json.loads(received[0]) and pipe.is_fifo()
