"""Chapter 2, ranks and collectives."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tpcode.comm import group_rank, group_size
from tpcode.grading.answers import stub_in
from tpcode.grading.compare import Difference, Symptom, as_tensor, compare
from tpcode.grading.failures import Unfilled, Wrong, explain
from tpcode.grading.ranks import SIZES, on_ranks, require_returned
from tpcode.grading.registry import exercise
from tpcode.runtime import CollectiveMismatch, RankError, RankTimeout
from tpcode.runtime.notes import watch


def _together(values: Mapping[str, Sequence], sentence: str) -> Symptom:
    """A symptom: of the property, rank r holds `values[name][r]`, on every rank."""

    def symptom(difference: Difference) -> str | None:
        wanted = [as_tensor(value).to(torch.float64) for value in values[difference.name]]
        got = [value.to(torch.float64) for value in difference.all_got]
        same = all(torch.allclose(mine, wrong, rtol=1e-12, atol=1e-12) for mine, wrong in zip(got, wanted))
        return sentence if same else None

    return symptom


# ---- 2.1 ------------------------------------------------------------------------------------------------------------

# No wrong answer that is known is right by accident; the source of the broadcast is not the first rank.
HELD = ((2, 7, 1), (4, 3, 9), (6, 8, 5))
SOURCE = 1

Rows = list[list[float]]  # what each rank holds

RIGHT_2_1: dict[str, Rows] = {
    "after_all_reduce": [[12, 18, 15]] * 3,
    "after_reduce_scatter": [[12], [18], [15]],
    "after_all_gather": [[2, 7, 1, 4, 3, 9, 6, 8, 5]] * 3,
    "after_broadcast": [[4, 3, 9]] * 3,
}


@exercise("2.1")
def ranks_after_each_collective(after_all_reduce, after_reduce_scatter, after_all_gather, after_broadcast) -> str:
    """For each of four collectives, what ranks 0, 1 and 2 hold after it: a list of three lists, or an array."""
    answers = dict(zip(RIGHT_2_1, (after_all_reduce, after_reduce_scatter, after_all_gather, after_broadcast)))
    for name, answer in answers.items():
        rows, right = _rows(name, answer), RIGHT_2_1[name]
        if rows != right:
            rank = next(r for r in range(3) if rows[r] != right[r])
            what = f"{name}: rank {rank} does not hold {_listed(rows[rank])}."
            raise Wrong(f"{what}\n{_collective_hint(name, rows)}".rstrip())
    return "all three ranks after all four collectives."


def _rows(name: str, answer) -> Rows:
    """What each rank holds, as flat lists: `[[1, 2], …]`, and nested deeper, or one number a rank."""
    one_each = len(RIGHT_2_1[name][0]) == 1
    try:
        rows = [as_tensor(row).to(torch.float64) for row in answer]
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{name} should be a list of three lists of numbers; it is {answer!r:.60}.") from None
    if len(rows) != 3 or not (one_each or all(row.dim() for row in rows)):
        raise Wrong(f"{name} should be a list of three lists: what rank 0 holds, what rank 1 holds, what rank 2 holds.")
    return [row.flatten().tolist() for row in rows]


def _collective_hint(name: str, rows: Rows) -> str:
    own, total = [list(row) for row in HELD], RIGHT_2_1["after_all_reduce"][0]
    rank_by_rank = [row for row in HELD for row in row]
    known: dict[str, list[tuple[object, str]]] = {
        "after_all_reduce": [
            (own, "Those are the numbers from before: an all-reduce adds them, entry by entry."),
            ([total, *own[1:]], "Every rank gets the sum, not only rank 0."),
            ([total, [], []], "Every rank gets the sum, not only rank 0."),
            ([[x / 3 for x in total]] * 3, "That is the mean. An all-reduce adds, unless you ask for something else."),
            ([list(map(max, *HELD))] * 3, "That is the largest of each. An all-reduce adds, unless you ask otherwise."),
            ([rank_by_rank] * 3, "The numbers stand side by side: that is an all-gather. An all-reduce adds."),
            ([[sum(row)] for row in HELD], "You added within each rank. The sum is over the ranks, entry by entry."),
            ([[sum(total)]] * 3, "You added all entries. The sum is over the ranks, entry by entry."),
            ([[x] for x in total], "That is a reduce-scatter: after an all-reduce every rank holds the whole sum."),
        ],
        "after_reduce_scatter": [
            ([total] * 3, "The ranks do not hold the same: rank r gets piece r of the sum, and no other."),
            ([[total[0]]] * 3, "The ranks do not hold the same: rank r gets piece r of the sum."),
            ([[HELD[r][r]] for r in range(3)], "Those are pieces of the ranks' own numbers: they were not added."),
            ([[x] for x in reversed(total)], "The pieces go to the ranks in order: the first to rank 0."),
            ([[sum(row)] for row in HELD], "You added within each rank. The sum is over the ranks, entry by entry."),
            ([total, [], []], "Each rank gets a piece of the sum, not rank 0 all of it."),
        ],
        "after_all_gather": [
            ([total] * 3, "Nothing is added: an all-gather puts the pieces side by side."),
            (own, "Those are the numbers from before: afterwards every rank holds those of all ranks."),
            ([rank_by_rank, *own[1:]], "Every rank gets all pieces, not only rank 0."),
            ([rank_by_rank, [], []], "Every rank gets all pieces, not only rank 0."),
            (
                [[x for i in range(3) for x in HELD[(r + i) % 3]] for r in range(3)],
                "The pieces stand in the order of the ranks, on every rank alike; a rank's own does not come first.",
            ),
            (
                [[x for column in zip(*HELD) for x in column]] * 3,
                "The pieces stay whole: first all of rank 0's numbers, then all of rank 1's.",
            ),
        ],
        "after_broadcast": [
            ([own[0]] * 3, f"That is what rank 0 held. The source is rank {SOURCE}."),
            ([own[2]] * 3, f"That is what rank 2 held. The source is rank {SOURCE}."),
            (own, "Those are the numbers from before: afterwards every rank holds what the source held."),
            ([total] * 3, "Nothing is added: every rank gets what the source held."),
            ([own[SOURCE] if r != SOURCE else [] for r in range(3)], "The source keeps what it had."),
        ],
    }
    return next((text for wrong, text in known[name] if rows == wrong), "")


def _listed(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"


# ---- 2.2 ------------------------------------------------------------------------------------------------------------

IN, OUT, EXAMPLES = 2, 3, 8  # weight [2, 3]; 8 examples, which 1, 2 and 4 ranks share equally


@exercise("2.2")
def gradient_of_the_whole_batch(data_parallel_gradient: Callable) -> str:
    """`data_parallel_gradient(A, x, target)`: this rank's part of the batch -> the whole batch's gradient [2, 3]."""
    A, x, target = _regression()
    for t in SIZES[1:] + SIZES[:1]:  # two ranks first: alone there is nothing to do
        results = on_ranks(_with_calls, t, data_parallel_gradient, A, x, target)
        values, calls = zip(*results)
        require_returned(data_parallel_gradient, list(values))
        _refuse_gathered(values, t)
        parts = [mean_squared_gradient(A, x.chunk(t)[r], target.chunk(t)[r]) for r in range(t)]
        right = {"gradient": mean_squared_gradient(A, x, target)}
        symptoms = _gradient_symptoms(A, x, target, parts)
        compare([{"gradient": value} for value in values], right, t=t, symptoms=symptoms)
        if t > 1:
            _require_one_all_reduce(calls[0], t)
    return "the whole batch's gradient on every rank, with one all-reduce."


def mean_squared_gradient(A: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """The gradient by A [in, out] of the mean of (x A - target)²: [in, out]."""
    return 2 * x.T @ (x @ A - target) / target.numel()


def _regression() -> tuple[Tensor, Tensor, Tensor]:
    """A [2, 3], x [8, 2] and target [8, 3], in float64."""
    random = torch.Generator().manual_seed(2)
    sizes = (IN, OUT), (EXAMPLES, IN), (EXAMPLES, OUT)
    A, x, target = (torch.randn(size, generator=random, dtype=torch.float64) for size in sizes)
    return A, x, target


def _with_calls(function: Callable, A: Tensor, x: Tensor, target: Tensor) -> tuple[object, list[str]]:
    r, t = group_rank(), group_size()
    with watch() as calls:
        value = function(A.clone(), x.chunk(t)[r].clone(), target.chunk(t)[r].clone())
    return value, calls


def _refuse_gathered(values: Sequence, t: int) -> None:
    for value in values:
        if isinstance(value, Tensor) and t > 1 and value.numel() == t * IN * OUT:
            raise Wrong(
                f"the gradient has shape {list(value.shape)}, not {[IN, OUT]}: all ranks' gradients are there, side by "
                "side, and not yet averaged."
            )


def _gradient_symptoms(A: Tensor, x: Tensor, target: Tensor, parts: list[Tensor]) -> list[Symptom]:
    t, mean = len(parts), sum(parts) / len(parts)
    x_parts, target_parts = x.chunk(t), target.chunk(t)
    mixed = mean_squared_gradient(A, sum(x_parts), sum(target_parts))
    averaged = mean_squared_gradient(A, sum(x_parts) / t, sum(target_parts) / t)
    at_t_times_A = [mean_squared_gradient(t * A, *part) for part in zip(x_parts, target_parts)]
    weights = "These are the weights, not a gradient. They are the same on all ranks; what differs is the gradient."
    examples = (
        "The examples were summed over the ranks, and then a gradient taken. Each rank takes the gradient of its own"
    )

    def together(values: Sequence, sentence: str) -> Symptom:
        return _together({"gradient": values}, sentence)

    return [
        together(
            [t * mean] * t,
            f"It is the sum of the {t} ranks' gradients. Each rank's loss is a mean over its own part of the batch, so "
            "the whole batch's gradient is the mean of them.",
        ),
        together(parts, "Each rank has its own part's gradient: the ranks' gradients were not added."),
        together([part / t for part in parts], f"Each rank's own gradient was divided by {t}, and nothing was added."),
        together([parts[0]] * t, "Every rank has rank 0's gradient. Those of all ranks have to be averaged."),
        together([A] * t, weights),
        together([t * A] * t, weights),
        together([mixed] * t, f"{examples} examples; the gradients are averaged."),
        together([averaged] * t, f"{examples} examples; the gradients are averaged."),
        together(
            at_t_times_A,
            "The weights were summed over the ranks before the gradient was taken. They are whole on every rank.",
        ),
        together([mean / t] * t, f"The mean was divided by {t} once more."),
    ]


def _require_one_all_reduce(calls: list[str], t: int) -> None:
    kinds = [call.partition(" ")[0] for call in calls]
    if kinds in (["all_reduce"], []):  # none is seen where a call goes past torch's process groups
        return
    if "all_reduce" not in kinds and kinds[0].startswith("all_gather"):
        why = f"An all-gather brings every rank's tensor to every rank, {t} of them; an all-reduce adds on the way."
    elif set(kinds) == {"all_reduce"}:
        why = "Only the gradient has to be averaged, once."
    else:
        why = "One all-reduce of the gradient is enough."
    raise Wrong(f"the gradient is right, but at t = {t} rank 0 made {len(kinds)} calls ({', '.join(calls)}).\n{why}")


# ---- 2.3 ------------------------------------------------------------------------------------------------------------

RING_SIZES = (3, 4, 2, 1)  # first that of the chapter's picture, at which all known mistakes differ


@exercise("2.3")
def all_gather_half_of_the_ring(ring_all_reduce: Callable) -> str:
    """`ring_all_reduce(chunks)`: this rank's t chunks -> what it holds after each of 2(t-1) steps: [t, 2] each."""
    for t in RING_SIZES:
        chunks = _chunks(t)
        runs = _with_messages(
            ring_all_reduce, lambda t=t, chunks=chunks: on_ranks(_ring_job, t, ring_all_reduce, chunks)
        )
        histories, calls = zip(*runs)
        require_returned(ring_all_reduce, list(histories))
        for rank, history in enumerate(histories):
            _require_steps(history, rank, t)
        sent = [_messages(rank_calls) for rank_calls in calls]
        _require_right_neighbour(sent, t)
        if t > 1:
            _compare_history(histories, chunks)
        _require_single_chunks(sent, calls, t)
    return "every chunk after every step, and 2(t-1) messages of one chunk, at t = 2, 3 and 4."


