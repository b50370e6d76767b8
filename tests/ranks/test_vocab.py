"""The split vocabulary equals the dense one: rows, logits, loss and gradients; what it sends, keeps and refuses.

The dense table is cut here by hand, zeros added where t does not divide V, apart from the package's placements.
"""

import copy
import functools
import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from tpcode.comm import record
from tpcode.layers import (
    Placement,
    TiedHead,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabPlacement,
    placements,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)
from tpcode.runtime import launch
from tpcode.shapes import padded_vocab

TOLERANCE = 1e-12
B, S, H = 2, 7, 5

LOSSES = {
    "": {},
    ", smoothed": {"label_smoothing": 0.1},
    ", summed": {"reduction": "sum", "label_smoothing": 0.3},
    ", token by token": {"reduction": "none"},
    ", token by token, smoothed": {"reduction": "none", "label_smoothing": 1.0},
}
CASES = {}
for head, (V, multiple), (loss, options) in product(
    ("tied", "untied", "untied, bias"), ((12, 1), (10, 1), (9, 1), (10, 8), (3, 2)), LOSSES.items()
):
    if loss == "" or (V, head) == (10, "tied"):
        name = f"{head}, V={V}{f' in eights of {multiple}' if multiple > 1 else ''}{loss}"
        CASES[name.replace("eights of 8", "eights").replace("eights of 2", "pairs")] = (head, V, multiple, options)


class Dense(nn.Module):
    """Embedding, something in between, head; the head's weight may be the embedding's."""

    def __init__(self, V, head):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.head = nn.Linear(H, V, bias="bias" in head)
        if head == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids).sin()
        x.retain_grad()
        return self.head(x), x


class Split(nn.Module):
    def __init__(self, dense, head, multiple, group):
        super().__init__()
        self.embedding = VocabParallelEmbedding.from_dense(dense.embedding, group, multiple=multiple)
        if head == "tied":
            self.head = TiedHead(self.embedding)
        else:
            self.head = VocabParallelHead.from_dense(dense.head, group, multiple=multiple)

    forward = Dense.forward


