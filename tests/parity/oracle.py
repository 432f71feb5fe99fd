"""The oracle fixtures, and the rule by which logits are compared with them.

The rule is that of the fixtures' README: the median over positions of a position's relative error, beside llama.cpp's
own error on the same file; positions whose error is over ten times the median (a flipped router) are
counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.router import RouterRule, route
from expertserve.models import forward as forward_module
from tests.models.build import make_batch, open_forward

FAMILIES = (
    "qwen3moe",
    "qwen2moe",
    "olmoe",
    "mixtral",
    "qwen3moe-k256",
    "qwen35moe",
    "qwen35moe-fused",
    "qwen3next-mtp",
    "minimax-m2",
    "granitemoe",
    "hunyuan-moe",
    "ernie4_5-moe",
    "bailingmoe2",
    "glm4moe-nextn",
    "deepseek2-lite",
    "deepseek2-v3",
    "gpt-oss",
    "lfm2moe",
    "phimoe",
    "llama4",
    "granitehybrid",
    "gemma4-moe",
)
NEAR_TIE = 1e-3
"""Two logits, of tokens or of a router, whose order may be that of rounding."""
ORACLE = Path(__file__).parents[2].parent / "shared" / "oracle"
FIXTURES = sorted(
    str(path.relative_to(ORACLE)) for family in FAMILIES for path in (ORACLE / family).glob("model-*.gguf")
)


@dataclass(frozen=True)
class Reference:
    """What the oracles say of one file.

    Attributes:
        path: the file.
        tokens: prompt.
        exact: logits of the dequantised weights in float32, [T, vocab].
        peer: llama.cpp's logits on the file itself, [T, vocab].
        greedy: llama.cpp's 16 greedy tokens after the prompt, of the trunk, on the file itself.
        exact_greedy: the same of the dequantised weights in float32; `greedy` where that was not recorded.
    """

    path: Path
    tokens: NDArray[np.int32]
    exact: NDArray[np.float32]
    peer: NDArray[np.float32]
    greedy: NDArray[np.int32]
    exact_greedy: NDArray[np.int32]


def reference(fixture: str, *, draft: bool = False) -> Reference:
    """The oracles' answers for a fixture named like `olmoe/model-f16.gguf`, of its draft layer with `draft`."""
    family, name = fixture.split("/")
    q = name.removeprefix("model-").removesuffix(".gguf")
    kind = "mtp_logits" if draft else "logits"
    with np.load(ORACLE / family / "ref.npz") as data:
        greedy = data[f"lcpp_greedy_{q}_short"].astype(np.int32)
        exact = f"lcpp_greedy_deq_{q}_short"
        return Reference(
            path=ORACLE / fixture,
            tokens=data["tokens_short"].astype(np.int32),
            exact=data[f"lcpp_{kind}_deq_{q}_short"],
            peer=data[f"lcpp_{kind}_{q}_short"],
            greedy=greedy,
            exact_greedy=data[exact].astype(np.int32) if exact in data else greedy,
        )


def exact_tolerance(fixture: str) -> float:
    """Largest error of a logit that arithmetic in float32 may have beside the exact answer."""
    return 5e-3 if fixture.startswith("gemma4") else 1e-3  # whose GELU ggml looks up in a table of halves


def relative_errors(logits: NDArray[np.float32], exact: NDArray[np.float32]) -> NDArray[np.float64]:
    """Relative error of each position's logits."""
    difference = (logits - exact).astype(np.float64)
    return np.linalg.norm(difference, axis=1) / np.linalg.norm(exact.astype(np.float64), axis=1)


def outliers(errors: NDArray[np.float64]) -> int:
    """Positions over ten times the median."""
    return int((errors > 10 * np.median(errors)).sum())


def assert_parity(logits: NDArray[np.float32], ref: Reference, factor: float, positions: int = 1) -> None:
    """Fails where `logits` are further from the exact answer than the rule allows beside llama.cpp.

    Args:
        logits: what to judge, [T, vocab].
        ref: the oracles.
        factor: most median error, in llama.cpp's own.
        positions: positions by which outliers and wrong top tokens may exceed llama.cpp's.
    """
    ours, peers = relative_errors(logits, ref.exact), relative_errors(ref.peer, ref.exact)
    assert np.median(ours) <= factor * np.median(peers), (np.median(ours), np.median(peers))
    assert outliers(ours) <= outliers(peers) + positions, (outliers(ours), outliers(peers))
    best = ref.exact.argmax(axis=1)
    wrong, peer_wrong = int((logits.argmax(axis=1) != best).sum()), int((ref.peer.argmax(axis=1) != best).sum())
    assert wrong <= peer_wrong + positions, (wrong, peer_wrong)


def router_near_tie(ref: Reference, tokens: list[int]) -> bool:
    """Whether an exact choice of experts, for `tokens` or the one before them, turns on a near-tie in some layer."""
    turned, rows = [], slice(-1 - len(tokens), None)

    def watched(logits: NDArray[np.float32], rule: RouterRule, bias: NDArray[np.float32] | None = None) -> Any:
        ids, weights = route(logits, rule, bias)
        nudged = logits[rows].copy()
        nudged[np.arange(len(nudged)), ids[rows, -1]] -= np.float32(NEAR_TIE)
        others = route(nudged, rule, bias)[0]
        turned.append(bool((np.sort(others, axis=1) != np.sort(ids[rows], axis=1)).any()))
        return ids, weights

    with (
        patch.object(forward_module, "route", watched),
        open_forward(ref.path, device="reference", kv_type="f32", lookahead="off") as forward,
    ):
        forward(make_batch([*ref.tokens.tolist(), *tokens], all_outputs=False))
    return any(turned)


def assert_greedy(tokens: list[int], gaps: list[float], ref: Reference) -> None:
    """Fails where greedy tokens, if not the exact ones, leave llama.cpp's other than at a near-tie, which may also be a
    router's.
    """
    if tokens == ref.exact_greedy.tolist():
        return
    for position, (ours, peers) in enumerate(zip(tokens, ref.greedy.tolist(), strict=True)):
        if ours != peers:
            near = gaps[position] < NEAR_TIE or router_near_tie(ref, tokens[:position])
            assert near, f"token {position} is {ours}, llama.cpp's is {peers}, gap {gaps[position]}"
            return
