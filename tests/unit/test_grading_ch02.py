"""Exercises 2.1 to 2.5: right answers in several styles pass, each wrong one hears what is wrong with it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checking import refused

from tpcode.comm import all_gather, all_reduce, broadcast, reduce_scatter
from tpcode.grading import ch02, check, ranks


def where() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# ---- 2.1 ------------------------------------------------------------------------------------------------------------

RIGHT = {name.removeprefix("after_"): rows for name, rows in ch02.RIGHT_2_1.items()}
OWN = [list(row) for row in ch02.HELD]
TOTAL = RIGHT["all_reduce"][0]
SIDE_BY_SIDE = RIGHT["all_gather"][0]


def test_the_right_rows_are_those_of_real_ranks(pool4):
    def four():
        rank = dist.get_rank()
        group = dist.new_group([0, 1, 2])
        if rank == 3:
            return None
        mine = torch.tensor(ch02.HELD[rank])
        results = (
            all_reduce(mine, group=group),
            reduce_scatter(mine, 0, group),
            all_gather(mine, 0, group),
            broadcast(mine, ch02.SOURCE, group),
        )
        return [result.tolist() for result in results]

    by_rank = pool4.run(four)[:3]
    assert [list(of_op) for of_op in zip(*by_rank)] == list(RIGHT.values())


@pytest.mark.parametrize(
    "typed",
    [
        lambda rows: rows,
        np.array,
        lambda rows: torch.tensor(rows, dtype=torch.float64),
        lambda rows: [torch.tensor(row) for row in rows],
        lambda rows: tuple(map(tuple, rows)),
    ],
)
def test_what_ranks_hold_passes(typed, capsys):
    check("2.1", *(typed(rows) for rows in RIGHT.values()))
    assert capsys.readouterr().out.startswith("2.1 right: all three ranks")


def test_pieces_may_be_nested_and_a_single_number_may_stand_alone(capsys):
    check("2.1", RIGHT["all_reduce"], [12, 18, 15], [OWN] * 3, RIGHT["broadcast"])
    assert capsys.readouterr().out.startswith("2.1 right")


WRONG_ROWS = [
    ("all_reduce", OWN, "Those are the numbers from before: an all-reduce adds them"),
    ("all_reduce", [TOTAL, *OWN[1:]], "Every rank gets the sum, not only rank 0."),
    ("all_reduce", [TOTAL, [], []], "Every rank gets the sum, not only rank 0."),
    ("all_reduce", [[4, 6, 5]] * 3, "That is the mean."),
    ("all_reduce", [[6, 8, 9]] * 3, "That is the largest of each."),
    ("all_reduce", [SIDE_BY_SIDE] * 3, "that is an all-gather. An all-reduce adds."),
    ("all_reduce", [[10], [16], [19]], "You added within each rank."),
    ("all_reduce", [[45]] * 3, "You added all entries."),
    ("all_reduce", [[12], [18], [15]], "That is a reduce-scatter"),
    ("reduce_scatter", [TOTAL] * 3, "The ranks do not hold the same: rank r gets piece r of the sum, and no other."),
    ("reduce_scatter", [[12]] * 3, "The ranks do not hold the same: rank r gets piece r of the sum."),
    ("reduce_scatter", [[2], [3], [5]], "they were not added"),
    ("reduce_scatter", [[15], [18], [12]], "The pieces go to the ranks in order"),
    ("reduce_scatter", [[10], [16], [19]], "You added within each rank."),
    ("reduce_scatter", [TOTAL, [], []], "Each rank gets a piece of the sum, not rank 0 all of it."),
    ("all_gather", [TOTAL] * 3, "Nothing is added: an all-gather puts the pieces side by side."),
    ("all_gather", OWN, "afterwards every rank holds those of all ranks"),
    ("all_gather", [SIDE_BY_SIDE, *OWN[1:]], "Every rank gets all pieces"),
    ("all_gather", [SIDE_BY_SIDE, [], []], "Every rank gets all pieces"),
    ("all_gather", [OWN, [*OWN[1:], OWN[0]], [OWN[2], *OWN[:2]]], "a rank's own does not come first"),
    ("all_gather", [[2, 4, 6, 7, 3, 8, 1, 9, 5]] * 3, "The pieces stay whole"),
    ("broadcast", [OWN[0]] * 3, "That is what rank 0 held. The source is rank 1."),
    ("broadcast", [OWN[2]] * 3, "That is what rank 2 held. The source is rank 1."),
    ("broadcast", OWN, "afterwards every rank holds what the source held"),
    ("broadcast", [TOTAL] * 3, "Nothing is added: every rank gets what the source held."),
    ("broadcast", [OWN[1], [], OWN[1]], "The source keeps what it had."),
    ("broadcast", [[0, 0, 0]] * 3, "rank 0 does not hold [0, 0, 0]"),
    ("all_reduce", TOTAL, "should be a list of three lists"),
    ("all_reduce", [TOTAL] * 2, "should be a list of three lists"),
    ("all_gather", "all", "should be a list of three lists of numbers"),
    ("all_gather", 7, "should be a list of three lists of numbers"),
]


@pytest.mark.parametrize("op, rows, said", WRONG_ROWS)
def test_wrong_rows_hear_why(op, rows, said):
    message = refused(said, "2.1", *(RIGHT | {op: rows}).values())
    assert message.startswith(f"2.1 not yet right: after_{op}")


def test_no_wrong_rows_are_the_right_ones():
    for op, rows, _ in WRONG_ROWS:
        assert rows != RIGHT[op]


# ---- 2.2 ------------------------------------------------------------------------------------------------------------


def gradient(A, x, target):
    A = A.clone().requires_grad_()
    (x @ A - target).square().mean().backward()
    return A.grad


def summed_and_divided(A, x, target):
    return all_reduce(gradient(A, x, target)) / dist.get_world_size()


def average(A, x, target):
    return all_reduce(gradient(A, x, target), "avg")


def divided_first_and_in_place(A, x, target):
    mine = gradient(A, x, target) / dist.get_world_size()
    dist.all_reduce(mine)
    return mine


def loss_divided(A, x, target):
    A = A.requires_grad_()
    loss = (x @ A - target).square().mean() / dist.get_world_size()
    loss.backward()
    return all_reduce(A.grad.flatten()).view_as(A)


def functional(A, x, target):
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(gradient(A, x, target), "sum", dist.group.WORLD) / dist.get_world_size()


@pytest.mark.parametrize("answer", [summed_and_divided, average, divided_first_and_in_place, loss_divided, functional])
def test_averaged_gradients_pass(answer, capsys):
    check("2.2", answer)
    assert capsys.readouterr().out.startswith("2.2 right: the whole batch's gradient")


def hole(A, x, target):
    whole = None  # replace None: the gradient of all examples
    return whole


def own_gradient(A, x, target):
    return gradient(A, x, target)


def result_dropped(A, x, target):
    mine = gradient(A, x, target)
    all_reduce(mine)
    return mine


def total(A, x, target):
    return all_reduce(gradient(A, x, target))


def only_divided(A, x, target):
    return gradient(A, x, target) / dist.get_world_size()


def divided_twice(A, x, target):
    return all_reduce(gradient(A, x, target), "avg") / dist.get_world_size()


def from_rank_0(A, x, target):
    return broadcast(gradient(A, x, target), src=0)


def mean_of_weights(A, x, target):
    return all_reduce(A) / dist.get_world_size()


def sum_of_weights(A, x, target):
    return all_reduce(A)


def at_summed_weights(A, x, target):
    return gradient(all_reduce(A), x, target)


def of_summed_examples(A, x, target):
    return gradient(A, all_reduce(x), all_reduce(target))


def of_averaged_examples(A, x, target):
    return gradient(A, all_reduce(x, "avg"), all_reduce(target, "avg"))


def gathered(A, x, target):
    return all_gather(gradient(A, x, target), dim=0)


def gathered_and_averaged(A, x, target):
    return all_gather(gradient(A, x, target)[None], dim=0).mean(0)


def gathered_examples(A, x, target):
    return gradient(A, all_gather(x, dim=0), all_gather(target, dim=0))


def loss_too(A, x, target):
    all_reduce((x @ A - target).square().mean())
    return all_reduce(gradient(A, x, target), "avg")


def through_the_loss(A, x, target):
    A = A.requires_grad_()
    all_reduce((x @ A - target).square().mean()).backward()
    return A.grad


def forgot_to_return(A, x, target):
    whole = all_reduce(gradient(A, x, target)) / dist.get_world_size()  # noqa: F841


@pytest.mark.parametrize(
    "answer, said",
    [
        (hole, "2.2 is not filled in yet: replace None in hole."),
        (own_gradient, "the ranks' gradients were not added"),
        (result_dropped, "the ranks' gradients were not added"),
        (total, "It is the sum of the 2 ranks' gradients."),
        (only_divided, "gradient was divided by 2, and nothing was added"),
        (divided_twice, "The mean was divided by 2 once more."),
        (from_rank_0, "Every rank has rank 0's gradient."),
        (mean_of_weights, "These are the weights, not a gradient."),
        (sum_of_weights, "These are the weights, not a gradient."),
        (at_summed_weights, "The weights were summed over the ranks"),
        (of_summed_examples, "The examples were summed over the ranks"),
        (of_averaged_examples, "The examples were summed over the ranks"),
        (gathered, "side by side, and not yet averaged"),
        (gathered_and_averaged, "An all-gather brings every rank's tensor to every rank"),
        (gathered_examples, "An all-gather brings every rank's tensor to every rank"),
        (loss_too, "Only the gradient has to be averaged, once."),
        (through_the_loss, "no gradient flows through it"),
        (forgot_to_return, "Is there a return?"),
    ],
)
def test_wrong_gradients_hear_why(answer, said):
    refused(said, "2.2", answer)


def test_the_formula_is_autograds():
    A, x, target = ch02._regression()
    assert torch.allclose(ch02.mean_squared_gradient(A, x, target), gradient(A, x, target), rtol=0, atol=1e-12)


# ---- 2.3 ------------------------------------------------------------------------------------------------------------


def pass_on(chunk):
    r, t = where()
    arrived = torch.empty_like(chunk)
    sending = dist.isend(chunk, (r + 1) % t)
    dist.recv(arrived, (r - 1) % t)
    sending.wait()
    return arrived


def first_half(chunks):
    r, t = where()
    history = []
    for step in range(t - 1):
        own = (r - step - 1) % t
        chunks[own] = chunks[own] + pass_on(chunks[(r - step) % t])
        history.append(torch.stack(chunks))
    return history


def second_half(send, keep, adds=False):
    """A ring_all_reduce whose second half sends chunk send(r, step) and puts what arrives at keep(r, step)."""

    def ring_all_reduce(chunks):
        r, t = where()
        history = first_half(chunks)
        for step in range(t - 1):
            arrived = pass_on(chunks[send(r, step) % t])
            place = keep(r, step) % t
            chunks[place] = chunks[place] + arrived if adds else arrived
            history.append(torch.stack(chunks))
        return history

    return ring_all_reduce


def send_right(r, step):
    return r + 1 - step


def keep_right(r, step):
    return r - step


def passes_on_what_arrived(chunks):
    r, t = where()
    history = first_half(chunks)
    number, chunk = (r + 1) % t, chunks[(r + 1) % t]
    for _ in range(t - 1):
        chunk, number = pass_on(chunk), (number - 1) % t
        chunks[number] = chunk
        history.append(torch.stack(chunks))
    return history


def in_place_with_batches(chunks):
    r, t = where()
    history = first_half(chunks)
    for step in range(t - 1):
        arrived = torch.empty_like(chunks[0])
        ops = [
            dist.P2POp(dist.isend, chunks[(r + 1 - step) % t], (r + 1) % t),
            dist.P2POp(dist.irecv, arrived, (r - 1) % t),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        chunks[(r - step) % t][:] = arrived
        history.append([chunk.clone() for chunk in chunks])
    return history


def even_ranks_send_first(chunks):
    r, t = where()
    history = first_half(chunks)
    for step in range(t - 1):
        arrived, mine = torch.empty_like(chunks[0]), chunks[(r + 1 - step) % t]
        if r == 0:
            dist.send(mine, (r + 1) % t)
            dist.recv(arrived, (r - 1) % t)
        else:
            dist.recv(arrived, (r - 1) % t)
            dist.send(mine, (r + 1) % t)
        chunks[(r - step) % t] = arrived
        history.append(torch.stack(chunks))
    return history


@pytest.mark.parametrize(
    "answer",
    [second_half(send_right, keep_right), passes_on_what_arrived, in_place_with_batches, even_ranks_send_first],
)
def test_rings_pass(answer, capsys):
    check("2.3", answer)
    assert capsys.readouterr().out.startswith("2.3 right")


def hole_in_the_ring(chunks):
    r, t = where()
    history = first_half(chunks)
    for _ in range(t - 1):
        arrived = None  # replace None: pass on a finished chunk
        keep = None  # replace None: the number of the chunk that has arrived
        chunks[keep] = arrived
        history.append(torch.stack(chunks))
    return history


def whole_payload(chunks):
    r, t = where()
    history = first_half(chunks)
    for step in range(t - 1):
        chunks[(r - step) % t] = pass_on(torch.stack(chunks))[(r - step) % t]
        history.append(torch.stack(chunks))
    return history


def whole_payload_in_many_messages(chunks):
    r, t = where()
    history = first_half(chunks)
    for step in range(t - 1):
        arrived = [pass_on(chunk) for chunk in chunks]
        chunks[(r - step) % t] = arrived[(r - step) % t]
        history.append(torch.stack(chunks))
    return history


def one_step_too_many(chunks):
    r, t = where()
    history = first_half(chunks)
    for step in range(t):
        chunks[(r - step) % t] = pass_on(chunks[(r + 1 - step) % t])
        history.append(torch.stack(chunks))
    return history


def no_second_half(chunks):
    return first_half(chunks)


def to_the_left(chunks):
    r, t = where()
    history = first_half(chunks)
    for step in range(t - 1):
        arrived = torch.empty_like(chunks[0])
        sending = dist.isend(chunks[(r + 1 + step) % t], (r - 1) % t)
        dist.recv(arrived, (r + 1) % t)
        sending.wait()
        chunks[(r + 2 + step) % t] = arrived
        history.append(torch.stack(chunks))
    return history


def with_a_collective(chunks):
    r, t = where()
    history = first_half(chunks)
    if t > 1:
        every = all_gather(chunks[(r + 1) % t][None], dim=0)
        for step in range(t - 1):
            chunks[(r - step) % t] = every[(r - step - 1) % t]
            history.append(torch.stack(chunks))
    return history


def only_the_end(chunks):
    first_half(chunks)
    return torch.stack(chunks)


def single_numbers(chunks):
    return [step[:, 0] for step in second_half(send_right, keep_right)(chunks)]


@pytest.mark.parametrize(
    "answer, said",
    [
        (hole_in_the_ring, "2.3 is not filled in yet: replace None in hole_in_the_ring."),
        (second_half(send_right, keep_right, adds=True), "What arrives in the second half is finished: keep it."),
        (second_half(keep_right, lambda r, s: r - s - 1, adds=True), "That is the reduce-scatter once more."),
        (second_half(keep_right, lambda r, s: r - s - 1), "Rank r sends chunk r first, which is not finished there"),
        (second_half(lambda r, s: r + 1, keep_right), "Every rank sends its own finished chunk in every step."),
        (second_half(send_right, send_right), "What arrives is put in the place of the chunk that was sent."),
        (second_half(send_right, lambda r, s: r - s - 1), "What arrives is put one place too far"),
        (second_half(lambda r, s: r + 1 + s, lambda r, s: r + s), "The chunks' numbers go up from step to step."),
        (whole_payload, "the whole payload. The ring sends one chunk in a step"),
        (
            whole_payload_in_many_messages,
            "rank 0 sends 8 messages; the ring takes 2(t-1) = 4: each step sends one chunk.",
        ),
        (one_step_too_many, "Each half takes t - 1 steps"),
        (no_second_half, "That is the first half alone"),
        (to_the_left, "rank 0 sends to rank 2. In this ring it sends to its right neighbour alone, rank 1."),
        (with_a_collective, "Do it with messages: pass_on, or send and recv."),
        (only_the_end, "should return the list history"),
        (single_numbers, "should hold 3 chunks of 2 numbers"),
    ],
)
def test_wrong_rings_hear_why(answer, said):
    refused(said, "2.3", answer)


@pytest.mark.parametrize("id", ["2.3", "2.5"])
def test_ranks_that_all_send_first_hear_why_they_wait(id, monkeypatch):
    def all_send_first(x):
        r, t = where()
        mine = x[0] if isinstance(x, list) else x
        arrived = torch.empty_like(mine)
        dist.send(mine, (r + 1) % t)
        dist.recv(arrived, (r - 1) % t)
        return [arrived]

    monkeypatch.setattr(ranks, "_pools", {})
    monkeypatch.setattr(ranks, "TIMEOUT", 1.0)
    text = refused("the ranks wait for each other. If all ranks send first", id, all_send_first)
    for pool in ranks._pools.values():
        pool.close()
    assert "has waited 1 s" in text


def test_known_wrong_rings_differ_from_the_right_one_and_from_each_other():
    chunks = ch02._chunks(ch02.RING_SIZES[0])
    histories = [ch02.simulated_ring(chunks), *(wrong for wrong, _ in ch02.wrong_rings(chunks))]
    texts = [str([steps.tolist() for steps in history]) for history in histories]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("t", [2, 3, 4])
def test_the_simulated_ring_is_the_one_that_the_chapter_draws(t):
    from tpcode.figures.collectives import ring_steps

    chunks = ch02._chunks(t)
    drawn = ring_steps([[chunk[0].item() for chunk in of_rank] for of_rank in chunks])[1:]
    for rank, history in enumerate(ch02.simulated_ring(chunks)):
        assert history[:, :, 0].tolist() == [[held.value for held in step.held[rank]] for step in drawn]


# ---- 2.4 ------------------------------------------------------------------------------------------------------------


def script_a(loss):
    if dist.get_rank() == 0:
        loss = all_reduce(loss) / dist.get_world_size()
        print(f"mean loss {loss:g}")
    return loss


def script_b(gradients):
    return {name: all_reduce(part) for name, part in gradients.items()}


def mended_a(loss):
    loss = all_reduce(loss) / dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"mean loss {loss:g}")
    return loss


def mended_b(gradients):
    return {name: all_reduce(gradients[name]) for name in sorted(gradients)}


def average_as_a_float(loss):
    return all_reduce(loss, "avg").item()


def from_rank_0_to_all(loss):
    dist.reduce(loss, dst=0)
    return broadcast(loss / dist.get_world_size(), src=0).reshape(1)


def in_one_row(gradients):
    names = "kqv"
    total = all_reduce(torch.cat([gradients[name] for name in names]))
    return dict(zip(names, total.split(2)))


def in_rank_0s_order(gradients):
    names = [list(gradients)]
    dist.broadcast_object_list(names, src=0)
    return {name: all_reduce(gradients[name]) for name in names[0]}


@pytest.mark.parametrize(
    "a, b", [(mended_a, mended_b), (average_as_a_float, in_one_row), (from_rank_0_to_all, in_rank_0s_order)]
)
def test_mended_scripts_pass_and_print_nothing_of_their_own(a, b, capsys):
    check("2.4", "waits", " Garbage", a, b)
    assert capsys.readouterr().out == "2.4 right: both end, and are right and equal on all ranks.\n"


@pytest.mark.parametrize(
    "a, b, said",
    [
        ("right", "garbage", 'script A, as it was given, does something else than "right".\nRank 0 calls all_reduce.'),
        ("garbage", "garbage", "who besides rank 0 comes to the meeting?"),
        ("waits", "right", "Write down what the first call adds up"),
        ("waits", "waits", "Every rank makes three calls, and all are alike"),
        ("hangs", "garbage", 'prediction_a should be "right", "waits" or "garbage"; it is \'hangs\'.'),
        ("waits", 2, 'prediction_b should be "right", "waits" or "garbage"; it is 2.'),
        (None, "garbage", "2.4 is not filled in yet: replace None in prediction_a"),
    ],
)
def test_wrong_predictions_hear_why(a, b, said):
    refused(said, "2.4", a, b, mended_a, mended_b)


def call_gone(loss):
    return loss


def sum_of_losses(loss):
    return all_reduce(loss)


def rank_0s_loss(loss):
    return broadcast(loss, src=0)


def mean_on_rank_0(loss):
    total = all_reduce(loss)
    return total / dist.get_world_size() if dist.get_rank() == 0 else loss


def reduced_to_rank_0(loss):
    dist.reduce(loss.clone(), dst=0)
    total = loss.clone()
    dist.reduce(total, dst=0)
    return total if dist.get_rank() == 0 else loss


def divided_on_rank_0(loss):
    loss = all_reduce(loss)
    if dist.get_rank() == 0:
        loss = loss / dist.get_world_size()
    return loss


def divided_alone(loss):
    return loss / dist.get_world_size()


def returned_on_rank_0(loss):
    loss = all_reduce(loss) / dist.get_world_size()
    return loss if dist.get_rank() == 0 else None


def with_a_barrier(loss):
    dist.barrier()
    if dist.get_rank() == 0:
        loss = all_reduce(loss) / dist.get_world_size()
    return loss


@pytest.mark.parametrize(
    "a, said",
    [
        (script_a, "A call inside a condition on the rank is made by some ranks only."),
        (with_a_barrier, "A call inside a condition on the rank is made by some ranks only."),
        (call_gone, "Each rank returns its own loss: nobody asked the others."),
        (sum_of_losses, "That is the sum. The mean is the sum over t = 2."),
        (rank_0s_loss, "Every rank has rank 0's loss."),
        (mean_on_rank_0, "Only rank 0 has the mean."),
        (reduced_to_rank_0, "Only rank 0 has the mean."),
        (divided_on_rank_0, "Rank 0 divides by t, and the other ranks do not."),
        (divided_alone, "Each rank's own loss was divided by t"),
        (returned_on_rank_0, "returned None on rank 1. Is there a return?"),
    ],
)
def test_wrong_mendings_of_script_a_hear_why(a, said):
    refused(said, "2.4", "waits", "garbage", a, mended_b)


def own_parts(gradients):
    return gradients


def mean_of_parts(gradients):
    return {name: all_reduce(gradients[name], "avg") for name in sorted(gradients)}


def rank_0s_parts(gradients):
    return {name: broadcast(gradients[name], src=0) for name in sorted(gradients)}


def by_size(gradients):
    """Sorted by value, which differs between ranks as well: on even ranks upward, on odd ones downward."""
    sign = 1 - 2 * (dist.get_rank() % 2)
    order = sorted(gradients, key=lambda name: sign * gradients[name][0])
    return {name: all_reduce(gradients[name]) for name in order}


def only_two(gradients):
    return {name: all_reduce(gradients[name]) for name in "qk"}


def added_up(gradients):
    return sum(all_reduce(gradients[name]) for name in "qkv")


def first_come_on_rank_0(gradients):
    return {name: all_reduce(gradients[name]) for name in list(gradients)[: 3 - dist.get_rank() % 2]}


@pytest.mark.parametrize(
    "b, said",
    [
        (script_b, "The first call still adds up different names"),
        (own_parts, "Each rank has its own part: nothing was added."),
        (mean_of_parts, "That is the mean; the sum is 2 times as much."),
        (rank_0s_parts, "Every rank has rank 0's part."),
        (by_size, "It adds up q of rank 0, v of rank 1"),
        (only_two, "should return a dict with the names q, k and v; on rank 0 it has ['k', 'q']"),
        (added_up, "should return a dict with the names q, k and v; on rank 0 it has Tensor"),
        (first_come_on_rank_0, "Every rank has the same three names: go through them in one order."),
    ],
)
def test_wrong_mendings_of_script_b_hear_why(b, said):
    refused(said, "2.4", "waits", "garbage", mended_a, b)


def test_what_is_predicted_is_what_plain_torch_does(pool2):
    """Script B: equal calls on all ranks, so nobody is stopped, and wrong sums."""
    parts = [
        {"q": torch.tensor([1.0]), "k": torch.tensor([2.0])},
        {"k": torch.tensor([20.0]), "q": torch.tensor([10.0])},
    ]

    def run(parts):
        return script_b(parts[dist.get_rank()])

    assert pool2.run(run, parts) == [{"q": 21.0, "k": 12.0}, {"k": 21.0, "q": 12.0}]


# ---- 2.5 ------------------------------------------------------------------------------------------------------------


def padded(x):
    r, t = where()
    each = -(-len(x) // t)
    chunks = list(torch.cat([x, x.new_zeros(t * each - len(x))]).split(each))
    for step in range(t - 1):
        own = (r - step - 1) % t
        chunks[own] = chunks[own] + pass_on(chunks[(r - step) % t])
    for step in range(t - 1):
        chunks[(r - step) % t] = pass_on(chunks[(r + 1 - step) % t])
    return torch.cat(chunks)[: len(x)]


def pass_on_as(chunk, like):
    r, t = where()
    arrived = torch.empty_like(like)
    sending = dist.isend(chunk.contiguous(), (r + 1) % t)
    dist.recv(arrived, (r - 1) % t)
    sending.wait()
    return arrived


def uneven(x):
    r, t = where()
    chunks = [chunk.clone() for chunk in x.tensor_split(t)]
    for step in range(t - 1):
        own = (r - step - 1) % t
        chunks[own] += pass_on_as(chunks[(r - step) % t], chunks[own])
    for step in range(t - 1):
        keep = (r - step) % t
        chunks[keep] = pass_on_as(chunks[(r + 1 - step) % t], chunks[keep])
    return torch.cat(chunks)


def to_the_owners(x):
    """Not a ring: every rank sends each owner its part, adds what it gets, and sends the sum to all. The same wire."""
    r, t = where()
    chunks = [chunk.clone() for chunk in x.tensor_split(t)]
    for half in range(2):
        sending = [dist.isend(chunks[r if half else p].clone(), p) for p in range(t) if p != r]
        for p in range(t):
            if p != r:
                arrived = torch.empty_like(chunks[p if half else r])
                dist.recv(arrived, p)
                if half:
                    chunks[p] = arrived
                else:
                    chunks[r] = chunks[r] + arrived
        for work in sending:
            work.wait()
    return torch.cat(chunks)


@pytest.mark.parametrize("answer", [padded, uneven, to_the_owners])
def test_rings_of_any_length_pass(answer, capsys):
    check("2.5", answer)
    assert capsys.readouterr().out.startswith("2.5 right")


def unwritten(x): ...


def own_numbers(x):
    return x


def rest_left_alone(x):
    r, t = where()
    whole = len(x) // t * t
    return torch.cat([padded(x[:whole]), x[whole:]]) if whole else padded(x)


def rest_lost(x):
    t = where()[1]
    return padded(x[: len(x) // t * t])


def padding_kept(x):
    t = where()[1]
    each = -(-len(x) // t)
    return padded(torch.cat([x, x.new_zeros(t * each - len(x))]))


def whole_payload_round(x):
    t = where()[1]
    total, moving = x, x
    for _ in range(t - 1):
        moving = pass_on(moving)
        total = total + moving
    return total


def star(x):
    r, t = where()
    if r == 0:
        total = x.clone()
        for p in range(1, t):
            arrived = torch.empty_like(x)
            dist.recv(arrived, p)
            total += arrived
        for p in range(1, t):
            dist.send(total, p)
        return total
    dist.send(x, 0)
    total = torch.empty_like(x)
    dist.recv(total, 0)
    return total


def a_collective(x):
    return all_reduce(x)


def sizes_as_they_leave(x):
    """Chunks of different lengths, received into a tensor like the one that was sent."""
    r, t = where()
    chunks = list(x.tensor_split(t))
    for step in range(t - 1):
        own = (r - step - 1) % t
        chunks[own] = chunks[own] + pass_on(chunks[(r - step) % t])
    return torch.cat(chunks)


def chunks_that_are_too_few(x):
    r, t = where()
    chunks = [chunk.clone() for chunk in x.chunk(t)]
    for step in range(t - 1):
        own = (r - step - 1) % t
        chunks[own] += pass_on_as(chunks[(r - step) % t], chunks[own])
    for step in range(t - 1):
        keep = (r - step) % t
        chunks[keep] = pass_on_as(chunks[(r + 1 - step) % t], chunks[keep])
    return torch.cat(chunks)


def added_all_the_way(x):
    """Every rank's finished sum goes round once more and is added: t times the sum."""
    return where()[1] * padded(x)


