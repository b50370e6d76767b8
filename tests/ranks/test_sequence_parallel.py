"""Sequence parallelism: the same model with its residual stream cut along the sequence; what it sends, keeps, sums and
refuses.

The comparison with the dense model is that of `test_model`, with its parameters cut by hand.
"""

import functools
import re
from fractions import Fraction

import pytest
import test_model as table
import torch
import torch.distributed as dist
from torch import nn

from tpcode import ParallelTransformer
from tpcode.comm import all_reduce, gather_sequence, record, scatter_sequence
from tpcode.dense import FFN, MODELS, KVCache, set_dropout_step
from tpcode.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelFFN,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from tpcode.model import Block
from tpcode.runtime import CollectiveMismatch, launch
from tpcode.runtime.notes import watch
from tpcode.training import finalize_grads, train

B, S, H, F, V = 2, 12, 8, 10, table.V  # 1, 2, 3 and 4 divide s; nothing divides V
T = (1, 2, 4)


# ---- dense against split --------------------------------------------------------------------------------------------

CASES = {}
for family in ("gpt2", "llama"):
    for what, (tied, bias, options) in {
        "tied, bias": (True, True, {}),
        "untied, no bias": (False, False, {}),
        "tied, no bias, dropout": (True, False, {"dropout": 0.3}),
        "untied, bias, dropout, recomputed": (False, True, {"dropout": 0.3, "recompute": True}),
        "tied, bias, recomputed": (True, True, {"recompute": True}),
        "untied, bias, padded": (False, True, {"pad_sequence": True, "s": 7, "max_seq": 7}),
    }.items():
        CASES[f"{family}, {what}"] = (family, "4 heads", tied, bias, {"s": S, "sequence_parallel": True, **options})
for name in ("gpt2, tied, bias", "llama, untied, no bias", "llama, untied, bias, padded"):
    CASES[f"{name}, 9 heads"] = (CASES[name][0], "9 heads", *CASES[name][2:])
ON_SUBGROUPS = tuple(name for name in CASES if "9 heads" not in name and "tied, bias" in name)


def cases_at(t):
    return table.cases_at(t, CASES)


answers = functools.cache(lambda t: launch(table.compare_all, t, cases_at(t)))


@pytest.mark.parametrize(("name", "t"), [(name, t) for t in (3, *T) for name in cases_at(t)])
def test_with_sequence_parallelism_the_model_still_equals_the_dense_one(name, t):
    """Logits, loss, every gradient, three steps of SGD, merged again. Not vacuous: see `test_model`; s is not padded
    at t = 1 alone in the cases that say so. At t = 4, Llama's two KV heads have replicas."""
    table.assert_equal(answers(t), name, t)


def test_on_subgroups_too():
    """Not vacuous: the two groups' problems differ."""
    by_rank = launch(table.compare_all, 4, {name: CASES[name] for name in ON_SUBGROUPS}, ((2, 0), (3, 1)))
    for name in ON_SUBGROUPS:
        table.assert_equal(by_rank, name, 4)


def compare_without_sum(what):
    """The names whose first gradient differs from the dense one's, with another `finalize_grads`."""

    def wrong(model):
        for name, p in model.named_parameters():
            if what == "mean" and model.placements[name].partial_grad:
                p.grad.copy_(all_reduce(p.grad, "avg"))
            if what == "everything":
                p.grad.copy_(all_reduce(p.grad))

    right, table.finalize_grads = table.finalize_grads, wrong
    try:
        name = "gpt2, tied, bias"
        differences = table.compare_all({name: CASES[name]})[name][0]
    finally:
        table.finalize_grads = right
    wrong_ones = {key for key, size in differences.items() if key.endswith("gradient 0") and not size < table.TOLERANCE}
    return {key.removesuffix("'s gradient 0") for key in wrong_ones}


def test_the_table_sees_a_gamma_that_is_not_summed():
    """Rules out: norm weights, row biases and positions that know only their rank's own tokens, or the mean of the
    ranks' gradients; and sums of what is whole. The parts, and no others, are wrong without the sum."""
    model = ParallelTransformer(table.config_of("gpt2"), sequence_parallel=True)
    parts = {name for name, placement in model.placements.items() if placement.partial_grad}
    inside = (
        "norm_1.weight",
        "norm_1.bias",
        "attention.o_proj.bias",
        "norm_2.weight",
        "norm_2.bias",
        "ffn.c_proj.bias",
    )
    blocks = {f"blocks.{i}.{name}" for i in range(len(model.blocks)) for name in inside}
    assert parts == blocks | {"norm.weight", "norm.bias", "positions.weight"}
    whole = {name for name, _ in model.named_parameters()} - parts
    assert launch(compare_without_sum, 2, "none") == [parts] * 2
    assert launch(compare_without_sum, 2, "mean") == [parts] * 2
    assert launch(compare_without_sum, 2, "everything") == [whole] * 2


