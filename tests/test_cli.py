"""The command line: options made from the settings, errors of one line, and whole processes on the embedded model."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from expertserve import __version__
from expertserve.cli import main
from expertserve.config import SETTINGS
from expertserve.data import model_path
from expertserve.declare import COMMANDS, ENV_PREFIX
from expertserve.errors import ConfigError
from tests.gguf_writer import make_tiny_moe

FINAL = re.compile(r"^\[expert-stream\] steps=(\d+) hits=\d+ misses=\d+ evictions=\d+ fills=\d+ bytes=\d+ exhausted=0 ")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "expertserve.cli", *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str], stdin: str = "") -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(stdin, timeout=120)
        finally:
            process.kill()  # nothing where it has ended
    return process.returncode, out, err


def final_steps(err: str) -> int:
    """Steps of the final line, after checking that it is there and there once."""
    lines = [line for line in err.splitlines() if FINAL.match(line)]
    assert len(lines) == 1, err
    assert lines[0] == err.splitlines()[-1]
    match = FINAL.match(lines[0])
    assert match is not None
    return int(match[1])


def errors(err: str) -> list[str]:
    assert "Traceback" not in err, err
    return [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_an_option_for_each_setting_it_obeys_and_no_other(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Options:")[2]
    words = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", listed, re.MULTILINE))
    for setting in SETTINGS.values():
        if setting.name != "model":
            obeyed = {mode.split()[0] for mode in setting.declared.commands}
            assert (setting.flag in words) == (command in obeyed), setting.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "demo", "--thread", "3"], "No such option: --thread"),
        (["run", "demo", "--temp", "1"], "No such option: --temp"),
        (["run", "demo", "--port", "1"], "No such option: --port"),
        (["run", "demo", "more"], "unexpected extra argument"),
        (["run", "demo", "-t", "x"], "--threads 'x'"),
        (["run", "demo", "-t"], "requires an argument"),
        (["serve", "demo", "--port", "-1"], "--port '-1'"),
        (["run"], "no model named"),
        (["walk"], "No such command 'walk'"),
        (["--frobnicate"], "No such option: --frobnicate"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_and_status_2(
    arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", shown.err) and said in shown.err


def test_a_repeatable_option_keeps_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def keep(command: str, flags: dict[str, object]) -> None:
        seen.update(flags)
        raise ConfigError("enough")

    monkeypatch.setattr("expertserve.cli._start", keep)
    assert main(["run", "demo", "--stop", "a", "--stop", "b", "--raw"]) == 2
    assert seen == {"model": "demo", "stop": ["a", "b"], "raw": True}


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"expertserve {__version__}\n"


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: expertserve" in capsys.readouterr().err


def test_the_package_run_as_a_module_ends_with_the_status_of_its_command() -> None:
    for arguments, status in (["--version"], 0), (["walk"], 2):
        assert (
            subprocess.run([sys.executable, "-m", "expertserve", *arguments], capture_output=True).returncode == status
        )


def test_help_imports_nothing_heavy() -> None:
    heavy = ["numpy", "ggml", "gguf", "fastapi", "uvicorn", "structlog", "pydantic_settings", "tokenizers", "jinja2"]
    code = f"import sys, expertserve.cli; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_demo_names_the_embedded_model() -> None:
    assert model_path("demo").is_file()
    assert model_path("./demo") == Path("demo")


def test_run_streams_the_same_answer_from_a_flag_and_from_a_pipe(tmp_path: Path) -> None:
    numbers = tmp_path / "stats.json"
    options = ("--temperature", "0", "-n", "12", "--ignore-eos", "--stats-every", "0")
    flag = start("run", "demo", "-p", "hello", *options, "--stats-json", str(numbers))
    pipe = start("run", "demo", *options)
    status, answer, err = finish(flag)
    assert status == 0 and answer.strip() and not errors(err)
    assert final_steps(err) == 12
    assert json.loads(numbers.read_text())["steps"] == 12
    assert re.search(r"^prompt: \d+ tokens .* tok/s; answer: 12 tokens, [\d.]+ tok/s$", err, re.MULTILINE)
    assert finish(pipe, "hello")[:2] == (0, answer)


def on_a_terminal(*arguments: str) -> str:
    """What a process shows on a terminal of its own, with both streams."""
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "expertserve.cli", *arguments]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        try:
            while part := os.read(master, 1 << 16):
                shown += part
        except OSError:  # what Linux answers once nobody has the other end any more
            pass
    os.close(master)
    assert process.returncode == 0, shown
    return shown.decode()


@pytest.mark.skipif(os.name != "posix", reason="a terminal as on POSIX")
def test_statistics_do_not_break_into_an_answer_on_a_terminal_unless_asked_for() -> None:
    options = ("run", "demo", "-p", "hello", "--temperature", "0", "-n", "20", "--ignore-eos")
    line = "[expert-stream] steps="
    assert on_a_terminal(*options).count(line) == 1
    assert on_a_terminal(*options, "--stats-every", "16").count(line) == 2


def test_a_setting_without_effect_is_said_at_start_and_a_refused_load_ends_with_the_final_line(tmp_path: Path) -> None:
    missing = start("run", str(tmp_path / "none.gguf"), "-p", "x", "--temperature", "0", "--seed", "1")
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(100))
    malformed = start("bench", str(tmp_path / "bad.gguf"))
    status, out, err = finish(missing)
    assert (status, out, final_steps(err)) == (3, "", 0)
    assert len(errors(err)) == 1 and "none.gguf" in errors(err)[0]
    assert "--seed has no effect" in err
    status, out, err = finish(malformed)
    assert (status, out, final_steps(err)) == (3, "", 0)
    assert len(errors(err)) == 1 and "bad.gguf" in errors(err)[0]


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_a_signal_in_mid_answer_ends_the_process_with_the_final_line(tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "long.gguf", context=1 << 15)  # an answer that does not end by itself
    options = ("--ctx", str(1 << 15), "--ignore-eos", "--stats-every", "0")
    arguments = ("run", str(model), "-p", "hello", *options)
    numbers = {signal.SIGINT: 130, signal.SIGTERM: 143}
    running = {number: start(*arguments) for number in numbers}
    for number, process in running.items():
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(number)
    for number, process in running.items():
        status, _, err = finish(process)
        assert status == numbers[number] and not errors(err)
        assert final_steps(err) > 0


def test_bench_ends_with_one_json_line_of_medians() -> None:
    options = ("--prompt-tokens", "20", "--decode-tokens", "4", "--repetitions", "3", "--stats-every", "0")
    status, out, err = finish(start("bench", "demo", *options))
    assert status == 0 and not errors(err)
    assert final_steps(err) == 4 * 4
    result = json.loads(out.splitlines()[-1])
    assert result["model"] == "demo" and result["repetitions"] == 3
    for name in ("prefill_tok_s", "decode_tok_s", "first_token_ms"):
        assert math.isfinite(result[name]) and result[name] > 0
    assert len(out.splitlines()) == 4