def rows_of(whole, rank, t, multiple):
    """Rank's rows, with zeros where there are no words."""
    size = -(-len(whole) // (t * multiple)) * multiple
    filled = torch.cat([whole, whole.new_zeros(t * size - len(whole), *whole.shape[1:])])
    return filled[rank * size : (rank + 1) * size]


def compare_all(members=None):
    group = None
    if members:
        groups = [dist.new_group(ranks) for ranks in members]
        number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
        group = groups[number]
        torch.manual_seed(number)  # each group has a problem of its own
    torch.set_default_dtype(torch.float64)
    return {name: compare(*case, group) for name, case in CASES.items()}


def compare(head, V, multiple, options, group):
    """Largest differences to the dense model by name, on this rank, over two steps of SGD."""
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    dense = Dense(V, head)
    split = Split(copy.deepcopy(dense), head, multiple, group)
    differences = {}
    for step in range(2):
        ids, targets = torch.randint(V, (B, S)), torch.randint(V, (B, S))
        ids.view(-1)[:V] = torch.arange(V)[: B * S]  # each id is looked up, the last one too
        targets[0, 2:4] = -100
        (whole, x_dense), (own, x) = dense(ids), split(ids)
        expected = cross_entropy(whole.mT, targets, **options)
        loss = vocab_parallel_cross_entropy(own, targets, group, vocab_size=V, **options)
        dloss = torch.randn_like(expected)
        expected.backward(dloss)
        loss.backward(dloss)
        differences[f"rows {step}"] = largest(x, x_dense)
        differences[f"loss {step}"] = largest(loss, expected)
        words = rows_of(whole.movedim(-1, 0), rank, t, multiple).movedim(0, -1)
        differences[f"logits {step}"] = largest(own, words)
        differences[f"rows' gradient {step}"] = largest(x.grad, x_dense.grad)
        for name, parameter in split.named_parameters():
            wanted = rows_of(dense.get_parameter(name).grad, rank, t, multiple)
            differences[f"{name}'s gradient {step}"] = largest(parameter.grad, wanted)
        for module in (dense, split):
            sgd(module)
    back = split.embedding.to_dense()
    differences["embedding after two steps"] = largest(back.weight, dense.embedding.weight)
    if head != "tied":
        back = split.head.to_dense()
        differences["head after two steps"] = max(
            largest(back.get_parameter(name), parameter) for name, parameter in dense.head.named_parameters()
        )
    return differences, len(list(split.parameters()))


@torch.no_grad()
def sgd(module):
    for parameter in module.parameters():
        parameter -= 0.1 * parameter.grad
        parameter.grad = None


def largest(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float64
    return (ours - theirs).abs().max().item()


answers = functools.cache(lambda t, members=None: launch(compare_all, t, members))


def assert_equal(by_rank, name, ranks):
    assert len(by_rank) == ranks
    tied = CASES[name][0] == "tied"
    for answer in by_rank:
        differences, parameters = answer[name]
        assert parameters == {"tied": 1, "untied": 2, "untied, bias": 3}[CASES[name][0]]
        assert len(differences) == 2 * (4 + parameters) + (1 if tied else 2)
        assert {what: size for what, size in differences.items() if not size < TOLERANCE} == {}


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_split_vocabulary_equals_dense(name, t):
    """Rules out: label smoothing with the local vocabulary's size and mean; last ids lost where t does not divide V;
    padding in the softmax; ignored targets with a loss, or in the mean. Not vacuous: two targets are ignored, each id
    is looked up, padding's gradient is compared with zeros, and V = 3 leaves ranks with nothing but padding."""
    assert_equal(answers(t), name, t)


@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((2, 0), (3, 1))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_split_vocabulary_equals_dense_in_subgroups(name, members):
    """Rules out: ids or sums by the world's ranks. Not vacuous: the groups' problems differ."""
    assert_equal(answers(4, members), name, 4)


# ---- what is sent and kept ------------------------------------------------------------------------------------------


def what_is_sent(options):
    """The events of embedding, head and loss, and the counts of PyTorch's own counter."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    dense = Dense(12, "untied")
    split = Split(dense, "untied", 1, None)
    ids = torch.randint(12, (B, S))
    with CommDebugMode() as mode:
        with record() as embedding:
            x = split.embedding(ids)
        with record() as head:
            logits = split.head(x)
        with record() as loss:
            value = vocab_parallel_cross_entropy(logits, ids, vocab_size=12, **options)
        with record() as loss_backward:
            (dlogits,) = torch.autograd.grad(value, logits, retain_graph=True)
        with record() as head_backward:
            (dx,) = torch.autograd.grad(logits, x, dlogits, retain_graph=True)
        with record() as embedding_backward:
            torch.autograd.grad(x, split.embedding.weight, dx)
    for ledger in (embedding, head, loss, loss_backward, head_backward, embedding_backward):
        found.append([(event.phase, event.op, event.shape, event.payload_bytes) for event in ledger.events])
    return found, mode.get_total_counts()


@pytest.mark.parametrize(("options", "packed"), [({}, (B, S)), ({"label_smoothing": 0.1}, (2, B, S))], ids=str)
def test_three_small_all_reduces_forward_and_none_backward(options, packed):
    """12 bytes a token in float32 (16 with smoothing), where the gathered logits would be 4V = 48. The loss is silent
    backward, and the head is not: its input's gradient is summed."""
    small, tokens = 4 * B * S, (B, S)
    expected = [
        [("forward", "all_reduce", (B, S, H), H * small)],
        [],
        [
            ("forward", "all_reduce", tokens, small),
            ("forward", "all_reduce", packed, small * (len(packed) - 1)),
            ("forward", "all_reduce", tokens, small),
        ],
        [],
        [("backward", "all_reduce", (B, S, H), H * small)],
        [],
    ]
    assert launch(what_is_sent, 2, options) == [(expected, 5)] * 2


def kept(dtype):
    """What the loss keeps for backward: whether it is the caller's logits, shape, dtype; and the logits afterwards."""
    torch.manual_seed(0)
    logits = torch.randn(B, S, 6).to(dtype).requires_grad_()
    before, saved = logits.detach().clone(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = vocab_parallel_cross_entropy(logits, torch.randint(11, (B, S)), vocab_size=11, reduction="sum")
    loss.backward()
    same = [x.data_ptr() == logits.data_ptr() for x in saved if x.dim() == 3]
    largest = max(x.numel() for x in saved if x.dim() < 3)
    return same, largest, torch.equal(logits, before), str(loss.dtype), str(logits.grad.dtype)


@pytest.mark.parametrize(
    ("dtype", "inside"), [(torch.bfloat16, "float32"), (torch.float32, "float32"), (torch.float64, "float64")]
)
def test_the_callers_logits_are_kept_and_left_alone(dtype, inside):
    """Rules out: logits that the loss has changed, or copied to keep them; a loss in half precision."""
    own = str(dtype)
    assert launch(kept, 2, dtype) == [([True], B * S, True, f"torch.{inside}", own)] * 2


def half_precision():
    """Of bfloat16 logits: the largest difference of loss and gradient to those of float32 ones with the same values."""
    torch.manual_seed(0)
    logits, targets = (20 * torch.randn(B, S, 6)).bfloat16(), torch.randint(12, (B, S))
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = logits.detach().to(dtype).requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, targets)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    (half_loss, half_grad), (loss, grad) = found
    return (half_loss - loss).abs().item(), (half_grad - grad).abs().max().item()


def test_half_precision_logits_are_summed_in_float32():
    """The loss is that of float32 logits with the same values, exactly; the gradient is rounded once, at the end."""
    for loss, grad in launch(half_precision, 2):
        assert loss == 0 and grad <= 2**-8 / (B * S)  # a bfloat16 has 8 bits


# ---- faults that are ruled out, by name -----------------------------------------------------------------------------


def with_padding(vocab_size):
    """The loss of uniform logits, the largest gradient of padding (where it is, on the last rank), the loss of negative
    logits and the likeliest words."""
    rank, t = dist.get_rank(), dist.get_world_size()
    shard = slice(3 * rank, 3 * rank + 3)
    targets = torch.tensor([9, 0])
    uniform = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    loss = vocab_parallel_cross_entropy(uniform, targets, vocab_size=vocab_size)
    loss.backward()
    padding = uniform.grad[:, 1:].abs().max().item() if rank == t - 1 else None
    whole = torch.cat([-1 - torch.arange(10.0).double(), torch.zeros(2).double()]).expand(2, 12)
    negative = vocab_parallel_cross_entropy(whole[:, shard], targets, vocab_size=vocab_size).item()
    return loss.item(), padding, negative, vocab_parallel_argmax(whole[:, shard], vocab_size=vocab_size).tolist()


def test_padding_is_not_a_word():
    """Rules out: padded rows in the softmax, or as the likeliest word. V = 10 on 4 ranks, two logits of padding at 0,
    all others below. Not vacuous: if padding counted, the loss of uniform logits would be ln 12 and not ln 10, and the
    padding would be the likeliest."""
    targets = torch.tensor([9, 0])
    words = (-1 - torch.arange(10.0).double()).expand(2, 10)
    for uniform, padding, negative, likeliest in launch(with_padding, 4, 10):
        assert abs(uniform - math.log(10)) < TOLERANCE and padding in (None, 0)
        assert abs(negative - cross_entropy(words, targets)) < TOLERANCE
        assert likeliest == [0, 0]
    for uniform, padding, negative, likeliest in launch(with_padding, 4, 12):
        assert abs(uniform - math.log(12)) < TOLERANCE and padding in (None, pytest.approx(1 / 24))
        assert negative - cross_entropy(words, targets) > 0.5
        assert likeliest == [10, 10]


def ignored():
    """Loss and gradient with every target ignored, and the mean with one of four left."""
    torch.manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for targets in ([-100] * 4, [-100, 5, -100, -100]):
        loss = vocab_parallel_cross_entropy(logits, torch.tensor(targets), label_smoothing=0.1)
        (grad,) = torch.autograd.grad(loss, logits)
        found.append((loss.item(), grad))
    return [loss for loss, _ in found], [grad.abs().sum(-1).tolist() for _, grad in found], logits.detach()


def test_ignored_targets_have_no_loss_no_gradient_and_no_part_in_the_mean():
    """Rules out: a loss and a gradient for target -100, a mean over all tokens, and nan where all are ignored."""
    by_rank = launch(ignored, 2)
    whole = torch.cat([logits for *_, logits in by_rank], -1)
    wanted = cross_entropy(whole[1:2], torch.tensor([5]), label_smoothing=0.1)
    for losses, grads, _ in by_rank:
        assert losses[0] == 0 and grads[0] == [0, 0, 0, 0]
        assert abs(losses[1] - wanted) < TOLERANCE
        assert grads[1][0] == grads[1][2] == grads[1][3] == 0 and grads[1][1] > 0.01


def own_mean():
    """Smoothed losses as the package has them, and with the local vocabulary's size and mean."""
    torch.manual_seed(0)
    whole, targets = torch.randn(5, 12, dtype=torch.float64), torch.randint(12, (5,))
    own = whole.chunk(2, -1)[dist.get_rank()]
    wrong = 0.9 * cross_entropy(whole, targets) - 0.1 * own.log_softmax(-1).mean()
    wanted = cross_entropy(whole, targets, label_smoothing=0.1)
    return (vocab_parallel_cross_entropy(own, targets, label_smoothing=0.1) - wanted).item(), (wrong - wanted).item()


def test_label_smoothing_is_over_the_whole_vocabulary():
    """Rules out: the local vocabulary's size and mean. Not vacuous: those are off, and differ from rank to rank."""
    (right, wrong), (other, other_wrong) = launch(own_mean, 2)
    assert abs(right) < TOLERANCE and right == other
    assert abs(wrong) > 0.01 and abs(wrong - other_wrong) > 1e-3


def tied_together():
    """Whether the head's weight is the embedding's Parameter: as made, after loading both ways, a step, a copy, a move
    to float64; and the gradient over the sum of both uses."""
    torch.manual_seed(0)
    dense = Dense(10, "tied")
    split = Split(dense, "tied", 1, None)
    found = [split.head.weight is split.embedding.weight]
    state = {name: torch.randn_like(tensor) for name, tensor in split.state_dict().items()}
    for assign in (False, True):
        split.load_state_dict(state, assign=assign)
        found.append(split.head.weight is split.embedding.weight)
        found.append(torch.equal(split.head.weight, state["embedding.weight"]))
    split = copy.deepcopy(split).double()
    ids = torch.randint(10, (B, S))
    logits, _ = split(ids)
    vocab_parallel_cross_entropy(logits, ids, vocab_size=10).backward()
    sgd(split)
    found.append(split.head.weight is split.embedding.weight)
    return found, list(state), [name for name, _ in split.named_parameters()], list(placements(split))


@pytest.mark.parametrize("t", [1, 4])
def test_tied_weights_are_one_parameter(t):
    """Rules out: tied weights that come apart on sharding, loading, copying or a step. Loading with assign=True makes
    a new Parameter of each entry: where both modules had one, they would part. (That the gradient is the sum of both
    uses is in the table.)"""
    name = ["embedding.weight"]
    assert launch(tied_together, t) == [([True] * 6, name, name, name)] * t


def merged(t_multiple):
    dense = nn.Embedding(10, H)
    dense.weight.data = torch.arange(10.0 * H).reshape(10, H)
    split = VocabParallelEmbedding.from_dense(dense, multiple=t_multiple)
    back, rank = split.to_dense(), dist.get_rank()
    out = split(torch.arange(10))
    return len(split.weight), torch.equal(back.weight, dense.weight), torch.equal(out, dense.weight), rank


@pytest.mark.parametrize(("t", "multiple", "size"), [(1, 1, 10), (2, 1, 5), (4, 1, 3), (4, 8, 8), (2, 128, 128)])
def test_a_vocabulary_that_does_not_divide_loses_no_id_and_keeps_no_padding(t, multiple, size):
    """Rules out: last ids lost, or padding left in a checkpoint. The merged table has V rows, whatever t was."""
    assert launch(merged, t, multiple) == [(size, True, True, rank) for rank in range(t)]


def test_padding_changes_with_t_and_is_never_part_of_the_whole():
    """50,257 rows become 50,304 to 51,200, by t. Shard, merge, shard for another t: the same whole."""
    placement = VocabPlacement.of(50_257, 128)
    assert [t * placement.shard_size(t) for t in (1, 2, 4, 8)] == [padded_vocab(50_257, t) for t in (1, 2, 4, 8)]
    table = torch.arange(50_257.0).unsqueeze(-1)
    for t in (2, 4, 8):
        shards = [placement.shard(table, rank, t) for rank in range(t)]
        assert not shards[-1][50_257 - t * len(shards[-1]) :].any()
        table = placement.merge(shards)
        assert torch.equal(table, torch.arange(50_257.0).unsqueeze(-1))
    assert VocabPlacement.of(10, 1) != VocabPlacement.of(10, 8)
    assert isinstance(placement, Placement) and placement.true_size == 50_257


def negative_ids():
    """Each id's row from a table of its own number, on this rank before and after the sum."""
    dense = nn.Embedding(8, 1)
    dense.weight.data = torch.arange(8.0).unsqueeze(-1)
    split = VocabParallelEmbedding.from_dense(dense)
    return split(torch.arange(8)).flatten().tolist(), split.weight.flatten().tolist()


def test_an_id_of_another_rank_does_not_wrap_around():
    """Rules out: id - first, which is negative on later ranks, read from the end of the table."""
    expected = [float(i) for i in range(8)]
    assert launch(negative_ids, 4) == [(expected, expected[2 * rank : 2 * rank + 2]) for rank in range(4)]


def extreme():
    """The loss where one rank's logits are far above another's, and where a word is excluded by -inf."""
    rank = dist.get_rank()
    far = torch.tensor([[1000.0, 0.0], [-1000.0, 998.0]])[rank].unsqueeze(0)
    excluded = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])[rank].unsqueeze(0).requires_grad_()
    loss = vocab_parallel_cross_entropy(excluded, torch.tensor([3]))
    loss.backward()
    finite = vocab_parallel_cross_entropy(far, torch.tensor([3])).item()
    return finite, loss.item(), excluded.grad.isfinite().all().item()


