"""Alpha and beta of this machine's collectives: time = alpha + payload / speed, fitted to what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpcode.cost.communication import AlphaBeta


def fit(points: Iterable[tuple[float, float]]) -> AlphaBeta:
    """The line through (payload bytes, seconds) whose *relative* errors have the least squares.

    Relative, for times span four orders of magnitude: by absolute errors the largest payload alone would decide, and
    alpha be noise. Where the best line has a negative part, that part is 0 and the other the best that is left.

    Raises:
        ValueError: fewer than two different payloads.
    """
    points = list(points)
    if len({payload for payload, _ in points}) < 2:
        raise ValueError("alpha and beta are two numbers: times of two different payloads at least are needed")
    # With u = 1/T and v = S/T, minimise the sum of (alpha u + beta v - 1)².
    rows = [(1 / seconds, payload / seconds) for payload, seconds in points]
    uu, uv, vv = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = uu * vv - uv * uv
    alpha, beta = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if alpha < 0:
        alpha, beta = 0.0, v / vv
    if beta <= 0:
        alpha, beta = u / uu, 0.0
    return AlphaBeta(alpha, 1 / beta if beta else float("inf"))


def fit_all(collectives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One fit for each op and t; and every measurement gets what its fit says of it.

    Args:
        collectives: the report's; "fitted_seconds" and "error" are added to each.
    """
    fits = []
    for op, t in dict.fromkeys((one["op"], one["tp"]) for one in collectives):
        own = [one for one in collectives if (one["op"], one["tp"]) == (op, t)]
        line = fit((one["payload_bytes"], one["seconds"]) for one in own)
        for one in own:
            one["fitted_seconds"] = line.seconds(one["payload_bytes"])
            one["error"] = one["fitted_seconds"] / one["seconds"] - 1
        fits.append(
            {
                "op": op,
                "tp": t,
                "alpha_seconds": line.alpha_seconds,
                "bytes_per_second": line.bytes_per_second,
                "worst_error": max((one["error"] for one in own), key=abs),
            }
        )
    return fits


def predict_all(report: dict[str, Any]) -> None:
    """Add to every layer what the fits say of its collectives, none of whose times went into them.

    It is the sum of alpha + payload / speed over the ledger of one step; None where an op was not measured.
    """
    lines = {(one["op"], one["tp"]): AlphaBeta(one["alpha_seconds"], one["bytes_per_second"]) for one in report["fits"]}
    for layer in report["layers"]:
        calls = [(call["op"], call["payload_bytes"], call["calls"]) for call in layer["calls"]]
        if all((op, layer["tp"]) in lines for op, _, _ in calls):
            layer["predicted_collective_seconds"] = sum(
                times * lines[op, layer["tp"]].seconds(payload) for op, payload, times in calls
            )
        else:
            layer["predicted_collective_seconds"] = None
