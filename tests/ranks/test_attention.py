"""Attention by heads equals the dense one, at every t and with replicated KV heads; what it sends; what it refuses.

Rows of the dense weights are picked here by head, one list for each rank, apart from the package's placements. Weights,
inputs and the gradient that comes back are random, hence distinct in every entry.
"""

import copy
import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode.comm import record
from tpcode.dense import FFN, Attention, GPT2Attention, KVCache
from tpcode.layers import ColumnParallelLinear, ParallelAttention, ParallelFFN, RowParallelLinear
from tpcode.layers.attention import qkv_placement
from tpcode.layers.replicas import replica_group
from tpcode.runtime import launch
from tpcode.shapes import head_groups

TOLERANCE = 1e-12
B, S, H, D = 2, 5, 7, 4  # h is no multiple of the heads, nor of t

HEADS = {  # query heads, KV heads, and the t at which they split
    "multi-head": (4, 4, (1, 2, 4)),
    "grouped": (8, 4, (1, 2, 4)),
    "grouped, 2 KV heads": (8, 2, (1, 2, 4)),
    "multi-query": (4, 1, (1, 2, 4)),
    "grouped, 3 KV heads": (9, 3, (1, 3)),
    "multi-query, 3 heads": (3, 1, (1, 3)),
}
ROPE = {"rope_theta": 10_000.0}
EXTRAS = {
    "": {},
    ", rope": ROPE,
    ", QK-norm per head": {"qk_norm": "head", **ROPE},
    ", QK-norm over all heads": {"qk_norm": "all"},
}
CASES = {}
for (name, (heads, kv_heads, _)), bias, core in product(HEADS.items(), (False, True), ("sdpa", "explicit")):
    for extra, options in EXTRAS.items():
        if extra in ("", ", rope") or (bias, core) == (True, "sdpa"):
            key = f"{name}{extra}{', bias' if bias else ''}, {core}"
            CASES[key] = (name, (heads, kv_heads), {"bias": bias, "core": core, **options})
for bias, core in product((False, True), ("sdpa", "explicit")):
    CASES[f"gpt2{', bias' if bias else ''}, {core}"] = ("multi-head", (4, 4), {"bias": bias, "core": core, "h": 16})


def make(heads, kv_heads, options):
    if "h" in options:  # GPT-2's own has Q, K and V in one matrix, and d = h / a
        return GPT2Attention(heads=heads, **options)
    dense = Attention(H, heads, kv_heads, head_dim=D, **options)
    for name, parameter in dense.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0)  # distinct in every entry, as the others are
    return dense


def own_rows(whole, heads):
    """The rows of these heads."""
    return torch.cat([whole[head * D : (head + 1) * D] for head in heads])


