"""A whole transformer on t ranks equals the dense one: logits, loss, every gradient, weights after three steps; what a
step sends; initialisation and dropout that do not depend on t.

The dense parameters are cut here by hand, by heads and by chunks, apart from the package's placements and sources.
Weights are random, hence distinct in every entry, biases and norms too.
"""

import copy
import functools
import sys
import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode import ModelConfig, ParallelTransformer
from tpcode.comm import record
from tpcode.dense import MODELS, KVCache, initial, set_dropout_step
from tpcode.runtime import RankPool, launch
from tpcode.training import clip_grad_norm, finalize_grads

TOLERANCE = 1e-10
B, S, V, F, D = 2, 6, 11, 10, 2  # t = 2, 3, 4 and 9 divide neither V nor, most of them, F

HEADS = {"4 heads": (4, 2, 2, (1, 2, 4)), "9 heads": (9, 3, 1, (1, 3, 9))}  # a, Llama's k, L, and the t that work
CASES = {}
for family, heads, tied, bias in product(("gpt2", "llama"), HEADS, (True, False), (True, False)):
    key = f"{family}, {heads}, {'tied' if tied else 'untied'}, {'bias' if bias else 'no bias'}"
    CASES[key] = (family, heads, tied, bias, {})
for family, again in product(("gpt2", "llama"), (False, True)):
    key = f"{family}, 4 heads, dropout{', recomputed' if again else ''}"
    CASES[key] = (family, "4 heads", True, family == "gpt2", {"dropout": 0.3, "recompute": again})


def config_of(family, heads="4 heads", tied=True, **kwargs):
    a, k, L, _ = HEADS[heads]
    sizes = {"hidden": a * D, "ffn": F, "heads": a, "kv_heads": k if family == "llama" else a, "layers": L}
    return ModelConfig(family=family, tied=tied, **{**sizes, "vocab": V, "max_seq": S + 2, **kwargs})


def random_dense(config, bias=None, **options):
    """A dense model of which every entry is distinct, and large enough to be seen."""
    dense = MODELS[config.family](config, bias=bias, **options)
    for name, parameter in dense.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name or "ln" in name), std=0.4)
    return dense


# ---- what a rank holds, by hand -------------------------------------------------------------------------------------


def share(whole, dim, rank, t):
    """A plain chunk, zeros added at the end where t does not divide."""
    missing = list(whole.shape)
    missing[dim] = -whole.shape[dim] % t
    return torch.cat([whole, whole.new_zeros(missing)], dim).chunk(t, dim)[rank]


def rows_of_heads(whole, heads):
    return torch.cat([whole[head * D : (head + 1) * D] for head in heads])


def own(dense_tensors, config, rank, t):
    """What a rank holds of dense tensors (weights, or their gradients), by the split model's names."""
    gpt2 = config.family == "gpt2"
    table, final, block = ("transformer.wte", "transformer.ln_f", "transformer.h") if gpt2 else (
        "model.embed_tokens", "model.norm", "model.layers"
    )  # fmt: skip
    held = {"embedding.weight": share(dense_tensors[f"{table}.weight"], 0, rank, t)}
    if gpt2:
        held["positions.weight"] = dense_tensors["transformer.wpe.weight"]
    if not config.tied:
        held["head.weight"] = share(dense_tensors["lm_head.weight"], 0, rank, t)
    for kind in ("weight", "bias"):
        if f"{final}.{kind}" in dense_tensors:
            held[f"norm.{kind}"] = dense_tensors[f"{final}.{kind}"]
    for i in range(config.layers):
        inside = {k.removeprefix(f"{block}.{i}."): v for k, v in dense_tensors.items() if k.startswith(f"{block}.{i}.")}
        of_block = own_of_gpt2s_block(inside, config, rank, t) if gpt2 else own_of_llamas_block(inside, config, rank, t)
        held |= {f"blocks.{i}.{name}": tensor for name, tensor in of_block.items()}
    return held


