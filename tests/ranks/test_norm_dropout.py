"""Norms are the dense ones on every rank; dropout drops what the dense model drops, at every t."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpcode import dense
from tpcode.comm import all_reduce, record
from tpcode.layers import Dropout, LayerNorm, ParallelAttention, Placement, RMSNorm, placements, set_dropout_step
from tpcode.runtime import launch

TOLERANCE = 1e-12
B, S, H, A, D = 2, 8, 6, 4, 4

# ---- norms ----------------------------------------------------------------------------------------------------------

NORMS = {
    "layer": (LayerNorm, lambda: nn.LayerNorm(H, eps=1e-3)),
    "layer, no bias": (LayerNorm, lambda: nn.LayerNorm(H, bias=False)),
    "layer, no weight": (LayerNorm, lambda: nn.LayerNorm(H, elementwise_affine=False)),
    "rms": (RMSNorm, lambda: nn.RMSNorm(H, eps=1e-3)),
    "rms, no weight": (RMSNorm, lambda: nn.RMSNorm(H, elementwise_affine=False)),
}


def make_norm(name):
    cls, make = NORMS[name]
    norm = make().double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=1.0)  # distinct in every entry
    return cls, norm


def norms():
    """For each: whether output, dX, gradients and a step are the dense norm's bit by bit, and what was sent."""
    torch.manual_seed(0)
    found = {}
    for name in NORMS:
        cls, plain = make_norm(name)
        split = cls.from_dense(copy.deepcopy(plain))
        x, dy = torch.randn(B, S, H, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
        results = []
        for norm in (plain, split):
            leaf = x.clone().requires_grad_()
            with record() as ledger:
                y = norm(leaf)
                y.backward(dy)
            gradients = [parameter.grad for parameter in norm.parameters()]
            with torch.no_grad():
                for parameter in norm.parameters():
                    parameter -= 0.1 * parameter.grad
            results.append([y, leaf.grad, *gradients, *norm.parameters()])
        back = split.to_dense()
        results.append(list(back.parameters()))
        ours, theirs, merged = results[1], results[0], results[2]
        same = [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
        same += [torch.equal(a, b) for a, b in zip(merged, plain.parameters(), strict=True)]
        found[name] = same, ledger.count(), str(back) == str(plain), split.placements == placements(split)
    return found


@pytest.mark.parametrize("t", [1, 2, 4])
def test_norms_are_the_dense_ones_on_every_rank(t):
    """Replicated, silent both ways, gradients whole: the same to the last bit."""
    count = {"layer": 2, "layer, no bias": 1, "layer, no weight": 0, "rms": 1, "rms, no weight": 0}
    expected = {name: ([True] * (2 + 3 * n), 0, True, True) for name, n in count.items()}
    assert launch(norms, t) == [expected] * t


def norm_of_own_tokens():
    """Largest differences to dense of each parameter's gradient, summed over the ranks and not, tokens being split."""
    torch.manual_seed(0)
    found = []
    for name in ("layer", "rms"):
        cls, plain = make_norm(name)
        split = cls.from_dense(copy.deepcopy(plain), partial_grad=True)
        assert split.placements == {key: Placement(partial_grad=True) for key, _ in plain.named_parameters()}
        x, dy = torch.randn(B, S, H, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
        plain(x).backward(dy)
        rank, t = dist.get_rank(), dist.get_world_size()
        split(x.chunk(t, 1)[rank]).backward(dy.chunk(t, 1)[rank])
        for own, whole in zip(split.parameters(), plain.parameters(), strict=True):
            found.append([(part - whole.grad).abs().max().item() for part in (all_reduce(own.grad), own.grad)])
    return found


def test_the_gradient_of_a_norm_of_own_tokens_is_a_part():
    """What `partial_grad` declares: the sum over the ranks is the dense gradient, and neither is a rank's own value."""
    for found in launch(norm_of_own_tokens, 2):
        assert len(found) == 3
        assert all(summed < TOLERANCE and own > 0.1 for summed, own in found)


def test_norms_refuse_what_they_are_not():
    with pytest.raises(TypeError, match=r"LayerNorm.from_dense takes a torch.nn.LayerNorm, and this is a RMSNorm"):
        LayerNorm.from_dense(nn.RMSNorm(H))
    with pytest.raises(TypeError, match=r"RMSNorm.from_dense takes a torch.nn.RMSNorm, and this is a LayerNorm"):
        RMSNorm.from_dense(nn.LayerNorm(H))
    assert placements(LayerNorm(H)) == {"weight": Placement(), "bias": Placement()}  # made directly
    frozen = LayerNorm.from_dense(nn.LayerNorm(H).requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in (*frozen.parameters(), *frozen.to_dense().parameters()))


# ---- dropout --------------------------------------------------------------------------------------------------------

CUTS = {"whole": (None, (B, S, H)), "heads": (1, (B, A, S, S)), "tokens": (1, (B, S, H))}


def dropped(disturb):
    """For each cut: whether output and gradient are the dense ones to the last bit, and the masks of three steps."""
    rank, t, found = dist.get_rank(), dist.get_world_size(), {}
    for name, (dim, shape) in CUTS.items():
        plain = dense.Dropout(0.4, name, seed=7)
        split = Dropout.from_dense(plain, dim=dim)
        x, dy = (torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * sign for sign in (1, -1))

        def own(whole, dim=dim):
            return whole if dim is None else whole.chunk(t, dim)[rank]

        same, masks = [], []
        for step in range(3):
            if disturb:
                torch.manual_seed(rank + step)
                torch.rand(rank + 5)
            leaves = [x.clone().requires_grad_(), own(x).clone().requires_grad_()]
            for dropout in (plain, split):
                set_dropout_step(dropout, step)
            whole, y = plain(leaves[0]), split(leaves[1])
            whole.backward(dy)
            y.backward(own(dy))
            same += [torch.equal(y, own(whole)), torch.equal(leaves[1].grad, own(leaves[0].grad))]
            masks.append((y != 0).detach())
        found[name] = same, masks
    return found


@pytest.mark.parametrize("disturb", [False, True])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_dropout_is_the_dense_models_at_every_t(t, disturb):
    """Whole tensors, heads of attention probabilities, tokens. Rules out: masks from streams that other draws move;
    here each rank draws otherwise. Not vacuous: entries are distinct, and masks differ from step to step."""
    for found in launch(dropped, t, disturb):
        for name, (same, masks) in found.items():
            assert same == [True] * 6, name
            assert all(0.3 < mask.float().mean() < 0.9 for mask in masks)
            assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_a_replicated_region_has_one_mask_and_a_split_one_has_many():
    """Rules out: one dropout stream for all. Where every rank has all of the residual stream all must drop alike; where
    each has heads or tokens of its own, no two ranks do."""
    by_rank = [{name: masks[0] for name, (_, masks) in found.items()} for found in launch(dropped, 4, True)]
    for i, found in enumerate(by_rank):
        for other in by_rank[:i]:
            assert torch.equal(found["whole"], other["whole"])
            assert not torch.equal(found["heads"], other["heads"])
            assert not torch.equal(found["tokens"], other["tokens"])


def kept():
    """Of what a dropout keeps for backward: dtype, and bytes that stay in memory for it."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        Dropout(0.5, "a", dim=1)(torch.randn(B, S, H, requires_grad=True))
    return [(str(x.dtype), x.untyped_storage().nbytes()) for x in saved]


def test_only_the_slices_mask_is_kept():
    """One byte an entry, of this rank's entries: not a view of the whole mask."""
    assert launch(kept, 4) == [[("torch.bool", B * S * H)]] * 4


def attention_with_dropout(kv_heads, core, again, wrong):
    """Largest differences to dense of output, dX and every gradient; with `again` the forward runs again for backward,
    and other numbers are drawn in between."""
    torch.manual_seed(0)
    options = {"head_dim": D, "rope_theta": 1e4, "dtype": torch.float64}
    plain = dense.Attention(H, A, kv_heads, core=core, dropout=dense.Dropout(0.3, "scores"), **options)
    split = ParallelAttention.from_dense(copy.deepcopy(plain))
    if wrong:  # as if every rank held the whole: one stream
        split.dropout.dim = None
    x, dy = (torch.randn(B, S, H, dtype=torch.float64) for _ in range(2))
    differences = []
    for step in range(2):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for module in (plain, split):
            set_dropout_step(module, step)
            module.zero_grad()
        y = checkpoint(split, leaves[1], use_reentrant=False, preserve_rng_state=False) if again else split(leaves[1])
        torch.rand(dist.get_rank() + 1)
        wanted = plain(leaves[0])
        wanted.backward(dy)
        y.backward(dy)
        differences += [(y - wanted).abs().max().item(), (leaves[1].grad - leaves[0].grad).abs().max().item()]
        gradients = ParallelAttention.from_dense(with_gradients_as_weights(plain))
        for own, whole in zip(split.parameters(), gradients.parameters(), strict=True):
            differences.append((own.grad - whole).abs().max().item())
    return differences


def with_gradients_as_weights(module):
    gradients = copy.deepcopy(module)
    for target, parameter in zip(gradients.parameters(), module.parameters()):
        target.data = parameter.grad
    return gradients


@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("core", ["sdpa", "explicit"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_attention_with_dropout_equals_dense(t, kv_heads, core, again):
    """Rules out: a mask by the head's local number; another mask when activations are recomputed. Not vacuous: see the
    next test."""
    for differences in launch(attention_with_dropout, t, kv_heads, core, again, False):
        assert len(differences) == 2 * 4
        assert max(differences) < TOLERANCE


def test_one_stream_for_all_heads_is_seen():
    for differences in launch(attention_with_dropout, 2, 4, "sdpa", False, True):
        assert min(differences) > 1e-3


def switched():
    torch.manual_seed(0)
    plain = dense.Attention(H, A, dropout=dense.Dropout(0.5, "scores"), head_dim=D).eval()
    split = ParallelAttention.from_dense(plain)
    x = torch.randn(B, S, H)
    return (split(x) - plain(x)).abs().max().item(), split.dropout.training, str(split.to_dense()) == str(plain)


def test_evaluation_drops_nothing():
    for difference, training, same in launch(switched, 2):
        assert difference < 1e-6 and not training and same


def test_dropout_refuses_what_it_cannot_slice():
    with pytest.raises(TypeError, match=r"Dropout.from_dense takes a tpcode.dense.Dropout, and this is a Dropout"):
        Dropout.from_dense(nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"cut along dimension 3, and its shape is \[2, 8, 6\]"):
        Dropout(0.1, "a", dim=3)(torch.ones(B, S, H))
    with pytest.raises(ValueError, match="dim must be at least 0 and is -1"):
        Dropout(0.1, "a", dim=-1)