def _chunks(t: int) -> list[Tensor]:
    """For each rank t chunks of two numbers, [t, 2]; a sum shows in its digits which ranks are in it."""
    return [torch.tensor([[(c + 1) * 10**r, (2 * c + 1) * 10**r] for c in range(t)]) for r in range(t)]


def _ring_job(function: Callable, chunks: list[Tensor]) -> tuple[object, list[str]]:
    mine = list(chunks[group_rank()].clone())
    with watch() as calls:
        history = function(mine)
    if isinstance(history, (list, tuple)):
        history = [torch.stack(list(step)) if isinstance(step, (list, tuple)) else step for step in history]
    return history, calls


def simulated_ring(
    chunks: Sequence[Tensor],
    send: Callable[[int, int], int] = lambda r, step: r + 1 - step,
    keep: Callable[[int, int], int] = lambda r, step: r - step,
    adds: bool = False,
) -> list[Tensor]:
    """For each rank its history [2(t-1), t, 2]; `send` and `keep` say which chunk goes and where the arriving one is
    put in the second half, `adds` whether it is added there. The defaults are the right ring."""
    held, t = [chunk.clone() for chunk in chunks], len(chunks)
    history: list[list[Tensor]] = [[] for _ in chunks]
    for step in range(2 * (t - 1)):
        second = step - (t - 1)  # the step within the second half
        going = [held[r][(r - step if second < 0 else send(r, second)) % t].clone() for r in range(t)]
        for r in range(t):
            place = (r - step - 1 if second < 0 else keep(r, second)) % t
            arrived = going[(r - 1) % t]
            held[r][place] = held[r][place] + arrived if second < 0 or adds else arrived
            history[r].append(held[r].clone())
    return [torch.stack(steps) if steps else torch.empty(0, t, 2) for steps in history]


