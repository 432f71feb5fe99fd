"""`expertserve plan`: sizes against the file, figures against a replay, a file that is still growing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from expertserve.bench.costs import ComputeCosts, DiskCosts
from expertserve.bench.miniature import MiniatureFile, Period, measure_costs, read_cost
from expertserve.bench.plan import knee_share, predict_decode, traced_hit_rate, usual_hit_rate
from expertserve.cli import main
from expertserve.config import resolve
from expertserve.data import model_path
from expertserve.errors import ConfigError, GGUFError
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from expertserve.ops.devices import device_reports

TRACE = Path(__file__).parents[1] / "data" / "demo_routing.trace.xz"
DEMO = Path(model_path("demo"))


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_token_takes_what_its_parts_take_and_waits_for_what_has_no_slot() -> None:
    compute = ComputeCosts(step_s=0.1, layer_s=0.02, expert_s=0.01)
    disk = DiskCosts(bandwidth=1000.0, latency_s=0.0, depth=8, reads=1, expert_bytes=500.0)
    resident = predict_decode(compute, None, 3, 4, 1.0, "auto")
    assert resident is not None and not resident.ahead
    assert resident.step.seconds == pytest.approx(0.1 + 3 * (0.02 + 4 * 0.01))
    absent = predict_decode(compute, disk, 3, 4, 0.0, "off")
    assert absent is not None and absent.step.reads == 12
    assert absent.step.seconds == pytest.approx(0.1 + 3 * (0.02 + 4 * 0.5 + 0.01))
    assert predict_decode(compute, None, 3, 4, 0.5, "off") is None


def test_the_knee_is_where_more_slots_answer_hardly_more() -> None:
    assert knee_share(lambda share: min(1.0, 2 * share), 1.0) == pytest.approx(0.5)
    assert knee_share(lambda share: share, 0.5) == pytest.approx(0.5)


@pytest.mark.skipif(device_reports()["cuda"][0], reason="there is a GPU")
def test_a_device_that_is_not_here_is_planned_for_with_memory_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--device", "cuda"]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--device cuda cannot be used" in line and line.endswith("as in --memory 24GiB")
    report = plan(capsys, "demo", "--device", "cuda", "--memory", "8GiB", "--expert-cache", "50%")
    assert (report["device"], report["slots"], report["decode_tok_s"]) == ("cuda", 120, None)
    assert "cuda" in report["not_measured"] and report["reserve_bytes"] == 768 << 20


def test_the_usual_hit_rates_are_those_of_the_embedded_models_routing() -> None:
    replayed = traced_hit_rate(TRACE, 240)
    for share in (0.05, 0.25, 0.5, 0.75, 0.9):
        assert usual_hit_rate(share) == pytest.approx(replayed(share), abs=0.002)


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 experts"):
        traced_hit_rate(TRACE, 256)


def test_sizes_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "demo", "--expert-cache", "50%", "--ctx", "512")
    assert report["file_bytes"] == report["present_bytes"] == DEMO.stat().st_size
    with GGUFFile.open(DEMO) as file:
        total = sum(info.nbytes for info in file.tensors.values())
    assert report["dense_bytes"] + report["expert_bytes"] == total
    assert (report["slots"], report["experts"], report["token_experts"]) == (120, 240, 24)
    assert report["working_bytes"] * 10 == report["expert_bytes"]
    assert (
        report["context"] == 512
        and report["decode_tok_s"] > 0
        and report["prefill_tok_s"] > 0
        and report["knee_share"] <= report["share"] == 0.5
    )


def test_less_room_predicts_no_more_speed(capsys: pytest.CaptureFixture[str]) -> None:
    curve = plan(capsys, "demo")["curve"]
    rates = [row["decode_tok_s"] for row in curve]
    assert curve[-1]["share"] == curve[-1]["hit_rate"] == 1.0
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_the_formula_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "demo", "--expert-cache", "50%")
    left, _, total = report["formula"].removesuffix(" ms a token").rpartition(" = ")
    terms = left.replace("of waiting", "").replace("of guessing", "").replace("reads", "").replace(" x ", " * ")
    assert eval(terms) == pytest.approx(float(total), rel=0.02)
    assert report["decode_tok_s"] == pytest.approx(1000 / report["token_ms"])
    assert report["reads_a_token"] >= 24 * (1 - report["hit_rate"]) * 0.8


def test_what_a_read_costs_is_the_slope_over_reads_whatever_else_ran() -> None:
    def period(reads: int, busy: float) -> Period:
        return Period(1, seconds=busy + 9.0 * reads, expert_s=0.0, stalled_s=9.0 * reads, reads=reads)

    without = [period(reads, 2.0 + 0.25 * reads) for reads in (0, 1, 2, 3, 1, 0)]
    disturbed = [period(2, 50.0), *[period(reads, 3.0 + 0.25 * reads) for reads in (4, 1, 2, 2, 0)]]
    assert read_cost([without]) == pytest.approx(0.25)
    assert read_cost([without, disturbed]) == pytest.approx(0.25)
    assert read_cost([[period(3, 1.0), period(3, 2.0)]]) is None


def test_one_layer_is_too_few_to_time() -> None:
    model = load_model(MiniatureFile(GGUFFile.open(DEMO), 1))
    with pytest.raises(ConfigError, match="one layer with experts"):
        measure_costs(model, resolve({"model": "demo"}))


def test_what_would_be_refused_is_said_with_the_loaders_words(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "demo", "--expert-cache", "1", code=5)
    assert "top-4 needs 12 slots" in report["refused"] and "slots" not in report
    assert "do not fit" in plan(capsys, "demo", "--memory", "390MiB", "--expert-cache", "100%", code=5)["refused"]
    assert main(["plan", "demo", "--memory", "10MiB"]) == 5
    refusal = capsys.readouterr().out.splitlines()[0]
    assert refusal.startswith("It would not run: ") and "do not fit the 10.0 MiB of memory there are" in refusal
    assert "a reserve of 384.0 MiB" in refusal
    assert main(["plan", "demo", "--memory", "much"]) == 2
    assert "--memory much" in capsys.readouterr().err


def test_a_file_that_is_still_downloaded_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "model.gguf.part"
    shutil.copyfile(DEMO, part)
    with part.open("r+b") as file:
        file.truncate(DEMO.stat().st_size // 2)
    with pytest.raises(GGUFError, match="but the file has only"):
        GGUFFile.open(part)
    whole, half = plan(capsys, "demo"), plan(capsys, str(part))
    assert half["present_bytes"] == DEMO.stat().st_size // 2 and half["file_bytes"] == whole["file_bytes"]
    same = ("dense_bytes", "expert_bytes", "token_bytes", "kv_bytes", "context")
    assert [half[name] for name in same] == [whole[name] for name in same]
    with part.open("r+b") as file:
        file.truncate(1000)
    assert main(["plan", str(part)]) == 3
    assert "the file ended inside" in capsys.readouterr().err


def test_the_table_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--expert-cache", "25%"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("It would run, 25% of its experts in slots. Decode: ") and "all experts" in table
    assert "slots                   60\n" in table and "hit rate                63.6%\n" in table
    assert table.splitlines()[-1].split()[:2] == ["100%", "100.0%"]