def own_of_gpt2s_block(inside, config, rank, t):
    queries = range(rank * config.heads // t, (rank + 1) * config.heads // t)
    held = {"attention.o_proj.weight": rows_of_heads(inside["attn.c_proj.weight"].T, queries).T}
    held["ffn.c_proj.weight"] = share(inside["mlp.c_proj.weight"], 1, rank, t)
    for kind in ("weight", "bias"):
        if f"ln_1.{kind}" in inside:
            held |= {f"norm_{n}.{kind}": inside[f"ln_{n}.{kind}"] for n in (1, 2)}
            thirds = inside[f"attn.c_attn.{kind}"].chunk(3)
            rows = [rows_of_heads(third, [head]) for head in queries for third in thirds]  # q0 k0 v0 q1 k1 v1 …
            held[f"attention.qkv.{kind}"] = torch.cat(rows)
            held[f"ffn.c_fc.{kind}"] = share(inside[f"mlp.c_fc.{kind}"], 0, rank, t)
    if "mlp.c_proj.bias" in inside:
        held["attention.o_proj.bias"], held["ffn.c_proj.bias"] = inside["attn.c_proj.bias"], inside["mlp.c_proj.bias"]
    return held


def own_of_llamas_block(inside, config, rank, t):
    queries = list(range(rank * config.heads // t, (rank + 1) * config.heads // t))
    group_of = {head: head // (config.heads // config.kv_heads) for head in queries}
    held = {
        "norm_1.weight": inside["input_layernorm.weight"],
        "norm_2.weight": inside["post_attention_layernorm.weight"],
    }
    held["attention.o_proj.weight"] = rows_of_heads(inside["self_attn.o_proj.weight"].T, queries).T
    held["ffn.down_proj.weight"] = share(inside["mlp.down_proj.weight"], 1, rank, t)
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in inside:
            rows = []
            for group in sorted(set(group_of.values())):
                rows.append(
                    rows_of_heads(inside[f"self_attn.q_proj.{kind}"], [q for q in queries if group_of[q] == group])
                )
                rows += [rows_of_heads(inside[f"self_attn.{part}_proj.{kind}"], [group]) for part in "kv"]
            held[f"attention.qkv.{kind}"] = torch.cat(rows)
            halves = [share(inside[f"mlp.{part}_proj.{kind}"], 0, rank, t) for part in ("gate", "up")]
            held[f"ffn.gate_up.{kind}"] = torch.cat(halves)
    if "mlp.down_proj.bias" in inside:
        held["attention.o_proj.bias"] = inside["self_attn.o_proj.bias"]
        held["ffn.down_proj.bias"] = inside["mlp.down_proj.bias"]
    return held


# ---- dense against split --------------------------------------------------------------------------------------------


def compare_all(cases, members=None):
    """`compare` for every case, by name: one job, since each costs a group of its own otherwise."""
    group = None
    if members:
        groups = [dist.new_group(ranks) for ranks in members]
        number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
        group = groups[number]
        torch.manual_seed(number)  # each group has a problem of its own
    torch.set_default_dtype(torch.float64)
    return {name: compare(*case, group) for name, case in cases.items()}


def compare(family, heads, tied, bias, options, group):
    """Largest differences to dense, by name, on this rank, over three steps of SGD, and the numbers of parameters."""
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    options = dict(options)
    s = options.pop("s", S)
    sizes = {"dropout": options.pop("dropout", 0.0), "max_seq": options.pop("max_seq", s + 2)}
    config = config_of(family, heads, tied, **sizes)
    dense = random_dense(config, bias)
    split = ParallelTransformer.from_dense(copy.deepcopy(dense), group, **options)
    logits, differences = [], {}
    split.register_forward_hook(lambda module, args, output: logits.append(output))
    for step in range(3):
        ids, targets = torch.randint(V, (2, B, s))
        targets[0, 0] = -100
        for model in (dense, split):
            set_dropout_step(model, step)
        torch.rand(rank + 1)
        wanted, loss = dense.loss(ids, targets), split.loss(ids, targets)
        torch.manual_seed(step)  # all ranks have the same problem again
        differences[f"logits {step}"] = largest(logits.pop(), share(dense(ids), 2, rank, t))
        differences[f"loss {step}"] = largest(loss, wanted)
        wanted.backward()
        loss.backward()
        finalize_grads(split)
        shares = own({name: p.grad for name, p in dense.named_parameters()}, config, rank, t)
        assert shares.keys() == dict(split.named_parameters()).keys()
        for name, parameter in split.named_parameters():
            differences[f"{name}'s gradient {step}"] = largest(parameter.grad, shares[name])
        for model in (dense, split):
            sgd(model)
    shares = own(dict(dense.named_parameters()), config, rank, t)
    for name, parameter in split.named_parameters():
        differences[f"{name} after three steps"] = largest(parameter, shares[name])
    back = split.to_dense()
    assert str(back) == str(dense)
    for (name, whole), (other, stepped) in zip(back.named_parameters(), dense.named_parameters(), strict=True):
        assert name == other
        differences[f"{name} after three steps, merged"] = largest(whole, stepped)
    return differences, len(list(dense.parameters())), len(list(split.parameters()))


@torch.no_grad()
def sgd(module):
    for parameter in module.parameters():
        parameter -= 0.1 * parameter.grad
        parameter.grad = None


def largest(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float64
    return (ours - theirs).abs().max().item()


def cases_at(t, cases=CASES):
    return {name: case for name, case in cases.items() if t in HEADS[case[1]][-1]}


answers = functools.cache(lambda t, members=None: launch(compare_all, t, cases_at(2 if members else t), members))


def assert_equal(by_rank, name, ranks):
    assert len(by_rank) == ranks
    for answer in by_rank:
        differences, dense_parameters, split_parameters = answer[name]
        assert len(differences) == 3 * (2 + split_parameters) + split_parameters + dense_parameters
        assert {what: size for what, size in differences.items() if not size < TOLERANCE} == {}


@pytest.mark.parametrize(("name", "t"), [(name, t) for t in (1, 2, 3, 4, 9) for name in cases_at(t)])
def test_a_transformer_on_ranks_equals_the_dense_one(name, t):
    """Not vacuous: the number of comparisons is counted, and a difference of any entry by 1e-10 fails. It rules out
    tied weights that come apart (one parameter, the gradient of both uses, still so after steps), biases cut by their
    weight's rule (those of columns are cut, those of rows are not), and masks that recomputation draws anew."""
    assert_equal(answers(t), name, t)


@pytest.mark.parametrize("name", cases_at(2))
def test_a_transformer_on_subgroups_equals_the_dense_one(name):
    """Rules out: anything by the world's ranks. Not vacuous: the two groups' problems differ."""
    assert_equal(answers(4, ((2, 0), (3, 1))), name, 4)


# ---- faults that are ruled out, by name -----------------------------------------------------------------------------


def tied_through_load_and_steps():
    """Names of all parameters; and after loading a state and two steps: whether head and embedding are one, and largest
    differences to dense of its gradient, and to the gradients of either use alone."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    dense = random_dense(config_of("llama"))
    apart = MODELS["llama"](config_of("llama", tied=False))  # the same numbers in two parameters
    split = ParallelTransformer(config_of("llama"))
    split.load_state_dict(ParallelTransformer.from_dense(dense).state_dict())
    t, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(2):
        apart.load_state_dict({**dense.state_dict(), "lm_head.weight": dense.model.embed_tokens.weight})
        ids, targets = torch.randint(V, (2, B, S))
        for model in (dense, apart, split):
            model.zero_grad()
            model.loss(ids, targets).backward()
        uses = [share(p.grad, 0, rank, t) for p in (apart.model.embed_tokens.weight, apart.lm_head.weight)]
        ours = split.embedding.weight.grad
        differences = [largest(ours, uses[0] + uses[1]), *(largest(ours, use) for use in uses)]
        with torch.no_grad():
            for parameter in (*dense.parameters(), *split.parameters()):
                parameter -= 0.1 * parameter.grad
    named = [name for name, _ in split.named_parameters()]
    return named, list(split.state_dict()), split.head.weight is split.embedding.weight, differences


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_on_ranks_does_not_wait_for_the_compiler(family):
    """Many operations on "meta" import torch._dynamo, and a second is gone on every rank of every job."""

    def life():
        model = ParallelTransformer(config_of(family, heads="9 heads"))
        model.loss(torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, dtype=torch.long)).backward()
        finalize_grads(model)
        clip_grad_norm(model, 1.0)
        ParallelTransformer.from_dense(model.to_dense())
        return "torch._dynamo" in sys.modules

    with RankPool(3) as pool:
        assert pool.run(life) == [False] * 3


def test_tied_weights_stay_one_parameter_with_the_gradients_of_both_uses():
    """Rules out: tied weights that come apart when they are cut, loaded or stepped. Not vacuous: the gradient of either
    use alone is another."""
    for named, stored, one, (both, as_table, as_head) in launch(tied_through_load_and_steps, 2):
        assert named == stored and not any("head" in name for name in named)
        assert one and both < TOLERANCE and as_table > 1e-3 and as_head > 1e-3


def biases():
    """Their sizes on this rank; and whether they are the same to the bit after merging and cutting again."""
    model = ParallelTransformer(config_of("gpt2", layers=1))
    own = {name: p for name, p in model.named_parameters() if name.endswith("bias") and "norm" not in name}
    for name, parameter in own.items():
        torch.manual_seed(0 if "proj" in name else dist.get_rank())  # those of rows are the same on every rank
        nn.init.normal_(parameter)
    back = ParallelTransformer.from_dense(model.to_dense())
    same = all(torch.equal(parameter, back.get_parameter(name)) for name, parameter in own.items())
    return {name: len(parameter) for name, parameter in own.items()}, same


def test_biases_of_columns_are_cut_and_those_of_rows_are_not():
    """Rules out: a bias cut by its weight's rule. There and back again they are the same. (F = 10 is 3 on each of 4; at
    t = 2, where nothing is padded, every entry is compared.)"""
    h = 4 * D
    expected = {"attention.qkv": 3 * h // 4, "attention.o_proj": h, "ffn.c_fc": 3, "ffn.c_proj": h}
    expected = {f"blocks.0.{name}.bias": size for name, size in expected.items()}
    assert [sizes for sizes, _ in launch(biases, 4)] == [expected] * 4
    assert all(same for _, same in launch(biases, 2))


def test_a_fill_that_fails_changes_nothing():
    model = ParallelTransformer(config_of("llama"))
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def read(name, dim, start, stop):
        if name.startswith("model.layers.1"):
            raise OSError("the disk is gone")
        return torch.zeros(())

    with pytest.raises(OSError, match="the disk is gone"):
        model.fill(read)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


# ---- what a step sends ----------------------------------------------------------------------------------------------


def one_step(family, tied, recompute):
    """The ledger of one step, what PyTorch's own counter saw, and every gradient."""
    from torch.distributed.tensor.debug import CommDebugMode

    warnings.simplefilter("ignore")  # PyTorch's counter hooks modules whose input takes no gradient
    torch.manual_seed(0)
    config = config_of(family, tied=tied, kv_heads=4, layers=3)
    model = ParallelTransformer(config, recompute=recompute)
    ids, targets = torch.randint(V, (2, B, S))
    with record() as ledger, CommDebugMode() as mode:
        model.loss(ids, targets).backward()
    events = [(event.phase, event.op, event.shape) for event in ledger.events]
    witness, sent = mode.get_total_counts(), (ledger.payload_bytes(), ledger.wire_bytes())
    return events, witness, sent, [parameter.grad for parameter in model.parameters()]


def all_steps():
    return {case: one_step(*case) for case in product(("gpt2", "llama"), (True, False), (False, True))}


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_step_sends_four_all_reduces_a_layer_and_six_with_recomputation(t):
    """In order, by phase and shape; bytes; and the same number from a witness that is independent of the ledger. Tied
    or not, the head's dX is one. Recomputation changes no gradient by a bit."""
    L, stream, token = 3, (B, S, 4 * D), (B, S)
    for steps in launch(all_steps, t):
        for (family, tied, recompute), (events, witness, sent, gradients) in steps.items():
            if t == 1:
                assert events == [] and witness == 0
                continue
            forward = [("forward", stream)] * (1 + 2 * L) + [("forward", token)] * 3
            backward = [("backward", stream)]  # the head's
            for _ in range(L):
                backward += [("recompute", stream)] * (2 if recompute else 0) + [("backward", stream)] * 2
            expected = [(phase, "all_reduce", shape) for phase, shape in forward + backward]
            assert events == expected, (family, tied, recompute)
            assert len(events) == (6 if recompute else 4) * L + 2 + 3 == witness
            payload = 4 * (((6 if recompute else 4) * L + 2) * B * S * 4 * D + 3 * B * S)  # float32
            assert sent == (payload, payload * 2 * (t - 1) // t)
            plain = steps[family, tied, False][3]
            assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def stopped_early():
    """How many all-reduces a recomputed layer sends, dropout on and off, if PyTorch may stop where it likes."""
    import tpcode.model as module

    counts = []
    for p in (0.0, 0.1):
        model = ParallelTransformer(config_of("gpt2", kv_heads=4, layers=1, dropout=p), recompute=True)
        again = module.checkpoint
        module.checkpoint = lambda *args, again=again, **kwargs: again(*args, **{**kwargs, "early_stop": True})
        try:
            with record() as ledger:
                model.loss(*torch.randint(V, (2, B, S))).backward()
        finally:
            module.checkpoint = again
        counts.append(ledger.count(phase="recompute"))
    return counts


def test_an_early_stop_would_skip_the_last_all_reduce():
    """Why the model says early_stop=False: otherwise the FFN's sum is not computed again, which nothing in backward
    needs, unless dropout follows it."""
    assert launch(stopped_early, 2) == [[1, 2]] * 2


# ---- initialisation -------------------------------------------------------------------------------------------------


def initialised(seed, std):
    """For both families: the merged weights, this rank's shards, how many parameters were made whole; and how many of
    these lived at once."""
    import weakref

    import tpcode.model as module

    made, alive = [], []

    def counting(name, *args):
        whole = initial(name, *args)
        made.append(weakref.ref(whole))
        alive.append(sum(ref() is not None for ref in made))
        return whole

    module.initial = counting
    try:
        found = {}
        for family in ("gpt2", "llama"):
            torch.rand(dist.get_rank() + 1)  # what else is drawn is of no concern
            made.clear()
            model = ParallelTransformer(config_of(family, tied=False), seed=seed, std=std)
            wholes = {name: parameter.detach() for name, parameter in model.to_dense().named_parameters()}
            own = {name: parameter.detach() for name, parameter in model.named_parameters()}
            found[family] = wholes, own, len(made)
        return found, max(alive)
    finally:
        module.initial = initial


@pytest.mark.parametrize("std", [0.02, None])
def test_initial_weights_do_not_depend_on_t(std):
    """Rules out: another model for another t, and one shard on all ranks. Merged weights are the dense model's, bit by
    bit; no two ranks hold the same share of what is cut. Not vacuous: another seed gives other weights."""
    for family in ("gpt2", "llama"):
        config = config_of(family, tied=False)
        dense = {name: p.detach() for name, p in MODELS[family](config, seed=5, std=std).named_parameters()}
        other = MODELS[family](config, seed=6, std=std)
        for t in (1, 2, 4):
            by_rank = [found[family] for found, _ in initialised_at(t, 5, std)]
            for wholes, own_shards, made in by_rank:
                assert wholes.keys() == dense.keys()
                assert all(torch.equal(wholes[name], dense[name]) for name in dense)
                assert made == len(dense)  # each once, on each rank
                assert own_shards.keys() == own(dense, config, 0, t).keys()
            for i, (_, mine, _) in enumerate(by_rank):
                for j, (_, theirs, _) in enumerate(by_rank[:i]):
                    same = {name for name in mine if torch.equal(mine[name], theirs[name])}
                    whole_everywhere = {name for name in mine if mine[name].dim() == 1 or "positions" in name}
                    assert same == whole_everywhere, (i, j)
        assert not any(torch.equal(p, dense[name]) for name, p in other.named_parameters() if p.dim() == 2)


initialised_at = functools.cache(lambda t, seed, std: launch(initialised, t, seed, std))


def test_a_rank_makes_one_whole_parameter_at_a_time():
    """The last one made and the one before it at most, of 21 and more: no rank needs the memory of the whole model."""
    assert all(alive <= 2 for _, alive in initialised_at(4, 5, 0.02))


def test_initial_weights_have_the_spread_of_the_whole_weight():
    """Standard deviations of large matrices: 0.02, and 0.02/√(2L) where a block's output is; or by the fan-in of the
    whole weight. Norms begin with 1, biases with 0."""

    def spread(name, shape, std=0.02):
        return initial(name, shape, layers=8, seed=0, std=std).std().item()

    assert spread("transformer.h.0.mlp.c_fc.weight", (400, 100)) == pytest.approx(0.02, rel=0.02)
    for name in ("transformer.h.0.attn.c_proj", "model.layers.3.self_attn.o_proj", "model.layers.3.mlp.down_proj"):
        assert spread(f"{name}.weight", (100, 400)) == pytest.approx(0.02 / 4, rel=0.02)
        assert spread(f"{name}.weight", (100, 400), std=None) == pytest.approx(400**-0.5 / 4, rel=0.02)
    assert initial("transformer.h.0.ln_1.weight", (3,), 2).tolist() == [1, 1, 1]
    assert initial("transformer.h.0.ln_1.bias", (3,), 2).tolist() == [0, 0, 0]


# ---- token by token -------------------------------------------------------------------------------------------------


def with_caches(family):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    dense = random_dense(config_of(family))
    split = ParallelTransformer.from_dense(dense)
    ids = torch.randint(V, (B, S))
    caches, dense_caches = ([KVCache() for _ in split.blocks] for _ in range(2))
    with torch.no_grad():
        parts = [(split(part, caches), dense(part, dense_caches)) for part in ids.split([3, 1, 2], 1)]
        own_whole, whole = split(ids), dense(ids)
    heads = {cache.keys.shape[1] for cache in caches}
    return (
        largest(torch.cat([a for a, _ in parts], 1), own_whole),
        largest(torch.cat([b for _, b in parts], 1), whole),
        heads,
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_cache_goes_on_where_the_last_call_ended(family):
    """Positions too. Each rank keeps the heads that it has: of 4, or of 2, at t = 2."""
    for split, dense, heads in launch(with_caches, 2, family):
        assert split < TOLERANCE and dense < TOLERANCE
        assert heads == {2 if family == "gpt2" else 1}


# ---- bad input ------------------------------------------------------------------------------------------------------

REFUSALS = {
    "ids must be [b, s] and their shape is [6]": lambda model: model(torch.zeros(6).long()),
    "9 tokens are more than the model's context of 8": lambda model: model(torch.zeros(1, 9).long()),
    "ids must be from 0 to 10, and these go from 0 to 11": lambda model: model(torch.tensor([[0, 11]])),
    "ids must be from 0 to 10, and these go from -1 to 0": lambda model: model(torch.tensor([[0, -1]])),
    "there must be one cache for each of 2 layers, and there are 1": (
        lambda model: model(torch.zeros(1, 1).long(), [KVCache()])
    ),
    "ids must be a tensor and not a list": lambda model: model([[0]]),
    "from_dense takes a GPT2 or Llama of tpcode.dense, and this is a Linear": (
        lambda model: ParallelTransformer.from_dense(nn.Linear(2, 2))
    ),
    "query heads = 9 and KV heads = 3 do not split over t = 2": (
        lambda model: ParallelTransformer(config_of("llama", "9 heads"))
    ),
    "GPT-2 has as many KV heads as query heads, of size h / a": (
        lambda model: ParallelTransformer(config_of("gpt2", kv_heads=2))
    ),
    "GPT2 is of the family gpt2, and this config is of llama": lambda model: MODELS["gpt2"](config_of("llama")),
}


def refusals():
    model, found = ParallelTransformer(config_of("llama")), {}
    for words, call in REFUSALS.items():
        with record() as ledger:
            try:
                call(model)
                found[words] = "nothing was raised"
            except (ValueError, TypeError) as error:
                found[words] = str(error)
        assert ledger.count() == 0
    return found


def test_bad_input_is_refused_on_every_rank_before_anything_is_sent():
    for found in launch(refusals, 2):
        assert found.keys() == REFUSALS.keys()
        assert {words: said for words, said in found.items() if words not in said} == {}
    (said,) = [text for words, text in found.items() if "9 and KV heads" in words]
    assert said.endswith("t that work: 1, 3, 9")


def frozen():
    dense = MODELS["llama"](config_of("llama")).requires_grad_(False).eval()
    dense.model.norm.weight.requires_grad_(True)
    split = ParallelTransformer.from_dense(dense)
    back = split.to_dense()
    learning = [[name for name, p in module.named_parameters() if p.requires_grad] for module in (split, back)]
    return learning, split.training, back.training


def test_frozen_stays_frozen_and_evaluation_stays():
    assert launch(frozen, 2) == [([["norm.weight"], ["model.norm.weight"]], False, False)] * 2