def wrong_rings(chunks: Sequence[Tensor]) -> list[tuple[list[Tensor], str]]:
    """Histories of the mistakes that are known, and what to say to each."""
    return [
        (
            simulated_ring(chunks, adds=True),
            "What arrives in the second half is finished: keep it. Added to what is there, some parts count twice.",
        ),
        (
            simulated_ring(chunks, lambda r, step: r - step, lambda r, step: r - step - 1, adds=True),
            "That is the reduce-scatter once more. In the second half rank r begins with chunk r + 1, and nothing is "
            "added.",
        ),
        (
            simulated_ring(chunks, lambda r, step: r - step, lambda r, step: r - step - 1),
            "Rank r sends chunk r first, which is not finished there: it finished chunk r + 1 in the first half.",
        ),
        (
            simulated_ring(chunks, lambda r, step: r + 1),
            "Every rank sends its own finished chunk in every step. After the first, pass on the one that has arrived.",
        ),
        (
            simulated_ring(chunks, keep=lambda r, step: r + 1 - step),
            "What arrives is put in the place of the chunk that was sent. The left neighbour sent another one, chunk "
            "r - step.",
        ),
        (
            simulated_ring(chunks, keep=lambda r, step: r - step - 1),
            "What arrives is put one place too far: the left neighbour sent chunk r - step.",
        ),
        (
            simulated_ring(chunks, lambda r, step: r + 1 + step, lambda r, step: r + step),
            "The chunks' numbers go up from step to step. They go down: what arrived in one step is sent in the next.",
        ),
    ]


