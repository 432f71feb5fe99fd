"""The look from outside at a comparison, and the document that `make bench` writes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertserve.data import model_path
from tools import bench_docs, compare_capped, compare_llamacpp, compare_plan
from tools.gen_docs import with_generated
from tools.watched_sweep import Process


def test_rates_and_bytes_are_of_decode_in_the_timed_runs() -> None:
    process = Process()
    at, nbytes = 0.0, 0
    for run, step_s in enumerate((9.0, 0.5, 0.25, 0.2)):  # the first is not timed
        for step in range(1, 13):  # 2 of the prompt, 10 of decode
            at, nbytes = at + (100.0 if step <= 2 else step_s), nbytes + (1000 if step <= 2 else 7 if run else 99)
            process.steps[run * 12 + step] = (at, nbytes)
    assert process.decode(3, 10) == (pytest.approx(4.0), 7.0)


def test_steps_that_are_no_whole_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="13 steps are not 2 runs with 6 steps of decode"):
        Process({step: (float(step), 0) for step in range(1, 14)}).decode(1, 6)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not say what a process reads")
def test_every_row_is_seen_and_its_bytes_are_those_of_bench(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    shape = ["--prompt-tokens", "16", "--decode-tokens", "8", "--repetitions", "1", "--results-json", str(path)]
    command = [sys.executable, "-m", "tools.watched_sweep", "demo", "--budgets", "25", "--threads", "1", *shape]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert [line["row"] for line in result["outside"]] == ["resident", "page cache", "25%"]
    assert all(line["outside_tok_s"] > 0 for line in result["outside"])
    assert bench_docs.disagreement(result["outside"])[1] == 0.0


def row(part: str, budget: str, **more: Any) -> dict[str, Any]:
    names = (
        "decode_tok_s decode_tok_s_least decode_tok_s_most prefill_tok_s first_token_ms interval_p50_ms interval_p99_ms"
    )
    names += " file_bytes_token stall_ms_token compute_ms_token roofline_tok_s of_roofline peak_bytes other_cores"
    figures = dict.fromkeys(names.split(), 0.5)
    empty = {"disk_bytes_token": None, "decode_hit_rate": None, "void": None, "refused": None}
    return {"part": part, "expert_cache": budget, **figures, **empty, **more}


def test_the_document_has_every_row_and_what_does_not_count_says_why() -> None:
    found = {
        "model": "small.gguf", "file_bytes": 1_060_000_000, "when": "2020-01-02", "runs": 3, "memory_bytes_s": 3e10,
        "memory_bytes_s_by": "probe", "disk_bytes_s": 1.5e9, "disk_bytes_s_by": "25%", "void": 1,
        "rows": [row("resident", "100%"), row("row", "10%", void="steps did not advance"), row("row", "25%")],
        "outside": [{"row": "25%", "decode_tok_s": 10.0, "disk_bytes_token": 5e7, "outside_tok_s": 10.4,
                     "outside_bytes_token": 5.1e7}],
    }  # fmt: skip
    text = bench_docs.section(dict.fromkeys(bench_docs.PARTS) | {"budgets": found})
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in rows] == ["| slots", "| all (control)", "| 25%", "| slots", "| 25%"]
    assert len({line.count("|") for line in rows[:3]}) == 1
    assert "- 10%: VOID: steps did not advance" in text and "1.50 GB/s of storage (by 25%)" in text
    rates, nbytes = bench_docs.disagreement(found["outside"])  # type: ignore[arg-type]
    assert rates == pytest.approx(0.04) and 0.01 < nbytes < 0.02


def test_only_what_stands_between_the_markers_is_written() -> None:
    begin, end = bench_docs.MARKERS
    text = bench_docs.DOCUMENT.read_text()
    assert text.count(begin) == text.count(end) == 1
    written = with_generated(text, "anew", bench_docs.MARKERS)
    assert written.startswith(text[: text.index(begin)]) and written.endswith(text[text.index(end) :])
    assert written[written.index(begin) : written.index(end)] == f"{begin}\n\nanew\n\n"


def test_figures_measured_beside_other_work_are_left_out_of_medians() -> None:
    alone, beside = {"decode": 10.0, "decode_other_cores": 0.1}, {"decode": 4.0, "decode_other_cores": 0.9}
    assert compare_llamacpp.quiet([beside, alone, beside], "decode") == [alone]
    assert compare_llamacpp.quiet([alone, beside], "anon") == [alone, beside]
    figures = {"prefill": 1.0, "start": 1.0, "anon": 1.0}
    runs = {name: [run | figures for run in (beside, alone)] for name in compare_llamacpp.ENGINES}
    assert "| decode tok/s | 10.00 | 10.00 | 10.00 | 1.00 | 1.00 |" in compare_llamacpp.table(runs)


def test_a_plan_a_run_and_its_simulation_alternate() -> None:
    found = compare_plan.compare(Path(model_path("demo")), 1, ["50"])
    assert [run["kind"] for run in found[:3]] == ["plan", "simulated", "measured"]
    assert all(run["tok_s"] > 0 and run["waiting_ms"] >= 0 for run in found)
    assert found[0]["hit_rate"] == pytest.approx(0.846) and 0 < found[1]["hit_rate"] < 1


def test_predictions_are_compared_by_medians_of_what_was_left_alone() -> None:
    def runs(kind: str, others: float, *rates: float) -> list[dict[str, Any]]:
        each = {"kind": kind, "share": "25", "hit_rate": 0.6, "waiting_ms": 7.0, "others": others}
        return [each | {"tok_s": rate} for rate in rates]

    found = runs("plan", 0.1, 5.0, 6.0, 7.0) + runs("plan", 0.9, 99.0)
    found += runs("simulated", 0.0, 4.0) + runs("measured", 0.0, 8.0, 2.0, 4.0)
    rates = "6.00 (5.00, 7.00) | 4.00 (4.00, 4.00) | 4.00 (2.00, 8.00)"
    assert (
        compare_plan.table(found).splitlines()[-1] == f"| 25% | {rates} | 1.50, 1.00 | 7.0, 7.0, 7.0 | 0.600, 0.600 |"
    )


def capped_run(decode: float, **more: Any) -> dict[str, Any]:
    figures = {"prefill": 40.0, "decode": decode, "slots": 7, "digest": "a", "counts": True, "others": 0.0}
    return figures | {"disk_bytes": 48_000_000, "peak_bytes": 2**30} | more


def test_under_a_cap_only_runs_with_the_output_of_no_limit_have_figures() -> None:
    ours, theirs = compare_capped.ENGINES
    peer = [capped_run(2.0), capped_run(50.0, others=0.9)]
    found = {
        "10": {ours: [{"refused": "too little", "others": 0.0}], theirs: peer},
        "25": {ours: [capped_run(4.0), capped_run(6.0)], theirs: peer},
        "50": {ours: [capped_run(9.0), capped_run(9.0, digest="b")], theirs: peer},
        "75": {ours: [capped_run(9.0, counts=False)], theirs: peer},
    }
    lines = compare_capped.table(found, {"digest": "a"}).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| 10%", "| 25%", "| 50%", "| 75%"]
    assert "| 7 | 5.00 (4.00-6.00), 2.00 (2.00-2.00) |" in lines[3] and lines[3].endswith("| 2.50, 1.00 |")
    assert all("| -, 2.00 (2.00-2.00) |" in lines[row] for row in (2, 4, 5))
    assert lines[7:] == [
        "- 10%: did not fit: too little",
        "- 50%: VOID: another output than without a limit",
        "- 75%: VOID: a run did not advance a step a token, or refused an expert",
    ]
