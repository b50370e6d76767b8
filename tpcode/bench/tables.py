"""The report of a bench as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tpcode.cost.hardware import GB

MiB = 2**20
_BAR = 30  # characters of 100%


def show(report: dict[str, Any], console: Console) -> None:
    """All tables of which there is anything to tell."""
    asked, machine = report["settings"], report["machine"]
    console.print(
        f"{asked['world']} ranks on {machine['device']}, {machine['backend']}, "
        f"{machine['threads_per_rank']} thread{'s' * (machine['threads_per_rank'] > 1)} each, torch {machine['torch']}"
    )
    if machine["load"] > machine["cores"] / 2:
        console.print(
            f"Something else keeps this machine busy (load {machine['load']:.1f} on {machine['cores']} cores): these "
            "times are not its own. Try again when it is idle.",
            style="yellow",
        )
    if report["layers"]:
        console.print(
            f"layers: forward and backward of {asked['model']}'s, {asked['batch']} × {asked['sequence']} tokens, "
            f"{asked['dtype']}"
        )
    both = report["collectives"] and report["layers"]
    for table in (
        collectives(report["collectives"]) if report["collectives"] else None,
        fits(report["fits"]) if report["fits"] else None,
        layers(report["layers"]) if report["layers"] else None,
        predicted(report["layers"]) if both else None,
        ffn_memory(report["layers"]),
        shares(report["layers"]),
    ):
        if table is not None:
            caption, table.caption = table.caption, None  # wrapped to the terminal's width, and not to the table's
            console.print()
            console.print(table)
            if caption is not None:
                console.print(caption, style="dim")


# ---- what was measured ----------------------------------------------------------------------------------------------


def collectives(rows: Iterable[dict[str, Any]]) -> Table:
    """Times and bandwidths, beside what alpha and beta say."""
    table = _table("collectives", ["op"], ["t", "payload", "µs", "algbw GB/s", "busbw GB/s", "fit µs", "error"])
    last = None
    for row in rows:
        if last not in (None, (row["op"], row["tp"])):
            table.add_section()
        last = row["op"], row["tp"]
        table.add_row(
            row["op"],
            str(row["tp"]),
            size(row["payload_bytes"]),
            f"{row['seconds'] * 1e6:,.0f}",
            f"{row['algbw_bytes_per_second'] / GB:.3f}",
            f"{row['busbw_bytes_per_second'] / GB:.3f}",
            f"{row['fitted_seconds'] * 1e6:,.0f}",
            signed(row["error"]),
        )
    return _captioned(
        table,
        "payload: the whole tensor, per rank · algbw: payload over time · busbw: what each rank puts on a ring over "
        "time, to be compared with a link's speed (both as in nccl-tests)",
    )


def fits(rows: Iterable[dict[str, Any]]) -> Table:
    """Alpha and beta."""
    table = _table("time = alpha + payload / speed, fitted", ["op"], ["t", "alpha µs", "speed GB/s", "worst error"])
    for row in rows:
        speed = row["bytes_per_second"]
        table.add_row(
            row["op"],
            str(row["tp"]),
            f"{row['alpha_seconds'] * 1e6:,.0f}",
            "no limit seen" if speed == float("inf") else f"{speed / GB:.3f}",
            signed(row["worst_error"]),
        )
    return table


def layers(rows: Iterable[dict[str, Any]]) -> Table:
    """A line for each layer, t, and with and without SP."""
    right = ["t", "SP", "ms", "collectives", "tokens/s", "GFLOP/s", "peak MiB"]
    table = _table("layers", ["layer"], right)
    last = None
    for row in rows:
        if last not in (None, row["layer"]):
            table.add_section()
        last = row["layer"]
        table.add_row(
            row["layer"],
            str(row["tp"]),
            "yes" if row["sequence_parallel"] else "no",
            f"{row['seconds'] * 1e3:,.2f}",
            f"{row['collective_share']:.0%}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second_per_rank'] / 1e9:,.1f}",
            f"{row['peak_bytes'] / MiB:,.1f}",
        )
    return _captioned(
        table,
        "collectives: share of the time in them, waiting for other ranks included · GFLOP/s, peak MiB: of each rank · "
        "peak: most bytes in tensors at one moment",
    )


def predicted(rows: Iterable[dict[str, Any]]) -> Table:
    """The collectives of each layer: what the fit says, and what they took."""
    table = _table("a layer's collectives", ["layer"], ["t", "SP", "calls", "predicted ms", "measured ms", "ratio"])
    for row in rows:
        expected = row["predicted_collective_seconds"]
        if row["tp"] == 1 or expected is None:
            continue
        table.add_row(
            row["layer"],
            str(row["tp"]),
            "yes" if row["sequence_parallel"] else "no",
            str(sum(call["calls"] for call in row["calls"])),
            f"{expected * 1e3:.2f}",
            f"{row['collective_seconds'] * 1e3:.2f}",
            f"{row['collective_seconds'] / expected:.2f}",
        )
    return _captioned(
        table,
        "predicted: alpha + payload / speed for every call in the ledger. A ratio well above 1 is waiting: a rank "
        "reaches the call before another does. Below 1, it was hidden behind a product",
    )


# ---- the two demos --------------------------------------------------------------------------------------------------


def ffn_memory(rows: Iterable[dict[str, Any]]) -> Table | None:
    """An FFN's memory on 1 and 2 ranks; None where it was not measured on both."""
    own = {row["tp"]: row for row in rows if row["layer"] == "ffn" and not row["sequence_parallel"]}
    if not {1, 2} <= set(own):
        return None
    table = _table("an FFN's memory, MiB of each rank", [""], ["1 rank", "2 ranks", "ratio"])
    one, two = own[1], own[2]
    for name in ("weights", "gradients", "kept for backward", "peak"):
        whole, half = (row[f"{name.replace(' ', '_')}_bytes"] for row in (one, two))
        table.add_row(name, f"{whole / MiB:,.2f}", f"{half / MiB:,.2f}", f"{half / whole:.2f}")
    return _captioned(
        table, "what is cut is halved; input, output and their gradients are whole on every rank: so it ends above 0.5"
    )