def _with_messages(function: Callable, run: Callable) -> list:
    """What run() returns; Unfilled if it fails because `function` still has a hole, Wrong with a hint if ranks wait."""
    try:
        return run()
    except RankTimeout as error:
        hint = "If all ranks send first, or all receive first, nobody answers: isend, then recv, then wait()."
        raise Wrong(f"the ranks wait for each other. {hint}\n{explain(error)}") from None
    except RankError:
        if stub := stub_in(function):
            raise Unfilled(f"replace {stub} in {function.__name__}.") from None
        raise


def _require_steps(history, rank: int, t: int) -> None:
    steps = 2 * (t - 1)
    if not isinstance(history, (list, tuple)):
        raise Wrong(f"ring_all_reduce should return the list history; on rank {rank} it is {history!r:.60}.")
    if len(history) != steps:
        hint = ""
        if len(history) in (2 * t - 1, 2 * t):
            hint = "Each half takes t - 1 steps: a rank need not hear of its own chunk."
        elif len(history) == t - 1:
            hint = "That is the first half alone: each step of the second appends to history too."
        raise Wrong(
            f"at t = {t}, history has {len(history)} entries on rank {rank}; 2(t-1) = {steps} steps.\n{hint}".rstrip()
        )
    for number, step in enumerate(history, start=1):
        if not isinstance(step, Tensor) or list(step.shape) != [t, 2]:
            shape = list(step.shape) if isinstance(step, Tensor) else type(step).__name__
            raise Wrong(f"at t = {t}, after step {number} rank {rank} should hold {t} chunks of 2 numbers: {shape}.")


