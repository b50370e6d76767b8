"""Chapter 14, layouts of TP, PP and DP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache

from tpcode.config import Layout, ModelConfig
from tpcode.cost import layout as layouts_of
from tpcode.cost.hardware import card
from tpcode.cost.layout import Candidate, Plans, coordinates, groups, link
from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.numbers import called, number
from tpcode.grading.registry import exercise

AXES = ("tp", "dp", "pp")

# ---- 14.1 -----------------------------------------------------------------------------------------------------------

GRID = Layout(tp=8, dp=2, pp=4)
CARD = "h100"
RANK = 37

PP_BEFORE_DP = (
    "That has the stages vary before the replicas. In Megatron's order replicas vary before stages: "
    "rank = tp_rank + tp·dp_rank + tp·dp·pp_rank."
)
TP_LAST = "That has tp vary slowest. It varies fastest: consecutive ranks share a node, and tp needs its NVLink."
FROM_ONE = "Coordinates count from 0, like ranks."
WRONG_SUM = "These do not give rank 37 back: tp_rank + 8·dp_rank + 16·pp_rank is {rank}."
DP_INSIDE = (
    "These two stand on one node. But its 8 GPUs are the 8 shards of one tensor-parallel group: a replica holds the "
    "*same* shard, and stands on another node."
)
OTHER_STAGES = "Ranks of other stages are among these. A replica has the same layers too."
WITHOUT_ITSELF = "A group includes the rank itself."
SAME_SHARD = "These all have the same shard number. The tensor-parallel group has a different shard on each rank."
SAME_STAGE = "Rank {rank} holds the same stage, of the other replica. One stage is tp·dp = 16 ranks."
OTHER_PIPELINE = "Rank {rank} is of the other replica, which is a pipeline of its own. One stage is tp·dp = 16 ranks."
SAME_NODE = "Rank {rank} is another shard of the same stage. The next stage is 16 ranks on."
EXCHANGED = "Previous and next are exchanged: stages count upwards from the input."
DP_OVER_NVLINK = "tp = 8 fills the node, so no replica is inside it: dp goes over the network."
TP_OVER_NETWORK = "The 8 shards are ranks 32 to 39, one node: tp stays on NVLink."
PP_OVER_NVLINK = "Neighbouring stages are 16 ranks apart, two nodes on: pp goes over the network."


@exercise("14.1")
def rank_on_the_grid(coords: Mapping, tp_group, dp_group, previous_stage, next_stage, links: Mapping) -> str:
    """Coordinates of rank 37, its groups, its pipeline neighbours, and the link of each axis."""
    _require_coordinates(coords)
    tp, dp, pp = (next(group for group in groups(GRID, axis) if RANK in group) for axis in AXES)
    _require_group("tp_group", tp_group, tp, {frozenset(_same(("tp",))): SAME_SHARD, frozenset(dp): SAME_SHARD})
    inside = {frozenset(pair): DP_INSIDE for other in tp for pair in [(RANK, other)] if other != RANK}
    _require_group(
        "dp_group", dp_group, dp, {**inside, frozenset(_same(("tp",))): OTHER_STAGES, frozenset(tp): DP_INSIDE}
    )
    before, after = (pp[pp.index(RANK) + step] for step in (-1, 1))
    _require_neighbour("previous_stage", previous_stage, before, after)
    _require_neighbour("next_stage", next_stage, after, before)
    _require_links(links)
    return "coordinates, groups, neighbours and links of rank 37."


def _same(axes: tuple[str, ...]) -> list[int]:
    """The ranks with rank 37's coordinates along these axes."""
    own = coordinates(GRID, RANK)
    return [r for r in range(GRID.world_size) if all(coordinates(GRID, r)[axis] == own[axis] for axis in axes)]


