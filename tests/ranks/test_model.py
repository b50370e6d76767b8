"""A whole transformer on t ranks equals the dense one: logits, loss, every gradient, weights after three steps; what a
step sends; initialisation and dropout that do not depend on t.

The dense parameters are cut here by hand, by heads and by chunks, apart from the package's placements and sources.
Weights are random, hence distinct in every entry, biases and norms too.
"""

import copy
import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode import ModelConfig, ParallelTransformer
from tpcode.dense import MODELS, set_dropout_step
from tpcode.runtime import launch

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
    sizes = {"hidden": a * D, "ffn": F, "layers": L, "vocab": V, "max_seq": S + 2, **kwargs}
    return ModelConfig(family=family, heads=a, kv_heads=k if family == "llama" else a, tied=tied, **sizes)


def random_dense(config, bias=None, **options):
    """A dense model of which every entry is distinct, and large enough to be seen."""
    dense = MODELS[config.family](config, bias=bias, **options)
    for name, parameter in dense.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name or "ln" in name), std=0.4)
    return dense


# ---- what a rank holds, by hand -------------------------------------------------------------------------------------


def share(whole, dim, rank, t):
    """A plain chunk, zeros added where t does not divide."""
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


def compare_all(names, members=None):
    """`compare` for every case: one job, since each costs a group of its own otherwise."""
    group = None
    if members:
        groups = [dist.new_group(ranks) for ranks in members]
        number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
        group = groups[number]
        torch.manual_seed(number)  # each group has a problem of its own
    torch.set_default_dtype(torch.float64)
    return {name: compare(*CASES[name], group) for name in names}


def compare(family, heads, tied, bias, options, group):
    """Largest differences to dense, by name, on this rank, over three steps of SGD, and the numbers of parameters."""
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    config = config_of(family, heads, tied, dropout=options.get("dropout", 0.0))
    dense = random_dense(config, bias)
    split = ParallelTransformer.from_dense(copy.deepcopy(dense), group, recompute=options.get("recompute", False))
    logits, differences = [], {}
    split.head.register_forward_hook(lambda module, args, output: logits.append(output))
    for step in range(3):
        ids, targets = torch.randint(V, (2, B, S))
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


def cases_at(t):
    return tuple(name for name, (_, heads, *_) in CASES.items() if t in HEADS[heads][-1])


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