def test_the_largest_logit_is_taken_over_all_ranks():
    """Rules out: each rank's own maximum, with which the sums do not fit together. e¹⁰⁰⁰ is infinite."""
    for far, excluded, finite in launch(extreme, 2):
        assert far == pytest.approx(2.126928)  # 2 + ln(1 + e⁻²)
        assert excluded == pytest.approx(1.0986123) and finite  # ln 3


def likeliest():
    torch.manual_seed(0)
    whole = torch.randn(B, S, 12)
    whole[0, 0, [3, 9]] = 5.0  # a tie, on two ranks
    own = whole.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    with record() as ledger:
        found = vocab_parallel_argmax(own.requires_grad_())
    return torch.equal(found, whole.argmax(-1)), found[0, 0].item(), ledger.count("all_reduce")


@pytest.mark.parametrize(("t", "sent"), [(1, 0), (4, 2)])
def test_every_rank_finds_the_same_likeliest_word(t, sent):
    assert launch(likeliest, t) == [(True, 3, sent)] * t


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusals():
    """What each wrong call raised, on this rank, and how many collectives there were."""
    t = dist.get_world_size()
    split = VocabParallelEmbedding.from_dense(nn.Embedding(10, H))
    head = VocabParallelHead.from_dense(nn.Linear(H, 10))
    logits, targets = torch.randn(2, 12 // t), torch.tensor([0, 9])
    loss = vocab_parallel_cross_entropy
    calls = [
        lambda: split(torch.tensor([3, 10])),
        lambda: split(torch.tensor([-1, 3])),
        lambda: split(torch.tensor([1.0])),
        lambda: split([1, 2]),
        lambda: loss(logits, torch.tensor([0, 10]), vocab_size=10),
        lambda: loss(logits, torch.tensor([-1, -100]), vocab_size=10),
        lambda: loss(logits, targets.float(), vocab_size=10),
        lambda: loss(logits, targets[:1], vocab_size=10),
        lambda: loss(logits, targets, vocab_size=13),
        lambda: loss(logits.long(), targets),
        lambda: loss(logits, targets, reduction="average"),
        lambda: loss(logits, targets, label_smoothing=1.5),
        lambda: head(torch.randn(2, H + 1)),
        lambda: TiedHead(split)(torch.randn(2, H + 1)),
        lambda: TiedHead(nn.Embedding(10, H)),
        lambda: VocabParallelEmbedding.from_dense(nn.Linear(H, 10)),
        lambda: VocabParallelEmbedding.from_dense(nn.Embedding(10, H, padding_idx=0)),
        lambda: VocabParallelEmbedding.from_dense(nn.Embedding(10, H), multiple=0),
        lambda: VocabParallelHead.from_dense(nn.Embedding(10, H)),
        lambda: VocabParallelEmbedding(torch.zeros(4, H), placement=VocabPlacement.of(100, 1)),
    ]
    raised = []
    with record() as ledger:
        for call in calls:
            try:
                call()
                raised.append("nothing")
            except (TypeError, ValueError) as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised, ledger.count()


@pytest.mark.parametrize("t", [1, 2, 4])
def test_bad_input_is_refused_alike_at_every_t_before_anything_is_sent(t):
    loss = "ValueError: vocab_parallel_cross_entropy: targets must be from 0 to 9, and these go from"
    table = "ValueError: VocabParallelEmbedding: ids must be from 0 to 9, and these go from"
    width = 12 // t
    expected = [
        f"{table} 3 to 10",
        f"{table} -1 to 3",
        "TypeError: VocabParallelEmbedding: ids must be integers and are torch.float32; convert them with .long()",
        "TypeError: VocabParallelEmbedding: ids must be a tensor and not a list",
        f"{loss} 0 to 10",
        f"{loss} -1 to -1",
        "TypeError: vocab_parallel_cross_entropy: targets must be integers and are torch.float32; "
        "convert them with .long()",
        f"ValueError: targets [1] do not fit logits [2, {width}]: one target for each token, [2]",
        f"ValueError: {t} ranks with {width} logits each have 12 in all, and vocab_size is 13",
        "TypeError: logits must be a tensor of floats and are torch.int64",
        "ValueError: reduction must be one of mean, sum, none and is 'average'",
        "ValueError: label_smoothing must be from 0 to 1 and is 1.5",
        "ValueError: VocabParallelHead: the last dimension must be 5 and is 6 (shape [2, 6])",
        "ValueError: TiedHead: the last dimension must be 5 and is 6 (shape [2, 6])",
        "TypeError: TiedHead takes a VocabParallelEmbedding, and this is a Embedding",
        "TypeError: VocabParallelEmbedding.from_dense takes a torch.nn.Embedding, and this is a Linear",
        "ValueError: VocabParallelEmbedding has no padding_idx, and the dense embedding has padding_idx=0",
        "ValueError: multiple must be at least 1 and is 0",
        "TypeError: VocabParallelHead.from_dense takes a torch.nn.Linear, and this is Embedding",
        f"ValueError: VocabParallelEmbedding: a rank of t = {t} holds [{-(-100 // t)}, h] of the table, and this "
        "weight is [4, 5]; from_dense cuts a whole one",
    ]
    for raised, events in launch(refusals, t):
        assert raised == expected
        assert events == 0
