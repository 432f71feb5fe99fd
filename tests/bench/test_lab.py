"""The trace lab's commands on a recorded trace of the demo model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from expertserve.bench.lab import read_decode, replay_rows, trace_stats
from expertserve.cli import main
from expertserve.experts.trace import read_trace
from tests.bench.test_replay import requests

TRACE = Path(__file__).parents[1] / "data" / "demo_routing.trace.xz"


def test_figures_of_a_trace_that_can_be_counted_by_hand() -> None:
    stats = trace_stats(requests([[0, 1]], [[0, 2]], [[0, 1]], [[3, 2]], num_keys=8))
    (layer,) = stats.layers
    assert (stats.steps, stats.decode_rows, stats.selections, stats.first_uses) == (4, 4, 8, 4)
    assert layer.entropy_bits == pytest.approx(-(3 * math.log2(3 / 8) + 4 * math.log2(2 / 8) + math.log2(1 / 8)) / 8,
                                               abs=1e-4)  # fmt: skip
    assert (layer.experts, layer.never_used, layer.repeated, layer.hottest_quarter) == (8, 4, 2 / 8, 5 / 8)
    assert stats.reuse_distance == {"p50": 2, "p90": 3, "p99": 3}  # 0 after 1, 0 after 2, 1 after 2 and 0, 2 after 3


def test_repetition_is_that_of_the_layers_own_steps() -> None:
    layers, steps = read_trace(TRACE)
    repeated, before = dict.fromkeys(layers, 0), {layer: set[int]() for layer in layers}
    asked = dict.fromkeys(layers, 0)
    for step in steps:
        for layer, ids in step.layers:
            chosen = set(ids.ravel().tolist())
            if not step.rows.prefill_rows:
                repeated[layer] += len(chosen & before[layer])
                asked[layer] += len(chosen)
            before[layer] = chosen
    for layer in trace_stats(read_decode(TRACE)).layers:
        assert layer.selections == asked[layer.layer]
        assert layer.repeated == pytest.approx(repeated[layer.layer] / asked[layer.layer], abs=1e-4)


def test_the_gain_of_recency_is_gone_in_the_shuffled_control() -> None:
    (row,) = replay_rows(read_decode(TRACE), [0.25])
    assert row.slots == 60 and row.gap_closed is not None
    assert row.hit_rate["ours"] > row.hit_rate["LFU"] + 0.07
    assert abs(row.shuffled["ours"] - row.shuffled["LFU"]) < 0.02
    assert row.shuffled["LFU"] == pytest.approx(row.hit_rate["LFU"], abs=0.005)
    gap = row.hit_rate["Belady"] - row.hit_rate["LRU"]
    assert row.gap_closed == pytest.approx((row.hit_rate["ours"] - row.hit_rate["LRU"]) / gap, abs=1e-3)


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replay", str(TRACE), "--slots", "50"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert main(["trace", "replay", str(TRACE), "--slots", "50%", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert line.split()[:2] == ["120", "50%"]
    assert line.split()[2:6] == [f"{row['hit_rate'][name]:.1%}" for name in ("LRU", "LFU", "ours", "Belady")]
    assert main(["trace", "stats", str(TRACE)]) == 0
    table = capsys.readouterr().out
    assert main(["trace", "stats", str(TRACE), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert f"selections {stats['selections']} of 240 experts" in table and len(stats["layers"]) == 6


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "routing.svg"
    assert main(["trace", "plot", str(TRACE), "--out", str(out), "--slots", "25,50"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().startswith("<?xml")
    assert main(["trace", "plot", str(TRACE), "--out", str(tmp_path / "routing.nonsense")]) == 2
    assert "--out" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from expertserve.cli import main\n"
        f"sys.exit(main(['trace', 'plot', {str(TRACE)!r}, '-o', 'x.png', '--slots', '50']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: pictures need matplotlib: pip install 'expertserve[plot]'"]


@pytest.mark.parametrize("slots", ["", "0", "101", "a", "nan", "10,,20"])
def test_slots_that_are_no_percentages_are_refused(slots: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replay", str(TRACE), "--slots", slots]) == 2
    assert "--slots" in capsys.readouterr().err


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, reason in ((tmp_path, "cannot be read"), (tmp_path / "none", "No such file"), (Path(__file__), "not a")):
        assert main(["trace", "stats", str(path)]) == 2
        assert reason in capsys.readouterr().err
    (tmp_path / "empty.trace").write_bytes(b'EXPERTTRACE1\n{"layers": [[0, 8]]}\n')
    assert main(["trace", "stats", str(tmp_path / "empty.trace")]) == 2
    assert "no decode step" in capsys.readouterr().err
    (tmp_path / "cut.xz").write_bytes(TRACE.read_bytes()[:1000])
    assert main(["trace", "stats", str(tmp_path / "cut.xz")]) == 2
    assert "cannot be read" in capsys.readouterr().err