MESSAGE = re.compile(r"send \d+ -> (\d+) \w+ \[([\d, ]*)\]")


def _messages(calls: list[str]) -> list[tuple[int, int]]:
    """To whom a rank sent how many elements, one pair a message."""
    found = [MESSAGE.match(call) for call in calls]
    return [(int(m[1]), math.prod(map(int, m[2].split(", "))) if m[2] else 1) for m in found if m]


def _require_right_neighbour(sent: list[list[tuple[int, int]]], t: int) -> None:
    for rank, messages in enumerate(sent):
        for target, _ in messages:
            if target != (rank + 1) % t:
                raise Wrong(
                    f"at t = {t}, rank {rank} sends to rank {target}. In this ring it sends to its right neighbour "
                    f"alone, rank {(rank + 1) % t}."
                )


def _compare_history(histories: Sequence[Sequence[Tensor]], chunks: list[Tensor]) -> None:
    t, right = len(chunks), simulated_ring(chunks)
    mine = [torch.stack(list(history)) for history in histories]
    if all(torch.equal(a, b) for a, b in zip(mine, right)):
        return
    steps = range(2 * (t - 1))
    step, rank = next((s, r) for s in steps for r in range(t) if not torch.equal(mine[r][s], right[r][s]))
    hint = next(
        (text for wrong, text in wrong_rings(chunks) if all(torch.equal(a, b) for a, b in zip(mine, wrong))), ""
    )
    raise Wrong(
        f"at t = {t}, after step {step + 1} of {len(steps)}, rank {rank} holds {mine[rank][step].tolist()} and should "
        f"hold {right[rank][step].tolist()}.\n{hint}".rstrip()
    )


def _require_single_chunks(sent: list[list[tuple[int, int]]], calls: Sequence[list[str]], t: int) -> None:
    steps = 2 * (t - 1)
    for rank, messages in enumerate(sent):
        _require_messages_only(calls[rank], f"at t = {t}, rank {rank}")
        elements, largest = sum(size for _, size in messages), max((size for _, size in messages), default=0)
        if largest > 2:
            raise Wrong(
                f"at t = {t}, the values are right, and a message of rank {rank} has {largest // 2} chunks, the whole "
                f"payload. The ring sends one chunk in a step: {2 * steps} elements in all, and not {elements}."
            )
        if len(messages) != steps:
            raise Wrong(
                f"at t = {t}, rank {rank} sends {len(messages)} messages; the ring takes 2(t-1) = {steps}: each step "
                "sends one chunk."
            )