def _require_coordinates(coords: Mapping) -> None:
    given = _dict_of_ints("coordinates", coords)
    right = {axis: coordinates(GRID, RANK)[axis] for axis in AXES}
    hints = [
        ({"tp": 5, "pp": 0, "dp": 1}, PP_BEFORE_DP),
        ({"tp": RANK // 8, "dp": RANK // 4 % 2, "pp": RANK % 4}, TP_LAST),
        ({"tp": RANK // 8, "pp": RANK // 2 % 4, "dp": RANK % 2}, TP_LAST),
        ({axis: place + 1 for axis, place in right.items()}, FROM_ONE),
    ]
    if given != right:
        rank = given["tp"] + GRID.tp * (given["dp"] + GRID.dp * given["pp"])
        hint = next((text for wrong, text in hints if wrong == given), WRONG_SUM.format(rank=rank))
        raise Wrong(f"coordinates {given} are not rank {RANK}'s.\n{hint}")


def _dict_of_ints(name: str, answer) -> dict[str, int]:
    if not isinstance(answer, Mapping) or set(answer) != set(AXES):
        raise Wrong(f'{name} should be a dict with the names "tp", "dp" and "pp"; it is {answer!r:.60}.')
    return {axis: _int(f'{name}["{axis}"]', answer[axis]) for axis in AXES}


def _int(name: str, value) -> int:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Wrong(f"{name} should be a whole number; it is {value!r:.40}.") from None
    if not found.is_integer():
        raise Wrong(f"{name} should be a whole number; it is {found:g}.")
    return int(found)


def _require_group(name: str, answer, right: Iterable[int], hints: Mapping[frozenset, str]) -> None:
    """The right ranks, in any order; a list, set, range or tensor."""
    try:
        given = frozenset(_int(name, rank) for rank in answer)
    except TypeError:
        raise Wrong(f"{name} should be a list of ranks; it is {answer!r:.40}.") from None
    right = frozenset(right)
    if given != right:
        hint = WITHOUT_ITSELF if given | {RANK} == right else hints.get(given, hints.get(given | {RANK}, ""))
        raise Wrong(f"{name} is not {sorted(given)}.\n{hint}".rstrip())


def _require_neighbour(name: str, answer, right: int, other: int) -> None:
    given = _int(name, answer)
    if given != right:
        hints = {other: EXCHANGED, RANK - GRID.tp: OTHER_PIPELINE, RANK + GRID.tp: SAME_STAGE}
        hints |= {RANK - 1: SAME_NODE, RANK + 1: SAME_NODE}
        raise Wrong(f"{name} is not rank {given}.\n{hints.get(given, '').format(rank=given)}".rstrip())


def _require_links(links: Mapping) -> None:
    if not isinstance(links, Mapping) or set(links) != set(AXES):
        raise Wrong(f'links should be a dict with the names "tp", "dp" and "pp"; it is {links!r:.60}.')
    hints = {"tp": TP_OVER_NETWORK, "dp": DP_OVER_NVLINK, "pp": PP_OVER_NVLINK}
    for axis in AXES:
        if blanks(links[axis]):
            raise Unfilled(f"replace {blanks(links[axis])} in links.")
        given = str(links[axis]).strip().lower()
        if given not in ("nvlink", "network"):
            raise Wrong(f'links["{axis}"] should be "nvlink" or "network"; it is {links[axis]!r:.40}.')
        if given != link(GRID, CARD, axis):
            raise Wrong(f'links["{axis}"] is not "{given}".\n{hints[axis]}')


# ---- 14.2 -----------------------------------------------------------------------------------------------------------

OF_THE_WHOLE = "That is the share of the whole time. Asked for is waiting over *working*: (p - 1) over m."
P_WAITS = "A stage waits for the p - 1 others, not for itself."
INTERLEAVED_WRONG = "More chunks fill the pipeline sooner: v divides the bubble."
NO_CHUNKS = "The chunks are left out: with v of them a stage passes its first on v times as soon."
ALL_SEQUENCES = (
    "That takes all B sequences for one pipeline's microbatches. They are shared among the dp replicas: "
    "m = B / (b·dp). More replicas leave each pipeline fewer microbatches."
)
B_IGNORED = "A microbatch has b sequences: m = B / (b·dp)."
WRONG_DP = "dp is what tp and pp leave of the GPUs: gpus / (tp·pp)."


def _bubble(p: int, m: float, v: int) -> float:
    return (p - 1) / (v * m)


@exercise("14.2")
def bubbles(bubble: Callable, bubble_on: Callable) -> str:
    """`bubble(p, m, v)`, and `bubble_on(gpus, tp, pp, batch, b, v)`."""
    for p, m, v in ((4, 8, 1), (8, 64, 3), (1, 5, 1)):
        wrong = {
            (p - 1) / (v * m + p - 1): OF_THE_WHOLE,
            (p - 1) / (m + p - 1): OF_THE_WHOLE,
            p / (v * m): P_WAITS,
            v * (p - 1) / m: INTERLEAVED_WRONG,
            (p - 1) / m: NO_CHUNKS,
        }
        _require("bubble", bubble, (p, m, v), _bubble(p, m, v), wrong)
    for args in N21_RUNS:
        gpus, tp, pp, batch, b, v = args
        dp = gpus // (tp * pp)
        wrong = {
            _bubble(pp, batch / b, v): ALL_SEQUENCES,
            _bubble(pp, batch, v): ALL_SEQUENCES,
            _bubble(pp, batch / dp, v): B_IGNORED,
            _bubble(pp, batch * b / dp, v): B_IGNORED,
            _bubble(pp, batch / (b * gpus), v): WRONG_DP,
            _bubble(pp, batch / (b * (gpus / tp)), v): WRONG_DP,
            _bubble(pp, batch / (b * (gpus / pp)), v): WRONG_DP,
            _bubble(pp, batch / (b * dp), 1): NO_CHUNKS,
        }
        _require("bubble_on", bubble_on, args, _bubble(pp, batch / (b * dp), v), wrong)
    return "the bubble of N21's pipelines, and what more replicas make of it."


# gpus, tp, pp, batch, b, v: N21's 145.6B and 1T with a chunk or two, and twice the GPUs for the same batch.
N21_RUNS = ((1536, 8, 8, 2304, 2, 2), (3072, 8, 64, 3072, 1, 1), (6144, 8, 64, 3072, 1, 1))


def _called(name: str, function: Callable, args: tuple):
    """function(*args), a fraction as a float; Unfilled where it stumbles over its own stub."""
    try:
        value = called(name, function, args)
    except TypeError:
        if stub := stub_in(function):
            raise Unfilled(f"replace {stub} in {name}.") from None
        raise
    return float(value) if isinstance(value, Fraction) else value


def _require(name: str, function: Callable, args: tuple, right: float, wrong: Mapping[float, str]) -> None:
    """Raise Wrong unless function(*args) is `right`, with the first hint that fits; the right number is not told."""
    value = _called(name, function, args)
    got = number(name, lambda: value, ())
    if not math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-12):
        hint = next((text for value, text in wrong.items() if math.isclose(got, value, rel_tol=1e-9)), "")
        raise Wrong(f"{name}({', '.join(map(str, args))}) is not {got:.6g}.\n{hint}".rstrip())


# ---- 14.3 -----------------------------------------------------------------------------------------------------------

PAYLOADS = "That counts payloads. On a ring an all-reduce sends 2(t-1)/t of one: 4 all-reduces are 8(t-1)/t units."
ONE_WAY = "That is half: an all-reduce sends its payload twice over, (t-1)/t of it each time."
NO_RING = "Without (t-1)/t: a rank does not send itself its own part."
ONE_LAYER = "That is one layer. A stage has all of its layers' all-reduces."
TWO_A_LAYER = "That is 2 all-reduces a layer. A layer has two blocks: 2 all-reduces forward and 2 backward."
EVERY_LAYER = "That sends at every layer. A pipeline sends where one stage ends and the next begins, and nowhere else."
FORWARD_ONLY = "That is the way forward alone. The gradient of as much comes back, and a middle stage sends that too."
RING_IN_PP = "Sending to a neighbour is no ring: the payload goes over once."
CHUNKS = "With v chunks a microbatch passes each device v times, and leaves it v times."
NOT_CUT = "When the stream is cut, each of the t ranks sends 1/t of it."
CUT_ANYWAY = "Only when the stream is cut does a rank send 1/t. Else every rank sends all of it to its opposite."
RATIO = "The ratio is TP's units over PP's, of one stage of 12 layers at t = 8, one chunk, not cut."


@exercise("14.3")
def two_volumes(tp_units: Callable, pp_units: Callable, ratio) -> str:
    """`tp_units(layers, t)`, `pp_units(layers, t, v, cut)`: what one GPU of a middle stage sends, in bsh elements."""
    for layers, t in ((12, 8), (5, 4), (7, 1)):
        right = 8 * layers * (t - 1) / t
        wrong = {
            4 * layers: PAYLOADS,
            right / 2: ONE_WAY if t != 2 else "",
            8 * layers: NO_RING,
            right / layers: ONE_LAYER,
            2 * layers: TWO_A_LAYER,
        }
        _require("tp_units", tp_units, (layers, t), right, wrong)
    for layers, t, v, cut in ((12, 8, 1, False), (12, 8, 3, False), (12, 8, 2, True)):
        right = 2 * v / (t if cut else 1)
        wrong = {
            2 * layers: EVERY_LAYER,
            layers: EVERY_LAYER,
            2 * layers * v: EVERY_LAYER,
            2 * layers / t: EVERY_LAYER,
            right / 2: FORWARD_ONLY,
            right * (t - 1) / t: RING_IN_PP,
            right / v: CHUNKS,
            2 * v: NOT_CUT,
            2 * v / t: CUT_ANYWAY,
        }
        _require("pp_units", pp_units, (layers, t, v, cut), right, wrong)
    _require("ratio", lambda: ratio, (), 42, {1 / 42: RATIO, 21: RATIO, 84: RATIO, 3.5: EVERY_LAYER, 7: EVERY_LAYER})
    return "84 and 2 units of bsh elements, 42 times as much."


# ---- 14.4 -----------------------------------------------------------------------------------------------------------

BATCH, SEQUENCE, NEAR = 1536, 2048, 0.10
WHITEBOARD = (64, 512, 1024)

WRONG_WORLD = "tp·pp·dp = {tp}·{pp}·{dp} = {world}, and there are {gpus} GPUs."
TP_EVERYWHERE = (
    "tp = {tp} is more than the node's {node} GPUs, so each layer's collectives cross the network: they are "
    "{share:.0%} of the step. Keep tp inside the node, and let pp and dp go out."
)
TOO_DEEP = (
    "A pipeline of {pp} stages has {m} microbatches in each replica: waiting takes {bubble:.0%} of the step. "
    "Fewer stages, if they fit."
)
RUN_AGAIN = (
    "In tp·pp = {parts} parts a GPU's share of the model leaves so little room that every layer's forward must run "
    "again. Cut the model in more parts, and have fewer replicas."
)
SLOW = "That fits, and is slow. Where the step's time goes: {parts}."


def gpt3() -> ModelConfig:
    """GPT-3 with the papers' dropout, which writes all scores."""
    return replace(ModelConfig.preset("gpt3-175b"), dropout=0.1)


@cache
def plans(gpus: int) -> Plans:
    """The planner's answer for so many H100s."""
    return layouts_of.plan(gpt3(), CARD, gpus, batch=BATCH, sequence=SEQUENCE, microbatches=(1, 2))


@exercise("14.4")
def whiteboard(layouts: Mapping) -> str:
    """`layouts[gpus] = {"tp": …, "pp": …, "dp": …}` for 64, 512 and 1024 H100s."""
    if not isinstance(layouts, Mapping) or set(layouts) != set(WHITEBOARD):
        raise Wrong(f"layouts should be a dict with the keys 64, 512 and 1024; it is {layouts!r:.60}.")
    found = [_require_layout(gpus, _dict_of_ints(f"layouts[{gpus}]", layouts[gpus])) for gpus in WHITEBOARD]
    steps = ", ".join(f"{one.step.seconds:.1f}" for one in found)
    return f"all three fit, within 10% of the planner's best: steps of {steps} s, as the planner has them."


def _require_layout(gpus: int, sizes: dict[str, int]) -> Candidate:
    """The planner's candidate of these sizes, if it is fast enough."""
    name = f"{gpus} GPUs, tp {sizes['tp']}, pp {sizes['pp']}, dp {sizes['dp']}:"
    if min(sizes.values()) < 1:
        raise Wrong(f"{name} an axis has at least one rank.")
    world = math.prod(sizes.values())
    if world != gpus:
        raise Wrong(f"{name} {WRONG_WORLD.format(**sizes, world=world, gpus=gpus)}")
    known = plans(gpus)
    for one in known.refused:
        if _sizes(one.layout) == sizes:
            raise Wrong(f"{name} {one.reason}.")
    mine = next(one for one in known.fitting if _sizes(one.layout) == sizes)
    slower = mine.step.seconds / known.best.step.seconds - 1
    if slower > NEAR:
        raise Wrong(f"{name} {slower:.0%} slower than the planner's best.\n{_why_slow(mine, known.best)}")
    return mine


def _sizes(layout: Layout) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in AXES}


def _why_slow(mine: Candidate, best: Candidate) -> str:
    layout, step, node = mine.layout, mine.step, card(CARD).gpus_per_node
    if layout.tp > node:
        return TP_EVERYWHERE.format(tp=layout.tp, node=node, share=step.tp / step.seconds)
    if step.bubble / step.seconds > best.step.bubble / best.step.seconds + NEAR:
        m = mine.workload.microbatches(layout)
        return TOO_DEEP.format(pp=layout.pp, m=m, bubble=step.bubble / step.seconds)
    if mine.workload.recompute == "full" != best.workload.recompute:
        return RUN_AGAIN.format(parts=layout.tp * layout.pp)
    names = ("gemm", "memory", "tp", "pp", "bubble", "dp", "update")
    return SLOW.format(parts=", ".join(f"{name} {getattr(step, name):.1f} s" for name in names))