def own(tensors, heads, kv_heads, rank, t):
    """What a rank holds of dense tensors (weights, or their gradients), under the split layer's names."""
    tensors = _in_llamas_names(dict(tensors))
    queries = list(range(rank * heads // t, (rank + 1) * heads // t))
    reads = [head // (heads // kv_heads) for head in queries]
    shares = {"o_proj.weight": own_rows(tensors["o_proj.weight"].T, queries).T}
    if "o_proj.bias" in tensors:
        shares["o_proj.bias"] = tensors["o_proj.bias"]
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in tensors:
            rows = []
            for group in sorted(set(reads)):
                rows.append(own_rows(tensors[f"q_proj.{kind}"], [q for q, g in zip(queries, reads) if g == group]))
                rows += [own_rows(tensors[f"{part}_proj.{kind}"], [group]) for part in "kv"]
            shares[f"qkv.{kind}"] = torch.cat(rows)
    for part, mine in (("q", queries), ("k", sorted(set(reads)))):
        if f"{part}_norm.weight" in tensors:
            whole = tensors[f"{part}_norm.weight"]
            shares[f"{part}_norm.weight"] = whole if len(whole) == D else own_rows(whole, mine)
    return shares


def _in_llamas_names(tensors):
    for kind in ("weight", "bias"):
        if f"c_attn.{kind}" in tensors:
            thirds = tensors.pop(f"c_attn.{kind}").chunk(3)
            tensors |= {f"{part}_proj.{kind}": third for part, third in zip("qkv", thirds)}
            tensors[f"o_proj.{kind}"] = tensors.pop(f"c_proj.{kind}")
    return tensors


def compare_all(names, members=None):
    """`compare` for these cases, and the number of parameters of each."""
    group = None
    if members:
        groups = [dist.new_group(ranks) for ranks in members]
        number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
        group = groups[number]
        torch.manual_seed(number)  # each group has a problem of its own
    torch.set_default_dtype(torch.float64)
    return {name: compare(*CASES[name][1:], group) for name in names}


def compare(heads, options, group):
    """Largest differences to the dense layer, by name, on this rank, over two steps of SGD."""
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    dense = make(*heads, options)
    split = ParallelAttention.from_dense(copy.deepcopy(dense), group)
    differences = {}
    for step in range(2):
        x = torch.randn(B, S, options.get("h", H))
        xs = [x.clone().requires_grad_() for _ in range(2)]
        y_dense, y = dense(xs[0]), split(xs[1])
        dy = torch.randn_like(y_dense)
        y_dense.backward(dy)
        y.backward(dy)
        differences[f"output {step}"] = largest(y, y_dense)
        differences[f"input's gradient {step}"] = largest(xs[1].grad, xs[0].grad)
        shares = own({name: p.grad for name, p in dense.named_parameters()}, *heads, rank, t)
        assert shares.keys() == dict(split.named_parameters()).keys()
        for name, parameter in split.named_parameters():
            differences[f"{name}'s gradient {step}"] = largest(parameter.grad, shares[name])
        for module in (dense, split):
            sgd(module)
    shares = own(dict(dense.named_parameters()), *heads, rank, t)
    for name, parameter in split.named_parameters():
        differences[f"{name} after two steps"] = largest(parameter, shares[name])
    back = split.to_dense()
    assert str(back) == str(dense)
    for (name, whole), (other, stepped) in zip(back.named_parameters(), dense.named_parameters(), strict=True):
        assert name == other
        differences[f"{name} after two steps, merged"] = largest(whole, stepped)
    return differences, len(list(dense.parameters())), len(list(split.parameters()))


@torch.no_grad()
def sgd(module):
    for parameter in module.parameters():
        parameter -= 0.1 * parameter.grad
        parameter.grad = None


def largest(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == torch.float64
    return (ours - theirs).abs().max().item()


def cases_at(t):
    return tuple(name for name, (kind, *_) in CASES.items() if t in HEADS[kind][2])


answers = functools.cache(lambda t, members=None: launch(compare_all, t, cases_at(2 if members else t), members))


def assert_equal(by_rank, name, ranks):
    assert len(by_rank) == ranks
    for answer in by_rank:
        differences, dense_parameters, split_parameters = answer[name]
        assert len(differences) == 2 * (2 + split_parameters) + split_parameters + dense_parameters
        assert {what: size for what, size in differences.items() if not size < TOLERANCE} == {}


@pytest.mark.parametrize(("name", "t"), [(name, t) for t in (1, 2, 3, 4) for name in cases_at(t)])
def test_heads_on_ranks_equal_dense(name, t):
    """Not vacuous: the number of comparisons is counted, and a difference of any entry by 1e-12 fails. It rules out K
    and V weights that learn from the local queries alone where a KV head is on several ranks."""
    assert_equal(answers(t), name, t)


@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((2, 0), (3, 1))], ids=str)
@pytest.mark.parametrize("name", cases_at(2))
def test_heads_on_subgroups_equal_dense(name, members):
    """Rules out: heads, collectives or replicas by the world's ranks; groups of replicas that their members alone
    make, which would hang. Not vacuous: the groups' problems differ, and multi-query heads have replicas in each."""
    assert_equal(answers(4, members), name, 4)


# ---- what is sent ---------------------------------------------------------------------------------------------------

SENDERS = {
    "heads": (4, 4, {"bias": True}),
    "replicas": (4, 1, {}),
    "replicas, bias": (4, 1, {"bias": True}),
    "norm per head": (4, 4, {"qk_norm": "head"}),
    "norm over all heads": (4, 4, {"qk_norm": "all"}),
    "norm over all heads, replicas": (4, 2, {"qk_norm": "all"}),
}


def what_is_sent():
    """Each kind's events, and how many PyTorch's own counter saw, forward and in all."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    for name, (heads, kv_heads, options) in SENDERS.items():
        split = ParallelAttention.from_dense(Attention(H, heads, kv_heads, head_dim=D, **options))
        x = torch.randn(B, S, H, requires_grad=True)
        with record() as ledger, CommDebugMode() as mode:
            y = split(x)
            forward = mode.get_total_counts()
            y.square().sum().backward()
        events = sorted((event.phase, event.op, event.shape, event.group) for event in ledger.events)
        found[name] = events, (forward, mode.get_total_counts())
    return found


@pytest.mark.parametrize("t", [2, 4])
def test_one_all_reduce_each_way_and_no_more(t):
    """Exact collectives by phase, shape and group, and the same count from a witness that is independent of the ledger.
    What replicas and norms add is in the ledger too, and over the ranks that share a head, not over all."""
    for rank, found in enumerate(launch(what_is_sent, t)):
        everyone = tuple(range(t))
        block = [("forward", (B, S, H), everyone), ("backward", (B, S, H), everyone)]
        sharing = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))  # of 2 KV heads at t = 4
        expected = {
            "heads": [],
            "replicas": [("backward", (2 * D, H), everyone)],
            "replicas, bias": [("backward", (2 * D, H), everyone), ("backward", (2 * D,), everyone)],
            "norm per head": 2 * [("backward", (D,), everyone)],
            "norm over all heads": 2 * [("forward", (B, S, 1), everyone), ("backward", (B, S, 1), everyone)],
        }
        replicas = [("backward", (2 * D, H), sharing), ("backward", (D,), sharing)] if t == 4 else []
        expected["norm over all heads, replicas"] = expected["norm over all heads"] + replicas
        assert found.keys() == expected.keys()
        for name, (events, witness) in found.items():
            wanted = sorted((phase, "all_reduce", shape, group) for phase, shape, group in block + expected[name])
            assert events == wanted, name
            assert witness == (sum(phase == "forward" for phase, *_ in wanted), len(wanted)), name


def test_attention_is_the_ffns_column_then_row():
    """The same two classes build both: Q, K and V by columns, the output by rows. (One rank needs no launch.)"""
    split, ffn = ParallelAttention.from_dense(Attention(H, 4, head_dim=D)), ParallelFFN.from_dense(FFN(H, 12))
    assert type(split.qkv) is type(ffn.c_fc) is ColumnParallelLinear
    assert type(split.o_proj) is type(ffn.c_proj) is RowParallelLinear
    assert list(split.placements) == ["qkv.weight", "o_proj.weight"]


def frozen():
    dense = Attention(H, 4, 1, head_dim=D, bias=True, qk_norm="head").requires_grad_(False)
    split = ParallelAttention.from_dense(dense)
    counts = []
    for x in (torch.randn(B, S, H, requires_grad=True), torch.randn(B, S, H)):
        with record() as ledger:
            y = split(x)
            if y.requires_grad:
                y.sum().backward()
        counts.append((ledger.count(phase="forward"), ledger.count(phase="backward")))
    back = split.to_dense()
    return counts, any(parameter.requires_grad for parameter in (*split.parameters(), *back.parameters()))


def test_no_all_reduce_for_a_gradient_that_nobody_wants():
    """Frozen weights, as when only an adapter below is trained: dX alone is summed. Frozen stays frozen."""
    assert launch(frozen, 2) == [([(1, 1), (1, 0)], False)] * 2


def recomputed():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    dense = Attention(H, 4, 1, head_dim=D, qk_norm="all", dtype=torch.float64)
    x, dy = torch.randn(B, S, H, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
    found = []
    for again in (False, True):
        split, leaf = ParallelAttention.from_dense(dense), x.clone().requires_grad_()
        with record() as ledger:
            y = checkpoint(split, leaf, use_reentrant=False) if again else split(leaf)
            y.backward(dy)
        counts = [ledger.count(phase=phase) for phase in ("forward", "recompute", "backward")]
        found.append((counts, [leaf.grad, *(parameter.grad for parameter in split.parameters())]))
    (plain, gradients), (counts, others) = found
    return plain, counts, all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_recomputation_sends_the_forwards_sums_again():
    """One for the block and one for each norm, again; the gradients are the same to the last bit. (PyTorch's
    checkpoint stops the recomputation at the last tensor that backward needs, which is before the block's sum.)"""
    for plain, counts, same in launch(recomputed, 2):
        assert plain == [3, 0, 5]
        assert counts == [3, 2, 5]
        assert same


# ---- faults that are ruled out, by name -----------------------------------------------------------------------------


def kv_weights(summed):
    """Largest differences to dense of dK's rows, dV's rows and dX, with the replicas' sum or without."""
    torch.manual_seed(0)
    dense = Attention(H, 4, 2, head_dim=D, dtype=torch.float64)
    x, dy = torch.randn(B, S, H, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
    split = ParallelAttention.from_dense(copy.deepcopy(dense))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    dense(leaves[0]).backward(dy)
    if not summed:
        import tpcode.layers.attention as module

        module.copy_to_replicas, kept = lambda weight, *args, **kwargs: weight, module.copy_to_replicas
    try:
        split(leaves[1]).backward(dy)
    finally:
        if not summed:
            module.copy_to_replicas = kept
    head = dist.get_rank() // 2
    _, dk, dv = split.qkv.weight.grad.split(D)
    wholes = [own_rows(part.weight.grad, [head]) for part in (dense.k_proj, dense.v_proj)]
    return [largest(dk, wholes[0]), largest(dv, wholes[1]), largest(leaves[1].grad, leaves[0].grad)]


def test_replicated_kv_heads_learn_from_all_their_queries():
    """Rules out: K and V weights trained on the local heads' gradients alone. Not vacuous: without the sum over the
    replicas both are wrong on every rank. dX is right either way, so that the output and the layers below show
    nothing."""
    for differences in launch(kv_weights, 4, True):
        assert max(differences) < TOLERANCE
    for dk, dv, dx in launch(kv_weights, 4, False):
        assert dk > 0.01 and dv > 0.01 and dx < TOLERANCE


def resharded(dense):
    """The layer cut and gathered again, and its output."""
    split = ParallelAttention.from_dense(dense)
    return split.to_dense(), split(positions()).detach()


def cut_as_one_matrix(dense):
    """The output if [q | k | v] were cut in plain chunks."""
    split = ParallelAttention.from_dense(dense)
    fused = torch.cat([part.weight for part in (dense.q_proj, dense.k_proj, dense.v_proj)]).detach()
    split.qkv.weight.data = fused.chunk(dist.get_world_size())[dist.get_rank()]
    return split(positions()).detach()


def positions():
    return torch.linspace(-1, 1, B * S * H, dtype=torch.float64).reshape(B, S, H)


def test_a_fused_qkv_survives_2_ranks_then_4_ranks():
    """Rules out: a fused QKV cut as one matrix, or cut for one t and read at another. Shard for 2, merge, shard for 4
    (where KV heads are replicated), merge: bitwise the original, and equal output at each. Not vacuous: plain chunks
    have the right shape, and a wrong output."""
    torch.manual_seed(0)
    dense = original = Attention(H, 8, 2, head_dim=D, dtype=torch.float64)
    output = original(positions())
    for t in (2, 4):
        answers = launch(resharded, t, dense)
        for _, split_output in answers:
            assert (split_output - output).abs().max() < TOLERANCE
        dense, _ = answers[0]
    for name, parameter in original.named_parameters():
        assert torch.equal(dense.get_parameter(name), parameter)
    for wrong in launch(cut_as_one_matrix, 2, original):
        assert (wrong - output).abs().max() > 0.01


def norm_weights(kv_heads):
    """The heads whose norm weights this rank holds, the dense weights being the head's number."""
    dense = Attention(H, 4, kv_heads, head_dim=D, qk_norm="all")
    dense.q_norm.weight.data = torch.arange(4.0).repeat_interleave(D)
    dense.k_norm.weight.data = torch.arange(float(kv_heads)).repeat_interleave(D)
    split = ParallelAttention.from_dense(dense)
    return [[int(head) for head in norm.weight[::D]] for norm in (split.q_norm, split.k_norm)]


def test_per_head_constants_are_those_of_the_global_head():
    """Rules out: what belongs to a head read by the head's local number. Rank 1 of 2 has heads 2 and 3 of 4."""
    assert launch(norm_weights, 2, 4) == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]


def test_a_kv_heads_norm_weight_goes_where_the_head_goes():
    """Rules out: a norm weight of 2 KV heads cut in 4 although the heads are replicated. Rank r holds head r // 2."""
    assert launch(norm_weights, 4, 2) == [[[0], [0]], [[1], [0]], [[2], [1]], [[3], [1]]]


def works_at(heads, kv_heads):
    try:
        ParallelAttention.from_dense(Attention(H, heads, kv_heads, head_dim=D))(torch.randn(B, S, H))
        return "works"
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "t", "works"),
    [(4, 1, 4, None), (4, 2, 4, None), (9, 3, 2, "1, 3, 9"), (9, 3, 4, "1, 3, 9"), (12, 4, 3, "1, 2, 4, 12")],
)
def test_fewer_kv_heads_than_ranks_work_or_are_refused_by_name(heads, kv_heads, t, works):
    """Rules out: an error about a view, deep inside. The refusal has both numbers, t, and the t that work."""
    refusal = (
        f"query heads = {heads} and KV heads = {kv_heads} do not split over t = {t}: t must divide the query heads, "
        f"and divide the KV heads or be a multiple of them; t that work: {works}"
    )
    assert launch(works_at, t, heads, kv_heads) == [refusal if works else "works"] * t


def cut_inside_a_head():
    """The output's largest difference to dense, with 2 heads on 2 ranks by heads, and with half of each head."""
    torch.manual_seed(0)
    dense, x = Attention(H, 2, head_dim=D, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
    split, rank = ParallelAttention.from_dense(dense), dist.get_rank()
    right = largest(split(x), dense(x))
    inside = [head * D + i for head in range(2) for i in range(rank * D // 2, (rank + 1) * D // 2)]
    order = [part.weight.detach()[inside] for part in (dense.q_proj, dense.k_proj, dense.v_proj)]
    two_halves = [torch.cat([rows[i : i + D // 2] for rows in order]) for i in (0, D // 2)]
    split.qkv.weight.data = torch.cat(two_halves)
    split.o_proj.weight.data = dense.o_proj.weight.detach()[:, inside]
    split.heads, split.head_dim = head_groups(4, 4, 2), D // 2
    return right, largest(split(x), dense(x))


def test_a_head_is_not_divisible():
    """Rules out: any columns of Q, K and V. Half of each head's features on each rank has all the right shapes."""
    for right, wrong in launch(cut_inside_a_head, 2):
        assert right < TOLERANCE and wrong > 0.01


# ---- the cache, half precision, groups ------------------------------------------------------------------------------


def with_a_cache(options):
    """The largest difference to one forward over all tokens, token by token after a first part, and bytes kept."""
    torch.manual_seed(0)
    dense = make(8, 2, {"dtype": torch.float64, **options})
    split, x = ParallelAttention.from_dense(dense), torch.randn(B, S, H, dtype=torch.float64)
    differences, caches = [], (KVCache(), KVCache())
    with torch.no_grad():
        whole = dense(x)
        for layer, cache in zip((dense, split), caches):
            parts = [layer(part, cache) for part in x.split([2, 1, 2], 1)]
            differences.append(largest(torch.cat(parts, 1), whole))
    return differences, [len(cache) for cache in caches], [cache.nbytes for cache in caches]


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("core", ["sdpa", "explicit"])
def test_a_cache_by_heads_gives_what_one_forward_gives(core, t):
    """A rank keeps its own KV heads: half of 2 at t = 2, and no less at t = 4, where each is on two ranks. Not vacuous:
    positions go on where the cache ends (RoPE), and a part of several tokens reads all before it."""
    whole = 2 * B * S * 2 * D * 8  # keys and values of 2 heads in float64
    for differences, lengths, kept in launch(with_a_cache, t, {"core": core, "qk_norm": "all", **ROPE}):
        assert max(differences) < TOLERANCE
        assert lengths == [S, S]
        assert kept == [whole, whole // min(t, 2)]


def autocast():
    """dtypes under autocast beside the dense layer's, what is sent, and the largest difference to dense."""
    torch.manual_seed(0)
    dense = Attention(64, 4, 1, bias=True, **ROPE)
    x, dy = torch.randn(B, S, 64), torch.randn(B, S, 64)
    results = []
    for layer in (dense, ParallelAttention.from_dense(copy.deepcopy(dense))):
        leaf = x.clone().requires_grad_()
        with record() as ledger:
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(leaf)
            y.backward(dy.to(y.dtype))
        dtypes = [str(tensor.dtype) for tensor in (y, leaf.grad, *(p.grad for p in layer.parameters()))]
        results.append((y, leaf.grad, set(dtypes[:1]), set(dtypes[1:])))
    (y_dense, dx_dense, *dense_types), (y, dx, *types) = results
    sent = [str(event.dtype) for event in ledger.events if event.shape == (B, S, 64)]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in ((y, y_dense), (dx, dx_dense))]
    return dense_types == types, types, sent, errors


def test_autocast_as_for_the_dense_layer():
    for same, types, sent, errors in launch(autocast, 2):
        assert same and types == [{"torch.bfloat16"}, {"torch.float32"}]
        assert sent == ["torch.bfloat16"] * 2
        assert max(errors) < 0.05  # a bfloat16 has 8 bits


def many_layers():
    """How many groups three layers with replicas need; a copy of a layer works as the layer does."""
    layers = [ParallelAttention.from_dense(Attention(H, 4, 2, head_dim=D)) for _ in range(3)]
    x = torch.randn(B, S, H)
    same = torch.equal(copy.deepcopy(layers[0])(x), layers[0](x))
    return len({replica_group(2) for _ in layers}), same


def test_layers_share_their_groups_and_jobs_do_not():
    """Rules out: a group for each of many layers, and one kept from an earlier job, which is gone."""
    for _ in range(2):
        assert launch(many_layers, 4) == [(1, True)] * 4


def test_layers_print_their_heads():
    split = ParallelAttention.from_dense(Attention(H, 8, 2, head_dim=D))
    assert "heads=8 of 8, kv_heads=2 of 2, head_dim=4" in str(split)


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusals():
    """What each wrong call raised, on this rank, and how many collectives there were."""
    split = ParallelAttention.from_dense(Attention(H, 4, 2, head_dim=D, qk_norm="all"))
    half_biased, half_frozen = (Attention(H, 4, head_dim=D, bias=True) for _ in range(2))
    half_biased.k_proj.bias = None
    half_frozen.v_proj.weight.requires_grad_(False)
    cache = KVCache()
    cache.extend(torch.randn(1, 1, 3, D), torch.randn(1, 1, 3, D))
    calls = [
        lambda: split(torch.randn(B, S, H + 1)),
        lambda: split(torch.randn(S, H)),
        lambda: split(torch.randn(B, S, H).double()),
        lambda: split([1.0] * H),
        lambda: split(torch.randn(B, S, H), cache),
        lambda: ParallelAttention.from_dense(Attention(H, 9, 3, head_dim=D)),
        lambda: ParallelAttention.from_dense(nn.Linear(H, H)),
        lambda: ParallelAttention.from_dense(half_biased),
        lambda: ParallelAttention.from_dense(half_frozen),
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


def test_bad_input_is_refused_on_every_rank_before_anything_is_sent():
    alike = "ValueError: q_proj, k_proj and v_proj become one layer: give a bias to all or none, freeze all or none"
    expected = [
        "ValueError: ColumnParallelLinear: the last dimension must be 7 and is 8 (shape [2, 5, 8])",
        "ValueError: ParallelAttention: the input must be [b, s, h] and its shape is [5, 7]",
        "TypeError: ColumnParallelLinear: the input is torch.float64 and the weight torch.float32; "
        "convert one of them with .to()",
        "TypeError: ColumnParallelLinear: the input must be a tensor and is list",
        "ValueError: the cache holds 1 sequences of 1 KV heads of size 4, and these are 2 of 1 of size 4; "
        "start with a new KVCache()",
        "ValueError: query heads = 9 and KV heads = 3 do not split over t = 2: t must divide the query heads, and "
        "divide the KV heads or be a multiple of them; t that work: 1, 3, 9",
        "TypeError: ParallelAttention.from_dense takes a tpcode.dense.Attention or GPT2Attention, and this is a Linear",
        alike,
        alike,
    ]
    for raised, events in launch(refusals, 2):
        assert raised == expected
        assert events == 0


# ---- the placement of a fused QKV -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"), [(4, 4, (1, 2, 4)), (8, 2, (1, 2, 4, 8)), (4, 1, (1, 2, 4)), (9, 3, (1, 3, 9))]
)
def test_shards_of_a_fused_qkv_merge_to_the_whole_at_every_t(heads, kv_heads, sizes):
    """Shard for one t, merge, shard for the next: what a checkpoint goes through. Rank r holds its query heads and the
    KV heads that these read, group by group. Entries are distinct, and a head of one row says which it is."""
    per_group = heads // kv_heads
    whole = []
    for group in range(kv_heads):
        whole += [f"q{group * per_group + i}" for i in range(per_group)] + [f"k{group}", f"v{group}"]
    tensor = torch.arange(1.0, len(whole) + 1)
    for t in sizes:
        split = head_groups(heads, kv_heads, t)
        placement = qkv_placement(heads, kv_heads, 1)
        shards = [placement.shard(tensor, rank, t) for rank in range(t)]
        for rank, shard in enumerate(shards):
            assert placement.shard_size(t) == len(shard) == split.heads_per_rank + 2 * split.kv_heads_per_rank
            held = [whole[int(number) - 1] for number in shard]
            expected = []
            for group in split.kv_heads_of(rank):
                expected += [f"q{head}" for head in split.heads_of(rank) if head // per_group == group]
                expected += [f"k{group}", f"v{group}"]
            assert held == expected
        counted = [shard[placement.counted(rank, t)] for rank, shard in enumerate(shards)]
        assert torch.cat(counted).sort().values.equal(tensor)  # each entry once, whatever its replicas
        tensor = placement.merge(shards)
        assert tensor.tolist() == list(range(1, len(whole) + 1))


def test_a_whole_qkv_is_not_taken_for_a_shard_nor_a_shard_for_a_whole():
    placement = qkv_placement(8, 2, 1)
    with pytest.raises(ValueError, match=r"a whole over t = 4 must have 12 along dimension 0, and its shape is \[4\]"):
        placement.shard(torch.zeros(4), 0, 4)
    with pytest.raises(ValueError, match=r"query heads = 8 and KV heads = 2 do not split over t = 3"):
        placement.merge([torch.zeros(4)] * 3)
    with pytest.raises(ValueError, match=r"rank must be below t = 4 and is 4"):
        placement.shard(torch.zeros(12), 4, 4)