def _require_messages_only(calls: list[str], who: str) -> None:
    for call in calls:
        if not call.startswith(("send ", "recv ")):
            raise Wrong(f"{who} calls {call}. Do it with messages: pass_on, or send and recv.")


# ---- 2.4 ------------------------------------------------------------------------------------------------------------

OUTCOMES = ("right", "waits", "garbage")
NAMES = ("q", "k", "v")


@exercise("2.4")
def two_scripts_mended(prediction_a, prediction_b, mean_loss: Callable, sum_gradients: Callable) -> str:
    """Predictions "right", "waits" or "garbage"; `mean_loss(loss)` and `sum_gradients(gradients)`, mended."""
    _require_prediction("a", prediction_a, "waits", _OF_A)
    _require_prediction("b", prediction_b, "garbage", _OF_B)
    for t in SIZES[1:]:
        _require_mean_loss(mean_loss, t)
    for t in SIZES[1:]:
        _require_sums(sum_gradients, t)
    return "both end, and are right and equal on all ranks."


_OF_A = {
    "right": "Rank 0 calls all_reduce. Who else does, and where should the other losses come from?",
    "garbage": "Nothing wrong is added up, for nothing is added up: who besides rank 0 comes to the meeting?",
}
_OF_B = {
    "right": "Write down what the first call adds up: rank 0's first entry, and rank 1's first entry. Is it one name?",
    "waits": "Every rank makes three calls, and all are alike, so nobody waits. What does the first one add up?",
}


def _require_prediction(script: str, prediction, right: str, hints: Mapping[str, str]) -> None:
    said = prediction.strip().lower() if isinstance(prediction, str) else prediction
    if said not in OUTCOMES:
        raise Wrong(f'prediction_{script} should be "right", "waits" or "garbage"; it is {prediction!r:.40}.')
    if said != right:
        raise Wrong(f'script {script.upper()}, as it was given, does something else than "{said}".\n{hints[said]}')


def _quietly(function: Callable, values: list):
    with contextlib.redirect_stdout(io.StringIO()):  # what script A prints is not the check's to show
        return function(values[group_rank()])


def _same_calls(function: Callable, t: int, values: list, hint: str) -> list:
    """What function(values[rank]) returns on each rank; Wrong with `hint` if the ranks make different calls."""
    try:
        results = on_ranks(_quietly, t, function, values)
    except CollectiveMismatch as error:
        raise Wrong(f"in {function.__name__} the ranks do not make the same calls.\n{hint}\n{explain(error)}") from None
    require_returned(function, results)
    return results


def _require_mean_loss(mean_loss: Callable, t: int) -> None:
    losses = [torch.tensor(10.0**r, dtype=torch.float64) for r in range(t)]  # 1, 10, 100, 1000
    inside = "A call inside a condition on the rank is made by some ranks only. Every rank calls; rank 0 prints."
    results = _same_calls(mean_loss, t, losses, inside)
    total = sum(losses)
    own = "Each rank returns its own loss: nobody asked the others. Keep the all-reduce, and let every rank call it."
    only_0 = "Only rank 0 has the mean. Every rank should return it."

    def together(values: Sequence, sentence: str) -> Symptom:
        return _together({"mean_loss": values}, sentence)

    symptoms = [
        together(losses, own),
        together([total / t, *losses[1:]], only_0),
        together([total, *losses[1:]], only_0),
        together([losses[0]] * t, "Every rank has rank 0's loss. The mean is over the losses of all ranks."),
        together([total] * t, f"That is the sum. The mean is the sum over t = {t}."),
        together([total / t, *[total] * (t - 1)], "Rank 0 divides by t, and the other ranks do not."),
        together([loss / t for loss in losses], "Each rank's own loss was divided by t, and nothing was added."),
    ]
    compare([{"mean_loss": _scalar(result)} for result in results], {"mean_loss": total / t}, t=t, symptoms=symptoms)