def shares(rows: Iterable[dict[str, Any]]) -> Table | None:
    """The share of all-reduces in a block's time as t grows; None where only one t was measured."""
    own = [row for row in rows if row["layer"] == "block" and not row["sequence_parallel"]]
    if len(own) < 2:
        return None
    table = _table("a block's all-reduces as t grows", [], ["t", "ms", "in all-reduces", "share"], [""])
    for row in own:
        share = row["collective_share"]
        table.add_row(
            str(row["tp"]),
            f"{row['seconds'] * 1e3:,.2f}",
            f"{row['collective_seconds'] * 1e3:,.2f}",
            f"{share:.0%}",
            "█" * round(_BAR * share),
        )
    return _captioned(
        table, "the products shrink as 1/t, the all-reduces' payload does not: on this machine, at these sizes"
    )


# ---- helpers --------------------------------------------------------------------------------------------------------


def size(count: int) -> str:
    """Bytes in words.

    >>> size(4096), size(3 * 2**20), size(1000)
    ('4 KiB', '3 MiB', '1000 B')
    """
    for unit, name in ((2**30, "GiB"), (MiB, "MiB"), (2**10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def signed(part: float) -> str:
    """A part as percent with its sign; nothing is +0%.

    >>> signed(-0.001), signed(0.146), signed(-0.5)
    ('+0%', '+15%', '-50%')
    """
    return f"{round(part, 2) + 0.0:+.0%}"


def _table(title: str, left: list[str], right: list[str], after: list[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in after:
        table.add_column(name, no_wrap=True)
    return table


def _captioned(table: Table, caption: str) -> Table:
    table.caption = caption
    return table
