"""Gradients that are parts are summed and no others; the gradient's norm is the dense model's; a loop that notices when
ranks are fed different batches, and gives the same curve at every t."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tpcode import ModelConfig, ParallelTransformer, RankError
from tpcode.comm import record
from tpcode.dense import MODELS, set_dropout_step
from tpcode.layers import HeadNorm, LayerNorm, ParallelAttention, Placement
from tpcode.runtime import launch
from tpcode.training import AdamW, clip_grad_norm, finalize_grads, train

TOLERANCE = 1e-10
B, S, V = 2, 6, 11  # no t from 2 to 9 divides V


def config_of(family, heads=4, kv_heads=None, **kwargs):
    sizes = {"hidden": 2 * heads, "ffn": 10, "layers": 2, "vocab": V, "max_seq": S, **kwargs}
    return ModelConfig(family=family, heads=heads, kv_heads=kv_heads, **sizes)


def random_dense(config, **options):
    torch.manual_seed(0)
    dense = MODELS[config.family](config, dtype=torch.float64, **options)
    for name, parameter in dense.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name or "ln" in name), std=0.4)
    return dense


# ---- which gradients are summed -------------------------------------------------------------------------------------


def finalized(partial):
    """Each gradient after, in units of what rank 0 had before; and what was sent. Rank r has r + 1 times rank 0's."""
    model = ParallelTransformer(config_of("gpt2"))
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.partial_grad = partial
    for i, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, i * (dist.get_rank() + 1.0))
    with record() as ledger:
        finalize_grads(model)
    after = {}
    for i, (name, parameter) in enumerate(model.named_parameters(), 1):
        (after[name],) = (parameter.grad / i).unique().tolist()
    return after, [(event.op, event.shape) for event in ledger.events]


def test_parts_are_summed_and_nothing_else():
    """Norms that say so, as under sequence parallelism: the sum over the ranks, in one all-reduce. Rules out: summing
    by name or by shape, for row biases and positions, which are whole here, stay as they are; and the mean."""
    for rank, (after, sent) in enumerate(launch(finalized, 2, True)):
        norms = {name for name in after if "norm" in name}
        assert len(norms) == 2 * (2 * 2 + 1) and len(after) > 20
        assert after == {name: 3.0 if name in norms else rank + 1.0 for name in after}
        assert sent == [("all_reduce", (len(norms) * 8,))]


def test_without_parts_nothing_is_sent():
    """As the model is without sequence parallelism: what every rank has, each has a whole gradient of."""
    for rank, (after, sent) in enumerate(launch(finalized, 2, False)):
        assert set(after.values()) == {rank + 1.0}
        assert sent == []


# ---- the norm -------------------------------------------------------------------------------------------------------

NORMS = {  # t that work
    "gpt2, tied": (config_of("gpt2"), (1, 2, 4)),
    "gpt2, untied": (config_of("gpt2", tied=False), (1, 2, 4)),
    "llama, KV heads replicated": (config_of("llama", kv_heads=1), (1, 2, 4)),
    "llama, 2 KV heads": (config_of("llama", kv_heads=2, tied=False), (1, 2, 4)),
    "llama, 9 heads": (config_of("llama", 9, 3, layers=1), (3, 9)),
}


def norms(poison):
    """For each model that splits here: its norm, the dense one, a naive one; the largest difference after clipping; and
    what was sent."""
    t, found = dist.get_world_size(), {}
    for name, (config, sizes) in NORMS.items():
        if t not in sizes:
            continue
        dense = random_dense(config, bias=True)
        split = ParallelTransformer.from_dense(copy.deepcopy(dense), vocab_multiple=4)
        ids, targets = torch.randint(V, (2, B, S))
        dense.loss(ids, targets).backward()
        split.loss(ids, targets).backward()
        wanted = clip_grad_norm_(dense.parameters(), 0.5).item()
        squares = torch.stack([parameter.grad.square().sum() for parameter in split.parameters()]).sum()
        dist.all_reduce(squares)
        if poison:
            fill_padding(split, 1e3)
        with record() as ledger:
            norm = clip_grad_norm(split, 0.5)
        sent = [(event.op, event.shape) for event in ledger.events]
        clipped = ParallelTransformer.from_dense(with_gradients_as_weights(dense), vocab_multiple=4)
        differences = [
            (own.grad - whole).abs().max().item()
            for own, whole in zip(split.parameters(), clipped.parameters(), strict=True)
        ]
        found[name] = norm, wanted, squares.sqrt().item(), max(differences), sent
    return found


def fill_padding(model, value):
    """Something large where the vocabulary's padding has its gradient, which is zero."""
    weight = model.embedding.weight
    first = dist.get_rank() * len(weight)
    weight.grad[max(V - first, 0) :] = value


def with_gradients_as_weights(module):
    gradients = copy.deepcopy(module)
    for target, parameter in zip(gradients.parameters(), module.parameters()):
        target.data = parameter.grad
    return gradients


@pytest.mark.parametrize("t", [1, 2, 3, 4, 9])
def test_the_norm_is_the_dense_models_and_the_same_on_every_rank(t):
    """Rules out: replicated parameters counted t times, replicas of KV heads once each, tied weights twice. The same
    bits on all ranks; one all-reduce of one number; clipped gradients are the dense ones. Not vacuous: the sum over all
    that all ranks hold is another number."""
    by_rank = launch(norms, t, False)
    for found in by_rank:
        assert found.keys() == {name for name, (_, sizes) in NORMS.items() if t in sizes}
        for name, (norm, wanted, naive, difference, sent) in found.items():
            assert abs(norm - wanted) < TOLERANCE and difference < TOLERANCE, name
            assert wanted > 0.6  # it was clipped
            assert norm == by_rank[0][name][0]
            assert t == 1 or naive - wanted > 1e-3
            assert sent == ([("all_reduce", ())] if t > 1 else [])