def gamma():
    """One norm's gradient of rank-own tokens: dense, local, summed."""
    torch.manual_seed(0)
    config = table.config_of("gpt2", layers=1, dropout=0.2, max_seq=S)
    dense = table.random_dense(config, dtype=torch.float64)
    split = ParallelTransformer.from_dense(dense, sequence_parallel=True)
    ids, targets = torch.randint(V, (2, B, S))
    for model in (dense, split):
        model.loss(ids, targets).backward()
    local = split.norm.weight.grad.clone()
    finalize_grads(split)
    return dense.transformer.ln_f.weight.grad, local, split.norm.weight.grad


def test_the_gradient_of_gamma_is_the_sum_over_the_ranks():
    """Rules out the reports in which a norm's weight saw its own rank's tokens only, or the mean."""
    by_rank = launch(gamma, 4)
    dense = by_rank[0][0]
    locals_ = torch.stack([local for _, local, _ in by_rank])
    torch.testing.assert_close(locals_.sum(0), dense, rtol=0, atol=1e-12)
    for _, local, summed in by_rank:
        torch.testing.assert_close(summed, dense, rtol=0, atol=1e-12)
        assert (local - dense).abs().max() > 1e-2 and (locals_.mean(0) - dense).abs().max() > 1e-2


# ---- long runs ------------------------------------------------------------------------------------------------------


def after_twenty_steps(families):
    """For each family: every replicated parameter after 20 steps of AdamW with dropout, and the curve."""
    found = {}
    for family in families:
        torch.manual_seed(0)
        config = table.config_of(family, layers=1, dropout=0.1, max_seq=S)
        model = ParallelTransformer(config, sequence_parallel=True, std=0.3, recompute=family == "gpt2")
        batches = [tuple(torch.randint(V, (2, B, S))) for _ in range(20)]
        losses = train(model, batches, lr=0.01, progress=False)
        shared = {name for name, placement in model.placements.items() if placement.dim is None}
        found[family] = {name: model.get_parameter(name).detach() for name in shared}, losses
    return found


def test_after_20_steps_what_every_rank_has_is_the_same_to_the_bit():
    """With dropout, in float32. Rules out: ranks that drift apart by a last digit in each step. Not vacuous: norms, row
    biases and positions have moved. The loss curve is that of one rank."""
    runs = {4: ["gpt2"], 2: ["gpt2", "llama"]}
    alone = after_twenty_steps(runs[2])
    for t, families in runs.items():
        by_rank = launch(after_twenty_steps, t, families)
        for family in families:
            first, curve = by_rank[0][family]
            assert len(first) == (9 if family == "gpt2" else 3)
            for other, losses in (answer[family] for answer in by_rank[1:]):
                assert losses == curve
                assert all(torch.equal(first[name], other[name]) for name in first)
            assert all(weight.unique().numel() > 1 for weight in first.values())
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(alone[family][1]), rtol=1e-4, atol=1e-4)


# ---- what is sent ---------------------------------------------------------------------------------------------------


