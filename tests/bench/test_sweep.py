"""Comparisons of `expertserve bench`: each reason for a void row fires when its cause is there; rows say what ran."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertserve.bench import meter, page_cache, rates
from expertserve.bench.figures import Bandwidth, Machine, figures
from expertserve.bench.memory_cap import limited_memory
from expertserve.bench.plan import model_sizes
from expertserve.bench.plots import plot_sweep
from expertserve.bench.sweep import cases, sweep
from expertserve.bench.verdict import void_reason
from expertserve.config import SETTINGS, Settings, as_flags, resolve
from expertserve.data import model_path
from expertserve.errors import ConfigError
from expertserve.experts import router
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models import forward
from expertserve.models.registry import load_model
from tests.gguf_writer import make_tiny_moe

SMALL = {"device": "cpu", "prompt_tokens": "24", "decode_tokens": "6", "repetitions": "1", "threads": "1"}


def settings(**given: str) -> Settings:
    return resolve({"model": "demo", **SMALL, **given})


def report(capsys: pytest.CaptureFixture[str], **given: str) -> dict[str, Any]:
    """Of a real run in this process."""
    assert rates.bench(settings(**{"expert_cache": "50%", "reader": "buffered", **given}), quiet()) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def quiet() -> ExpertStats:
    return ExpertStats(every=0, emit=lambda line: None)


def test_a_healthy_run_counts_beside_its_control(capsys: pytest.CaptureFixture[str]) -> None:
    control, row = report(capsys, expert_cache="100%"), report(capsys, expert_cache="15%")
    assert void_reason(control, None) is None and void_reason(row, control) is None
    assert row["phases"]["decode"]["misses"] and not control["phases"]["decode"]["misses"]
    assert row["decoded"] == 5 and row["forwards"] == 6 and row["sampled"] == 6


def test_a_dead_clock_voids_the_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertStats, "leave_phase", lambda self, draft: None)
    assert void_reason(report(capsys), None) == "steps did not advance: 0 for 6 forwards"


def test_exhausted_slots_void_the_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    enter = ExpertStats.enter_phase

    def refuse_one(self: ExpertStats, decode_rows: int, prefill_rows: int) -> None:
        enter(self, decode_rows, prefill_rows)
        self.current.exhausted += not prefill_rows

    monkeypatch.setattr(ExpertStats, "enter_phase", refuse_one)
    assert void_reason(report(capsys), None) == "decode exhausted the slots: 5 experts were refused"


def test_another_output_voids_the_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    control = report(capsys)

    def a_little_more(*arguments: Any) -> Any:
        ids, weights = router.route(*arguments)
        return ids, weights * np.float32(1.001)

    monkeypatch.setattr(forward, "route", a_little_more)
    said = void_reason(report(capsys), control)
    assert said is not None and said.startswith("the output differs from the control's")


def test_bytes_that_disagree_void_the_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    more = count(0, 32 << 20)
    monkeypatch.setattr(meter, "disk_bytes", lambda: next(more))
    said = void_reason(report(capsys), None)
    assert said is not None and said.startswith("bytes disagree in prefill: ")


def test_direct_reads_that_never_came_from_storage_void_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = report(capsys) | {"reader": "direct", "disk_bytes": {"prefill": 0, "decode": 0}}
    assert void_reason(row, None) is None  # within the slack
    row["phases"]["decode"]["bytes"] = 100 << 20
    said = void_reason(row, None)
    assert said is not None and said.startswith("bytes disagree in decode: 104857600 were asked of the file")


def test_a_decode_without_experts_voids_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = report(capsys)
    row["phases"]["decode"] |= {"hits": 0, "misses": 0}
    assert void_reason(row, None) == "decode asked for no expert"


def test_a_batch_gives_each_sequence_its_tokens_in_steps_they_share(capsys: pytest.CaptureFixture[str]) -> None:
    row = report(capsys, batch="3")
    assert row["phases"]["decode"]["steps"] == 5 and row["phases"]["decode"]["rows"] == row["decoded"] == 15
    assert (
        len(row["first_token_ms_runs"]) == 3
        and void_reason(row, report(capsys, batch="3", expert_cache="100%")) is None
    )


def test_rows_are_the_product_of_the_lists_with_two_controls_a_group() -> None:
    found = cases(settings(budgets="10,25,1MiB", readers="direct,mmap", batches="1,2", lookahead="off"))
    assert len(found) == 2 * (2 + 6)
    assert [str(case.settings.expert_cache) for case in found[:4]] == ["100%", "off", "10%", "10%"]
    assert {case.settings.lookahead for case in found} == {"off"}
    assert str(found[7].settings.expert_cache) == "1048576B" and found[7].settings.reader == "mmap"
    assert not any(case.settings.budgets or case.settings.batches for case in found)


def test_arguments_made_of_settings_give_the_same_settings() -> None:
    made = settings(
        expert_cache="off", host_cache="off", budgets="10,2GiB", drafts="off,mtp", flash_attn="off", ctx="64"
    )
    flags = as_flags(made, "bench")
    values: dict[str, Any] = {"model": "demo"}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        values[name] = [*values.get(name, []), value] if SETTINGS[name].repeatable else value
    assert replace(resolve(values), origin={}, flags={}) == replace(made, origin={}, flags={})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", value)]
    return subprocess.run(
        [sys.executable, "-m", "expertserve.cli", "bench", *given, *arguments], capture_output=True, text=True
    )


def test_table_csv_and_json_have_the_same_rows(tmp_path: Path) -> None:
    lines, whole = tmp_path / "rows.csv", tmp_path / "rows.json"
    picture = tmp_path / "rows.svg"
    done = run(
        "demo", "--budgets", "25", "--plot", str(picture), "--results-csv", str(lines), "--results-json", str(whole)
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert picture.read_text().startswith("<?xml")
    assert json.loads(whole.read_text()) == result and result["void"] == 0
    assert [row["part"] for row in result["rows"]] == ["resident", "page cache", "row"]
    with lines.open(newline="") as file:
        assert [float(row["decode_tok_s"]) for row in csv.DictReader(file)] == [
            row["decode_tok_s"] for row in result["rows"]
        ]
    assert all(0 < row["of_roofline"] <= 1.001 for row in result["rows"])
    row = result["rows"][2]
    assert row["slots"] == 60 and 0 < row["decode_hit_rate"] < 1 and row["compared_with"].startswith("resident")
    assert f"{row['decode_tok_s']:.2f}" in done.stdout.splitlines()[-2]
    assert " steps=18 " in done.stderr.splitlines()[-1]  # of the timed runs of all rows


def test_a_roofline_is_no_lower_than_what_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    row = report(capsys, expert_cache="15%")
    row |= {"disk_bytes": {"prefill": 0, "decode": 100 << 20}}
    with GGUFFile.open(model_path("demo")) as file:
        sizes = model_sizes(load_model(file))
    asleep = Machine(sizes, Bandwidth(1e6, "probe"), Bandwidth(1e6, "probe"))
    assert figures(row, asleep)["of_roofline"] > 100
    awake = asleep.raised_by([("15%", row)])
    assert 0 < figures(row, awake)["of_roofline"] <= 1
    assert awake.memory.shown_by == "15%" and awake.disk is not None and awake.disk.shown_by == "15%"
    fast = Machine(sizes, Bandwidth(1e15, "probe"), Bandwidth(1e15, "probe"))
    assert fast.raised_by([("15%", row)]) == fast


def test_rows_that_differ_in_more_than_the_budget_have_lines_of_their_own(tmp_path: Path) -> None:
    common = {"slots": 10, "lookahead": "on", "batch": 1, "prompt_tokens": 8, "draft": "off", "decode_tok_s": 2.0}
    common |= {"roofline_tok_s": 3.0, "decode_hit_rate": 0.5, "stall_ms_token": 1.0, "compute_ms_token": 2.0}
    rows = [common | {"part": "row", "reader": reader, "expert_ms_token": 1.0} for reader in ("direct", "mmap")]
    out = tmp_path / "rows.svg"
    plot_sweep(out, "a model", rows, 40, {0: np.array([3, 1, 0])})
    said = set(re.findall(r"<!-- (.*?) -->", out.read_text()))
    assert {"decode direct", "decode mmap", "25% direct", "25% mmap", "tokens/s (log)", "ms a token"} <= said


def test_processor_time_of_others_is_what_a_busy_process_had() -> None:
    before = meter.seconds_of_others()
    if before is None:
        pytest.skip("the kernel does not say")
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = meter.seconds_of_others()
    assert after is not None and after - before > 0.4


def test_cores_of_others_are_their_seconds_over_those_that_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, clock = count(5), count(100, 2)
    monkeypatch.setattr(meter, "seconds_of_others", lambda: next(seconds))
    monkeypatch.setattr(meter, "perf_counter", lambda: next(clock))
    assert report(capsys)["other_cores"] == 0.5


def test_a_picture_of_one_configuration_is_drawn(tmp_path: Path) -> None:
    done = run("demo", "--expert-cache", "50%", "--plot", str(tmp_path / "one.svg"))
    assert done.returncode == 0 and (tmp_path / "one.svg").read_text().startswith("<?xml"), done.stderr


def test_a_picture_without_anything_to_draw_is_said_and_fails(tmp_path: Path) -> None:
    done = run("demo", "--budgets", "50", "--decode-tokens", "1", "--plot", str(tmp_path / "none.svg"))
    assert done.returncode == 1 and not (tmp_path / "none.svg").exists()
    assert "nothing is drawn, no row has a decode speed" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["void"] == 0


@pytest.mark.parametrize(
    ("flag", "name", "why"),
    [
        ("--plot", "rows.txt", "the name of a picture should end with .png, .svg or .pdf"),
        ("--results-csv", "r" * 256, "cannot be written: File name too long"),
        ("--results-json", "none/rows.json", "should be a file to write, in a folder that exists"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_a_row_runs(
    tmp_path: Path, flag: str, name: str, why: str
) -> None:
    done = run("demo", "--budgets", "50", flag, str(tmp_path / name))
    assert done.returncode == 2 and not done.stdout
    said = [line for line in done.stderr.splitlines() if not line.startswith("[expert-stream]")]
    assert len(said) == 1 and said[0].startswith(f"error: {flag} ") and said[0].endswith(why)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("full", ["--results-json", "--results-csv"])
def test_a_file_that_fails_at_the_end_costs_only_itself(tmp_path: Path, full: str) -> None:
    files = {flag: str(tmp_path / flag) for flag in ("--results-json", "--results-csv")} | {full: "/dev/full"}
    files["--plot"] = str(tmp_path / "drawn.svg")
    done = run("demo", "--expert-cache", "50%", *(word for flag in files.items() for word in flag))
    assert done.returncode == 2 and json.loads(done.stdout.splitlines()[-1])["void"] == 0
    assert f"error: {full} /dev/full: cannot be written: No space left on device" in done.stderr
    assert len(list(tmp_path.iterdir())) == 2 and Path(files["--plot"]).stat().st_size


def test_a_model_that_vanishes_voids_the_rows_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_moe(tmp_path / "m.gguf")
    from expertserve.bench import sweep as module

    real = module.measure_row

    def measure(case: Any, *rest: Any) -> dict[str, Any]:
        if case.part == "row":
            model.unlink(missing_ok=True)
        return real(case, *rest)

    monkeypatch.setattr(module, "measure_row", measure)
    assert sweep(settings(model=str(model), budgets="50"), quiet()) == 1
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    assert [bool(row["void"]) for row in result["rows"]] == [False, False, True]
    assert "No such file" in result["rows"][2]["void"] and "decode_tok_s" not in result["rows"][2]
    assert "Traceback" not in shown and shown.splitlines()[-2].split("VOID: ")[1].startswith("its process ended with")


def test_a_model_that_vanishes_while_it_is_measured_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_moe(tmp_path / "m.gguf")
    real = rates.measure_all

    def measure(*arguments: Any, **named: Any) -> Any:
        model.unlink()
        return real(*arguments, **named)

    monkeypatch.setattr(rates, "measure_all", measure)
    with pytest.raises(ConfigError, match=r"m\.gguf: the file is no longer there"):
        rates.bench(settings(model=str(model), expert_cache="50%", reader="buffered"), quiet())


def test_rows_that_a_cap_kills_are_void_and_say_what_they_held() -> None:
    try:
        with limited_memory(16 << 20):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
    done = run("demo", "--expert-cache", "50%", "--memory-cap", "16MiB", "--page-cache", "cold")
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert done.returncode == 1 and len(rows) == 3
    for row in rows:
        assert row["void"].startswith("its process ended with signal 9: without a word (it held ")
        assert row["void"].endswith(" of the 16.0 MiB of --memory-cap)")


def test_a_budget_that_does_not_fit_is_no_void_row() -> None:
    done = run("demo", "--budgets", "1")
    assert done.returncode == 0, done.stdout
    row = json.loads(done.stdout.splitlines()[-1])["rows"][2]
    assert row["void"] is None and "too little room" in row["refused"] and "did not fit: " in done.stdout


def test_cold_is_dropped_and_warm_is_filled(tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "m.gguf")
    page_cache.fill([model])
    assert page_cache.cached_share([model]) == 1.0
    try:
        page_cache.drop([model])
    except ConfigError:
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.cached_share([model]) < page_cache.COLD


def test_a_page_cache_that_lost_the_model_voids_a_warm_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = report(capsys, page_cache="warm")
    assert row["cached"] == [1.0, 1.0] and void_reason(row, None) is None
    said = void_reason(row | {"cached": [1.0, 0.5]}, None)
    assert said is not None and said.startswith("the page cache lost the model: 50%")


def test_a_cap_over_a_cache_that_is_not_cold_is_refused() -> None:
    done = run("demo", "--memory-cap", "1GiB")
    assert done.returncode == 2 and "add --page-cache cold" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("own", "where", "limit"),
    [
        ("4:memory:/job\n", "sys/fs/cgroup/memory/job", "memory.limit_in_bytes"),
        ("0::/user/job\n", "sys/fs/cgroup/user", "memory.max"),
    ],
)
def test_a_group_that_has_no_limit_file_is_refused_and_removed(
    tmp_path: Path, own: str, where: str, limit: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    (tmp_path / where).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"no control group can be made .*{limit}"), limited_memory(1 << 30, tmp_path):
        pass
    assert not list((tmp_path / where).iterdir())