def _scalar(value):
    """A number, or a tensor of one element whatever its shape."""
    return value.reshape(()).to(torch.float64) if isinstance(value, Tensor) and value.numel() == 1 else value


def _require_sums(sum_gradients: Callable, t: int) -> None:
    orders = [NAMES[r % len(NAMES) :] + NAMES[: r % len(NAMES)] for r in range(t)]  # rank r begins with its own name
    parts = [{name: _part(name, r) for name in order} for r, order in enumerate(orders)]
    results = _same_calls(sum_gradients, t, parts, "Every rank has the same three names: go through them in one order.")
    for rank, result in enumerate(results):
        if not isinstance(result, Mapping) or set(result) != set(NAMES):
            has = sorted(result) if isinstance(result, Mapping) else type(result).__name__
            raise Wrong(f"sum_gradients should return a dict with the names q, k and v; on rank {rank} it has {has}.")
    right = {name: sum(part[name] for part in parts) for name in NAMES}
    mixed = [
        {name: sum(part[order[place]] for part, order in zip(parts, orders)) for place, name in enumerate(orders[r])}
        for r in range(t)
    ]
    symptoms = [
        _named(parts, "Each rank has its own part: nothing was added."),
        _named(
            mixed,
            "The first call still adds up different names, each rank's first, the second each rank's second. The order "
            "has to be the same on every rank: take one that does not depend on what a rank did.",
        ),
        _named(
            [{name: value / t for name, value in right.items()}] * t, f"That is the mean; the sum is {t} times as much."
        ),
        _named([parts[0]] * t, "Every rank has rank 0's part. The parts of all ranks are to be added."),
        _mixed_names(parts),
    ]
    compare(results, right, t=t, symptoms=symptoms)


def _part(name: str, rank: int) -> Tensor:
    """A rank's part of a gradient, [2]; of a sum's first entry each digit names one part."""
    number = NAMES.index(name) + 1
    return torch.tensor([number * 10.0**rank, number + 7.0 * rank], dtype=torch.float64)


def _named(values: Sequence[Mapping], sentence: str) -> Symptom:
    """A symptom: all ranks together hold these values of a name, rank r `values[r][name]`."""
    return _together({name: [of_rank[name] for of_rank in values] for name in NAMES}, sentence)


def _mixed_names(parts: list[dict[str, Tensor]]) -> Symptom:
    """A symptom: each rank put in a part, but of different names. The first entry tells which by its digits."""

    def symptom(difference: Difference) -> str | None:
        digits = f"{difference.got[0].item():.0f}"[::-1]
        if len(digits) == len(parts) and set(digits) <= set("123") and len(set(digits)) > 1:
            names = ", ".join(f"{NAMES[int(digit) - 1]} of rank {rank}" for rank, digit in enumerate(digits))
            return f"It adds up {names}: the ranks still go through the names in different orders."
        return None

    return symptom


# ---- 2.5 ------------------------------------------------------------------------------------------------------------

# Ranks: lengths. At the first of each the wire is measured; the others leave a rank without a chunk of its own.
LENGTHS = {3: (7, 4, 2), 2: (5, 1), 4: (10, 3), 1: (5,)}


@exercise("2.5")
def ring_of_any_length(all_reduce_by_ring: Callable) -> str:
    """`all_reduce_by_ring(x)`: x of any length -> the sum over the ranks, with messages only."""
    for t, lengths in LENGTHS.items():
        for n in lengths:
            _require_ring_of(all_reduce_by_ring, n, t)
    return "the sum, at any length, and on 3 ranks within one chunk of 2(t-1)/t of the payload."


def _numbers(n: int, t: int) -> list[Tensor]:
    """For each rank n distinct numbers; a sum shows in its digits who took part."""
    return [torch.arange(1, n + 1) * 100**r for r in range(t)]