def one_layer(sequence_parallel):
    """Forward and backward of one block, for both families: its events, PyTorch's own counts, what the rank called."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    for family in ("gpt2", "llama"):
        config = table.config_of(family, layers=1, max_seq=S, kv_heads=4)
        dense = MODELS[family](config)
        block = Block.from_dense(dense.part("blocks")[0], dense.names, sequence_parallel=sequence_parallel)
        x = torch.randn(B, S, H)
        x = (scatter_sequence(x) if sequence_parallel else x).requires_grad_()
        with record() as ledger, CommDebugMode() as mode, watch() as calls:
            block(x).square().sum().backward()
        witness = {str(op).removeprefix("c10d."): n for op, n in mode.get_comm_counts().items()}
        called = [call.split()[0] for call in calls]
        found[family] = [(e.phase, e.op, e.shape) for e in ledger.events], ledger.wire_bytes(), witness, called
    return found


@pytest.mark.parametrize("t", T)
def test_a_layer_sends_six_all_gathers_and_four_reduce_scatters(t):
    """10 units of (t-1)/t·bsh on the wire, against 8 for four all-reduces. In order; counted by PyTorch too, and by the
    notes on every call. One rank sends nothing."""
    gather, scatter, reduce = (
        lambda phase, op=op: (phase, op, (B, S, H)) for op in ("all_gather", "reduce_scatter", "all_reduce")
    )
    unit = Fraction(t - 1, t) * 4 * B * S * H  # float32
    forward = [gather("forward"), scatter("forward")] * 2
    backward = [gather("backward"), gather("backward"), scatter("backward")] * 2
    for answer in launch(one_layer, t, True):
        for events, wire, witness, called in answer.values():
            if t == 1:
                assert (events, wire, witness, called) == ([], 0, {}, [])
                continue
            assert events == forward + backward
            assert wire == 10 * unit
            assert witness == {"_allgather_base_": 6, "_reduce_scatter_base_": 4}
            assert [name.removesuffix("_single") for name in called] == [op for _, op, _ in events]
    for answer in launch(one_layer, t, False):
        for events, wire, *_ in answer.values():
            assert events == ([reduce("forward")] * 2 + [reduce("backward")] * 2 if t > 1 else [])
            assert wire == 8 * unit


def whole_step(recompute):
    config = table.config_of("gpt2", layers=2, max_seq=S)
    model = ParallelTransformer(config, sequence_parallel=True, recompute=recompute)
    with record() as ledger:
        model.loss(*torch.randint(V, (2, B, S))).backward()
        finalize_grads(model)
    events = [(event.phase, event.op) for event in ledger.events if event.shape == (B, S, H)]
    others = [(event.op, event.shape) for event in ledger.events if event.shape != (B, S, H)]
    return events, others, sum(p.numel() for name, p in model.named_parameters() if model.placements[name].partial_grad)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_what_a_step_of_the_model_sends(recompute):
    """As its docstring says. The loss is what it was, and the parts of the gradient are summed by one all-reduce."""
    gather, scatter = "all_gather", "reduce_scatter"
    again = [("recompute", gather), ("recompute", scatter)] * 2 if recompute else []
    first, *rest = [("backward", op) for op in (gather, gather, scatter) * 2]
    block = [first, *again, *rest]  # the gather of dY needs nothing that was kept, and so comes before
    expected = [("forward", scatter), *[("forward", gather), ("forward", scatter)] * 4, ("forward", gather)]
    expected += [("backward", gather), ("backward", scatter), *block * 2, ("backward", gather)]
    for events, others, parts in launch(whole_step, 2, recompute):
        assert events == expected
        assert others == [("all_reduce", (B, S))] * 3 + [("all_reduce", (parts,))]


def order_in_backward():
    """The calls of a column layer's backward, in order."""
    import tpcode.layers.linear as module

    calls = []

    class Handle:
        def __init__(self, what, handle):
            self.what, self.handle = what, handle

        def wait(self):
            calls.append(f"{self.what} waited for")
            self.handle.wait()

    def told(what, real):
        def launched(*args):
            calls.append(f"{what} launched")
            out, handle = real(*args)
            return out, Handle(what, handle)

        return launched

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                calls.append(f"product {list(args[0].shape)} {list(args[1].shape)}")
            return func(*args, **(kwargs or {}))

    layer = ColumnParallelLinear.from_dense(nn.Linear(H, F), sequence_parallel=True)
    y = layer(torch.randn(B, S // 2, H, requires_grad=True))
    reals = {name: getattr(module, name) for name in ("all_gather_async", "reduce_scatter_async")}
    for name, real in reals.items():
        setattr(module, name, told(name.removesuffix("_async"), real))
    try:
        with Products():
            y.backward(torch.randn(B, S, F // 2))
    finally:
        for name, real in reals.items():
            setattr(module, name, real)
    return calls


def test_the_gather_runs_while_dx_is_computed_and_the_scatter_while_dw_is():
    """Rules out: waiting at once, which hides nothing; and a wait that is missing."""
    dgrad, wgrad = f"product [{B * S}, 5] [5, {H}]", f"product [5, {B * S}] [{B * S}, {H}]"
    expected = ["all_gather launched", dgrad, "reduce_scatter launched", "all_gather waited for", wgrad]
    assert launch(order_in_backward, 2) == [[*expected, "reduce_scatter waited for"]] * 2


def frozen():
    """Collectives of a column layer's backward, with the weight frozen, the input without a gradient, or neither."""
    found = {}
    for what in ("all", "input only", "weights only"):
        dense = nn.Linear(H, F).requires_grad_(what != "input only")
        layer = ColumnParallelLinear.from_dense(dense, sequence_parallel=True)
        x = torch.randn(B, S // 2, H, requires_grad=what != "weights only")
        with record() as ledger:
            layer(x).sum().backward()
        found[what] = [event.op for event in ledger.events if event.phase == "backward"]
    return found


def test_nothing_is_sent_for_a_gradient_that_nobody_wants():
    gather, scatter = ["all_gather"], ["reduce_scatter"]
    assert launch(frozen, 2) == [{"all": gather + scatter, "input only": scatter, "weights only": gather}] * 2


# ---- what is kept ---------------------------------------------------------------------------------------------------


def kept(sequence_parallel):
    """Bytes of activations saved for backward, by storage and without parameters: a column layer, the embedding's
    dropout, and a whole block with its norms."""
    found = {}
    config = table.config_of("gpt2", layers=1, max_seq=S, dropout=0.1)
    dense = MODELS["gpt2"](config)
    block = Block.from_dense(dense.part("blocks")[0], dense.names, sequence_parallel=sequence_parallel)
    column = ColumnParallelLinear.from_dense(nn.Linear(H, 12), sequence_parallel=sequence_parallel)
    for name, module in {"column": column, "norm": block.norm_1, "dropout": block.dropout_1, "block": block}.items():
        x = torch.randn(B, S // dist.get_world_size() if sequence_parallel else S, H, requires_grad=True)
        storages, parameters = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

        def note(tensor, storages=storages, parameters=parameters):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = module(x)
        found[name] = sum(size for _, size in storages.values())
        del y
    return found


def test_only_this_ranks_tokens_are_kept():
    """The input of a column layer, of a norm (float32 4 bytes, and mean and rstd of each token), and a mask's byte an
    entry: a share of 1/t each. In a block the 10·sbh bytes that plain TP leaves whole (16E+2 with E = 4, less what the
    heads and the FFN divide) are divided too."""
    whole, cut = launch(kept, 4, False), launch(kept, 4, True)
    n = B * S * H
    for plain, split in zip(whole, cut, strict=True):
        assert plain["column"] == 4 * n and split["column"] == n
        assert plain["norm"] == 4 * n + 2 * 4 * B * S and split["norm"] == plain["norm"] // 4
        assert plain["dropout"] == n and split["dropout"] == n // 4
        stream = 4 * (4 * n) + 2 * n + 4 * 4 * B * S  # two norms' and two column layers' inputs, two masks, statistics
        assert plain["block"] - split["block"] == stream - stream // 4


# ---- one or many readers --------------------------------------------------------------------------------------------


def router(replicated_consumer):
    """A gathered tensor read twice: by a column layer, of which each rank has a part, and by a router that every rank
    has alike. The gradient of this rank's tokens, and of the router's weight, over the dense ones."""
    torch.manual_seed(0)
    rank, t = dist.get_rank(), dist.get_world_size()
    x, gate = torch.randn(B, S, H, dtype=torch.float64), torch.randn(3, H, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), x.chunk(t, 1)[rank].clone().requires_grad_()]
    gates = [gate.clone().requires_grad_() for _ in range(2)]
    (leaves[0] @ gates[0].T).softmax(-1).square().sum().backward()
    whole = gather_sequence(leaves[1], replicated_consumer=replicated_consumer)
    (whole @ gates[1].T).softmax(-1).square().sum().backward()
    own = leaves[0].grad.chunk(t, 1)[rank]
    return (leaves[1].grad / own).unique().round(decimals=9).tolist(), (
        gates[1].grad - gates[0].grad
    ).abs().max().item()


def test_a_router_that_every_rank_has_takes_a_split_and_no_reduce_scatter():
    """Rules out: gradients t times too large where the reader of a gathered sequence is the same on all ranks. The
    router's own gradient is whole on each rank, and needs no sum."""
    for ratios, of_gate in launch(router, 4, True):
        assert ratios == [1.0] and of_gate < 1e-12
    for ratios, _ in launch(router, 4, False):
        assert ratios == [4.0]


# ---- layers alone ---------------------------------------------------------------------------------------------------


def layers_alone():
    """Largest differences to dense of outputs and gradients, of layers with the options that the model does not use."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rank, t, found = dist.get_rank(), dist.get_world_size(), {}
    dense_column, dense_row = nn.Linear(H, F), nn.Linear(F, H)
    cases = {
        "column, gathered": (dense_column, ColumnParallelLinear, {"gather_output": True}, True, False),
        "row, whole input": (dense_row, RowParallelLinear, {"input_is_parallel": False}, False, True),
    }
    for name, (dense, cls, options, cut_in, cut_out) in cases.items():
        split = cls.from_dense(dense, sequence_parallel=True, **options)
        dense.zero_grad()
        x, dy = torch.randn(B, S, dense.in_features), torch.randn(B, S, dense.out_features)
        own = [x, dy]
        own = [(whole.chunk(t, 1)[rank] if cut else whole) for whole, cut in zip(own, (cut_in, cut_out), strict=True)]
        leaves = [x.clone().requires_grad_(), own[0].clone().requires_grad_()]
        whole, y = dense(leaves[0]), split(leaves[1])
        whole.backward(dy)
        y.backward(own[1])
        finalize_grads(split)
        dx = leaves[0].grad.chunk(t, 1)[rank] if cut_in else leaves[0].grad
        pairs = [(y, whole.chunk(t, 1)[rank] if cut_out else whole), (leaves[1].grad, dx)]
        cut = cls.cut
        pairs.append((split.weight.grad, dense.weight.grad.chunk(t, cut)[rank]))
        pairs.append((split.bias.grad, dense.bias.grad.chunk(t)[rank] if cut == 0 else dense.bias.grad))
        found[name] = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    return found


def test_options_of_single_layers_work_with_it():
    for found in launch(layers_alone, 2):
        assert len(found) == 2 and max(found.values()) < 1e-12


def under_autocast():
    """Dtypes of what a block sends, and of its gradients."""
    dense = MODELS["gpt2"](table.config_of("gpt2", layers=1, max_seq=S))
    block = Block.from_dense(dense.part("blocks")[0], dense.names, sequence_parallel=True)
    x = torch.randn(B, S // 2, H, requires_grad=True)
    with record() as ledger, torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    with record() as backward:
        y.sum().backward()
    sent = {str(event.dtype) for event in (*ledger.events, *backward.events)}
    return sent, {str(p.grad.dtype) for p in (x, *block.parameters())}


def test_under_autocast_halves_are_sent():
    assert launch(under_autocast, 2) == [({"torch.bfloat16"}, {"torch.float32"})] * 2


# ---- the same model -------------------------------------------------------------------------------------------------


def the_same_weights():
    """Whether a new model's parameters are those without sequence parallelism, bit by bit; whether placements say the
    same but for parts; and the dense model that it was made of."""
    config = table.config_of("llama")
    plain, split = (ParallelTransformer(config, seed=3, sequence_parallel=choice) for choice in (False, True))
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), split.parameters(), strict=True))
    split.load_state_dict(plain.state_dict())
    sources = [
        {name: (source.parts, source.shape) for name, source in model.sources.items()} for model in (plain, split)
    ]
    return same, sources[0] == sources[1], str(split.to_dense()) == str(plain.to_dense())


def test_weights_do_not_depend_on_it():
    assert launch(the_same_weights, 2) == [(True, True, True)] * 2


def evaluated():
    """Logits of a model with dropout and padding, in evaluation, where nothing is dropped."""
    torch.manual_seed(0)
    dense = table.random_dense(table.config_of("gpt2", dropout=0.5, max_seq=7), dtype=torch.float64).eval()
    split = ParallelTransformer.from_dense(dense, sequence_parallel=True, pad_sequence=True)
    ids = torch.randint(V, (B, 7))
    set_dropout_step(split, 3)
    with torch.no_grad():
        return (split(ids) - table.share(dense(ids), 2, dist.get_rank(), dist.get_world_size())).abs().max().item()


def test_padding_goes_with_dropout_where_nothing_is_dropped():
    assert max(launch(evaluated, 4)) < 1e-10


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusals():
    """Each wrong call with what it raised, and the number of collectives; every rank makes them all."""
    torch.manual_seed(0)
    plain = ParallelTransformer(table.config_of("gpt2", layers=1))
    split = ParallelTransformer(table.config_of("gpt2", layers=1), sequence_parallel=True)
    dropping = ParallelTransformer(
        table.config_of("gpt2", layers=1, dropout=0.1), sequence_parallel=True, pad_sequence=True
    )
    attention = ParallelAttention.from_dense(
        MODELS["gpt2"](table.config_of("gpt2")).part("blocks")[0].attn, sequence_parallel=True
    )
    ids, x, options = torch.randint(V, (B, 7)), torch.randn(B, 7, H), {"sequence_parallel": True}
    ffn, row = ParallelFFN.from_dense(FFN(H, 12), **options), RowParallelLinear.from_dense(nn.Linear(12, H), **options)
    table_ = VocabParallelEmbedding.from_dense(nn.Embedding(V, H), **options)
    calls = [
        lambda: split(ids),
        lambda: split.loss(ids, ids),
        lambda: dropping(ids),
        lambda: split.loss(ids[:, :6], ids[:, :3]),
        lambda: plain.loss(ids[:, :3], ids[:, :6]),
        lambda: split(ids[:, :1], [KVCache()]),
        lambda: split(ids[:, :6], [KVCache()]),
        lambda: attention(x, KVCache()),
        lambda: ParallelTransformer(table.config_of("gpt2"), pad_sequence=True),
        lambda: table_(ids),
        lambda: table_(ids[0]),
        lambda: row(x[..., :6]),
        lambda: ffn(x[0]),
        lambda: split.head(x[0]),
        lambda: VocabParallelHead.from_dense(nn.Linear(H, V, bias=False), **options)(x[0]),
    ]
    raised = []
    with record() as ledger, watch() as sent:
        for call in calls:
            try:
                call()
                raised.append("nothing")
            except ValueError as error:
                raised.append(str(error))
    return raised, ledger.count() + len(sent)


def test_what_does_not_split_is_refused_on_every_rank_before_anything_is_sent():
    """Rules out: a sequence that t does not divide, which loses tokens or fails deep inside; a shard taken for the
    whole, where ids and targets tell; a cache of tokens that lie on other ranks."""
    uneven = (
        "with sequence_parallel=True the sequence s = 7 does not divide by t = 2; t that work: 1, 7; lengths that work "
        "here are the multiples of 2, such as 8"
    )
    cached = (
        "a KV cache goes with sequence_parallel=False. Generation adds one token at a time, and one token is not split "
        "over ranks; weights are the same either way: make the model again without sequence parallelism"
    )
    whole = "one target for each id, and all of both on every rank, whether the model splits the sequence or not"
    flat = (
        "with sequence_parallel=True dimension 1 is the sequence, [b, s, ...], and the input's shape is [7, 8]; give "
        "it its batch dimension"
    )
    expected = [
        f"ParallelTransformer: {uneven}, or pad_sequence=True",
        f"ParallelTransformer: {uneven}, or pad_sequence=True",
        "ParallelTransformer: pad_sequence=True fills s = 7 up to 8, a multiple of t = 2, and dropout = 0.1 draws its "
        "masks for the sequence as it is; give it such a multiple, or a model without dropout",
        f"ids are [2, 6] and targets [2, 3]: {whole}",
        f"ids are [2, 3] and targets [2, 6]: {whole}",
        f"ParallelTransformer: {cached}",
        f"ParallelTransformer: {cached}",
        f"ParallelAttention: {cached}",
        "pad_sequence=True goes with sequence_parallel=True: without it any length works as it is",
        f"VocabParallelEmbedding: {uneven}",
        "VocabParallelEmbedding: with sequence_parallel=True ids must be [b, s], and their shape is [7]; give them "
        "their batch dimension",
        f"RowParallelLinear: {uneven}",
        f"ColumnParallelLinear: {flat}",
        f"TiedHead: {flat}",
        f"VocabParallelHead: {flat}",
    ]
    for raised, sent in launch(refusals, 2):
        assert raised == expected
        assert sent == 0


def shares_of_other_lengths():
    layer = ColumnParallelLinear.from_dense(nn.Linear(H, F), sequence_parallel=True)
    layer(torch.randn(B, 3 if dist.get_rank() else 6, H))  # rank 0 gives the whole, rank 1 its half


def test_a_whole_on_one_rank_and_a_share_on_the_other_is_seen():
    """Rules out: garbage from a gather of unequal shares. (Wholes on all ranks have equal shapes: no check can see
    these, and the docstring says so.)"""
    with pytest.raises(CollectiveMismatch, match=re.escape("[2, 6, 8]")):
        launch(shares_of_other_lengths, 2)