def in_rows(x):
    return padded(x).reshape(1, -1)


def a_list(x):
    return padded(x).tolist()


@pytest.mark.parametrize(
    "answer, said",
    [
        (unwritten, "2.5 is not filled in yet: replace ... in unwritten."),
        (
            own_numbers,
            "with 7 elements on 3 ranks, element 0 is 1 on rank 0 and should be 10101.\nThose are the rank's",
        ),
        (rest_left_alone, "The last 1 of 7 are wrong: 7 does not divide by 3"),
        (rest_lost, "The last 1 of 7 are lost"),
        (padding_kept, "The padding is still there"),
        (whole_payload_round, "rank 0 sends 14 elements. 2(t-1)/t of 7 is 9.3, and one chunk, 3, more or less is let"),
        (whole_payload_round, "Its messages are the whole payload, 7 elements each."),
        (star, "one of them adds for all"),
        (a_collective, "rank 0 calls all_reduce SUM int64 [7]. Do it with messages"),
        (sizes_as_they_leave, "chunks that are not equally long arrive with other sizes than they leave"),
        (chunks_that_are_too_few, "x.chunk(3) makes fewer of 4 elements; x.tensor_split(3) does not."),
        (added_all_the_way, "It is 3 times the sum"),
        (in_rows, "not one after the other in one row"),
        (a_list, "should return a tensor"),
    ],
)
def test_wrong_rings_of_any_length_hear_why(answer, said):
    refused(said, "2.5", answer)