def _length_job(function: Callable, numbers: list[Tensor]) -> tuple[object, list[str]]:
    with watch() as calls:
        value = function(numbers[group_rank()].clone())
    return value, calls


def _require_ring_of(function: Callable, n: int, t: int) -> None:
    numbers = _numbers(n, t)
    where = f"{n} elements on {t} rank{'s' * (t > 1)}"
    try:
        results = _with_messages(function, lambda: on_ranks(_length_job, t, function, numbers))
    except CollectiveMismatch as error:
        raise Wrong(
            f"with {where}, the two ends of a message do not agree.\n"
            f"{n} does not divide by {t}: chunks that are not equally long arrive with other sizes than they leave. "
            f"Either the receiver knows the size, or the chunks are made equal with zeros.\n{explain(error)}"
        ) from None
    except RankError as error:
        if len(torch.empty(n).chunk(t)) < t:
            raise Wrong(
                f"with {where}: {explain(error)}\nAre there {t} chunks? x.chunk({t}) makes fewer of {n} elements; "
                f"x.tensor_split({t}) does not."
            ) from None
        raise
    values, calls = zip(*results)
    require_returned(function, list(values))
    for rank, value in enumerate(values):
        _require_sum(value, numbers, rank, where)
    if n == LENGTHS[t][0] and t > 1:
        _require_little_wire([_messages(of_rank) for of_rank in calls], calls, n, t)


def _require_sum(value, numbers: list[Tensor], rank: int, where: str) -> None:
    t, n, right = len(numbers), len(numbers[0]), sum(numbers)
    if not isinstance(value, Tensor):
        raise Wrong(f"with {where}, all_reduce_by_ring should return a tensor; on rank {rank} it is {value!r:.60}.")
    if list(value.shape) != [n]:
        hint = {
            math.ceil(n / t) * t: "The padding is still there: take it off again.",
            n // t * t: f"The last {n % t} of {n} are lost: {n} does not divide by {t}.",
        }.get(value.numel(), "")
        if value.numel() == n:
            hint = "The chunks are there, but not one after the other in one row."
        raise Wrong(f"with {where}, rank {rank} returns shape {list(value.shape)}, not [{n}].\n{hint}".rstrip())
    if torch.equal(value, right):
        return
    mine, whole = numbers[rank], n // t * t
    hint = ""
    if torch.equal(value, mine):
        hint = "Those are the rank's own numbers: nothing has been added."
    elif whole < n and torch.equal(value[:whole], right[:whole]):
        hint = f"The last {n - whole} of {n} are wrong: {n} does not divide by {t}, and the rest has to go round too."
    elif torch.equal(value, t * right):
        hint = f"It is {t} times the sum: what was finished was added again."
    wrong = int((value != right).nonzero()[0])
    raise Wrong(
        f"with {where}, element {wrong} is {value[wrong].item()} on rank {rank} and should be {right[wrong].item()}.\n"
        f"{hint}".rstrip()
    )


def _require_little_wire(sent: list[list[tuple[int, int]]], calls: Sequence[list[str]], n: int, t: int) -> None:
    ideal, chunk = 2 * (t - 1) / t * n, math.ceil(n / t)
    elements = [sum(size for _, size in messages) for messages in sent]
    for rank, messages in enumerate(sent):
        _require_messages_only(calls[rank], f"rank {rank}")
        if abs(elements[rank] - ideal) > chunk:
            hint = "Cut x into t chunks, and send one in a step."
            if len(set(elements)) > 1:
                hint = "The ranks do not send alike: one of them adds for all. In a ring each adds a chunk of its own."
            elif any(size == n for _, size in messages):
                hint = f"Its messages are the whole payload, {n} elements each. {hint}"
            raise Wrong(
                f"the sum is right, and with {n} elements on {t} ranks rank {rank} sends {elements[rank]} elements. "
                f"2(t-1)/t of {n} is {ideal:.1f}, and one chunk, {chunk}, more or less is let pass.\n{hint}"
            )