def test_padding_never_counts():
    """Whatever is in its gradient. Not vacuous: it would be thousands."""
    for found in launch(norms, 4, True):
        for norm, wanted, *_ in found.values():
            assert abs(norm - wanted) < TOLERANCE


def heads_with_norms():
    """Norms of attention alone, with what QK-norm adds, over 4 ranks of which each two share a KV head."""
    from tpcode.dense import Attention

    found = []
    for kind in ("head", "all"):
        torch.manual_seed(0)
        dense = Attention(8, 4, 2, qk_norm=kind, dtype=torch.float64)
        split = ParallelAttention.from_dense(copy.deepcopy(dense))
        x = torch.randn(B, S, 8, dtype=torch.float64)
        for module in (dense, split):
            module(x).square().sum().backward()
        found.append((clip_grad_norm(split, 1.0), clip_grad_norm_(dense.parameters(), 1.0).item()))
    assert split.placements["k_norm.weight"] == Placement(0, (4,), replicas=2)
    assert HeadNorm(torch.ones(2), 1e-5).placements["weight"] == Placement()
    return found


def test_the_norm_counts_qk_norms_once():
    for found in launch(heads_with_norms, 4):
        assert all(abs(norm - wanted) < TOLERANCE for norm, wanted in found)


def unclipped():
    model = ParallelTransformer(config_of("gpt2"))
    nothing = clip_grad_norm(model, 1.0)
    model.loss(*torch.randint(V, (2, B, S))).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = clip_grad_norm(model, float("inf"))
    same = all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="max_norm must be positive and is 0"):
        clip_grad_norm(model, 0)
    return nothing, norm > 0, same


def test_small_gradients_stay_as_they_are():
    assert launch(unclipped, 2) == [(0.0, True, True)] * 2


# ---- the loop -------------------------------------------------------------------------------------------------------


def some_batches(n=6):
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(V, (n, B, S + 1), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in text]


def curve(family, recompute):
    config = config_of(family, kv_heads=None if family == "gpt2" else 2, dropout=0.2)
    torch.rand(dist.get_rank() + 1)
    model = ParallelTransformer(config, std=None, dtype=torch.float64, recompute=recompute)
    losses = train(model, some_batches(), lr=0.05, progress=False)
    return losses, {name: parameter.detach() for name, parameter in model.to_dense().named_parameters()}


@functools.cache
def dense_curve(family):
    """The same written out for one device, with torch's own optimizer and clipping."""
    config = config_of(family, kv_heads=None if family == "gpt2" else 2, dropout=0.2)
    model = MODELS[family](config, std=None, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    losses = []
    for step, (ids, targets) in enumerate(some_batches()):
        set_dropout_step(model, step)
        loss = model.loss(ids, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_the_loss_curve_is_the_dense_models_at_every_t(t, family, recompute):
    """With dropout, clipping and AdamW, from the first weights on: losses of six steps, and weights after them. Rules
    out: one dropout stream for all, masks drawn anew by recomputation, first weights that depend on t."""
    losses, weights = dense_curve(family)
    for own_losses, own_weights in launch(curve, t, family, recompute):
        assert len(own_losses) == len(losses) == 6
        assert max(abs(a - b) for a, b in zip(own_losses, losses)) < TOLERANCE
        assert own_weights.keys() == weights.keys()
        assert max((own_weights[name] - weights[name]).abs().max().item() for name in weights) < 1e-8  # AdamW divides


def fed_differently(which):
    batches = some_batches()
    if dist.get_rank() in (1, 3):
        ids, targets = batches[2]
        batches[2] = {
            "ids": (ids.flip(0), targets),
            "targets": (ids, targets.roll(1)),
            "shape": (ids[:, :-1], targets[:, :-1]),
        }[which]
    train(ParallelTransformer(config_of("gpt2")), batches, progress=False)


@pytest.mark.parametrize("which", ["ids", "targets", "shape"])
def test_ranks_that_are_fed_different_batches_say_so(which):
    """Rules out: a model that trains on as many batches as there are ranks, of which nothing else would tell."""
    words = r"step 2: ranks 1, 3 of the tensor-parallel group got another batch than rank 0. These ranks work on one"
    with pytest.raises(RankError, match=words):
        launch(fed_differently, 4, which)


def with_bar(length):
    batches = some_batches(3)
    train(ParallelTransformer(config_of("gpt2")), batches if length else iter(batches))


@pytest.mark.parametrize(
    ("length", "shown"), [(True, "[####################..........] step 2/3  loss "), (False, "step 2  loss ")]
)
def test_rank_0_shows_how_far_it_is(capfd, length, shown):
    launch(with_bar, 2, length)
    printed = capfd.readouterr().out
    assert printed.count(shown) == 1 and printed.count("\r") >= 3 and "rank 1" not in printed


def test_adamw_is_torchs():
    """Over ten steps with weight decay, a parameter without gradient and a frozen one among them."""
    ours, theirs = (nn.ParameterList([torch.randn(3, 4), torch.randn(5), torch.randn(2), torch.randn(2)]) for _ in "ab")
    theirs.load_state_dict(ours.state_dict())
    optimizers = []
    for module, cls in ((ours.double(), AdamW), (theirs.double(), torch.optim.AdamW)):
        module[3].requires_grad_(False)
        optimizers.append(cls(module.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2))
    for step in range(10):
        for module, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            ((module[0].sin() ** 2).sum() * (step + 1) + (module[1] ** 3).sum()).backward()
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
