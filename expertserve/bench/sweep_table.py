"""What a comparison shows of its rows. Owns the columns and what a row is called."""

from __future__ import annotations

from expertserve.bench.results import Column, Row
from expertserve.values import MIB

COLUMNS = (
    Column("tok/s", "decode_tok_s", 1, ".2f"),
    Column("least", "decode_tok_s_least", 1, ".2f"),
    Column("most", "decode_tok_s_most", 1, ".2f"),
    Column("prefill", "prefill_tok_s", 1, ".1f"),
    Column("TTFT ms", "first_token_ms", 1, ".0f"),
    Column("p50 ms", "interval_p50_ms", 1, ".1f"),
    Column("p99 ms", "interval_p99_ms", 1, ".1f"),
    Column("hits pre", "prefill_hit_rate", 100, ".0f"),
    Column("dec %", "decode_hit_rate", 100, ".1f"),
    Column("file MB/tok", "file_bytes_token", 1e-6, ".1f"),
    Column("disk", "disk_bytes_token", 1e-6, ".1f"),
    Column("stall ms", "stall_ms_token", 1, ".1f"),
    Column("comp ms", "compute_ms_token", 1, ".1f"),
    Column("roof", "roofline_tok_s", 1, ".1f"),
    Column("ratio", "of_roofline", 1, ".2f"),
    Column("peak MiB", "peak_bytes", 1 / MIB, ".0f"),
    Column("others", "other_cores", 1, ".2f"),
)


def label(row: Row) -> str:
    """What a row is called: its part, or what was asked for, and what its group computes."""
    parts = [row["part"]] if row["part"] != "row" else [row["expert_cache"], row["reader"], f"ahead {row['lookahead']}"]
    return " ".join([*parts, f"batch {row['batch']}", f"prompt {row['prompt_tokens']}", f"draft {row['draft']}"])
