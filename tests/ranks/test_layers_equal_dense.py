"""Split layers equal dense ones: output, every gradient on every rank, an optimizer's steps, and the way back.

One table for all layers. The dense layer is cut here by `chunk`, apart from the package's placements, so that a wrong
placement cannot agree with itself. Weights, inputs and the gradient that comes back are random, hence distinct in every
entry; the gradient is not of a sum, whose equal rows would hide a rank that reads its own rows only.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode.dense import FFN, SwiGLU
from tpcode.layers import ColumnParallelLinear, ParallelFFN, ParallelSwiGLU, RowParallelLinear
from tpcode.runtime import launch

TOLERANCE = 1e-12
BATCH, SEQUENCE, HIDDEN = 3, 7, 5


@dataclass(frozen=True)
class Cut:
    """How one dense tensor becomes a rank's: along dim, in segments, zeros added where t does not divide."""

    dim: int
    segments: tuple[int, ...] | None = None

    def of(self, whole, rank, t):
        pieces = []
        for part in whole.split(self.segments or whole.shape[self.dim], self.dim):
            missing = list(part.shape)
            missing[self.dim] = -part.shape[self.dim] % t
            pieces.append(torch.cat([part, part.new_zeros(missing)], self.dim).chunk(t, self.dim)[rank])
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True)
class Case:
    """A dense module, its split counterpart, and how parameters, input and output correspond."""

    dense: object
    split: type
    cuts: dict
    input: Cut | None = None
    output: Cut | None = None
    options: dict = field(default_factory=dict)
    features: int = HIDDEN
    shape: tuple[int, ...] = (BATCH, SEQUENCE)


ROWS, COLUMNS = Cut(0), Cut(1)
COLUMN = {"weight": ROWS, "bias": ROWS}
ROW = {"weight": COLUMNS, "bias": None}
FFN_CUTS = {"c_fc.weight": ROWS, "c_fc.bias": ROWS, "c_proj.weight": COLUMNS, "c_proj.bias": None}


def column(F=12, bias=True, **kwargs):
    kwargs = {"cuts": COLUMN, "output": Cut(-1), **kwargs}
    return Case(lambda: nn.Linear(HIDDEN, F, bias), ColumnParallelLinear, **kwargs)


def row(F=12, bias=True, **kwargs):
    kwargs = {"input": Cut(-1), **kwargs}
    return Case(lambda: nn.Linear(F, HIDDEN, bias), RowParallelLinear, ROW, features=F, **kwargs)


def fused(*segments):
    cut = Cut(0, segments)
    options = {"segments": segments, "pad": True}
    return column(sum(segments), output=Cut(-1, segments), options=options, cuts={"weight": cut, "bias": cut})


def ffn(F=12, **kwargs):
    options = {"pad": F % 4 > 0}
    return Case(lambda: FFN(HIDDEN, F, **kwargs), ParallelFFN, FFN_CUTS, options=options)


def swiglu(F=12, bias=False):
    gate_up = Cut(0, (F, F))
    cuts = {"gate_up.weight": gate_up, "gate_up.bias": gate_up, "down_proj.weight": COLUMNS, "down_proj.bias": None}
    return Case(lambda: SwiGLU(HIDDEN, F, bias), ParallelSwiGLU, cuts, options={"pad": F % 4 > 0})


CASES = {
    "column": column(),
    "column, no bias": column(bias=False),
    "column, 1-D": column(shape=()),
    "column, 2-D": column(shape=(7,)),
    "column, 4-D": column(shape=(2, 3, 2)),
    "column, no tokens": column(shape=(0, 7)),
    "column, gathered": column(output=None, options={"gather_output": True}),
    "column, gathered, no bias, 1-D": column(bias=False, output=None, options={"gather_output": True}, shape=()),
    "column, padded": column(F=10, options={"pad": True}),
    "column, fused": fused(12, 12),
    "column, fused unevenly": fused(8, 4, 4),
    "column, fused and padded": fused(5, 9),
    "row": row(),
    "row, no bias": row(bias=False),
    "row, 1-D": row(shape=()),
    "row, 2-D": row(shape=(7,)),
    "row, 4-D": row(shape=(2, 3, 2)),
    "row, no tokens": row(shape=(0, 7)),
    "row, whole input": row(input=None, options={"input_is_parallel": False}),
    "row, padded": row(F=10, options={"pad": True}),
    "ffn": ffn(),
    "ffn, no bias": ffn(bias=False),
    "ffn, exact gelu": ffn(activation="gelu"),
    "ffn, relu": ffn(activation="relu"),
    "ffn, padded": ffn(F=10),
    "ffn, padded, silu, no bias": ffn(F=9, activation="silu", bias=False),
    "swiglu": swiglu(),
    "swiglu, bias": swiglu(bias=True),
    "swiglu, padded": swiglu(F=10),
    "swiglu, padded, bias": swiglu(F=9, bias=True),
}


def compare_all(members=None):
    """`compare` for every case: one job, since each costs a group of its own otherwise."""
    group = None
    if members:
        groups = [dist.new_group(ranks) for ranks in members]
        number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
        group = groups[number]
        torch.manual_seed(number)  # each group has a problem of its own
    torch.set_default_dtype(torch.float64)
    return {name: compare(case, group) for name, case in CASES.items()}


def compare(case, group):
    """Largest differences to the dense layer, by name, on this rank, and how many parameters each layer has."""
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    dense = case.dense()
    split = case.split.from_dense(copy.deepcopy(dense), group, **case.options)
    optimizers = [Adam(dense), Adam(split)]

    differences = {}
    for step in range(2):
        x = torch.randn(*case.shape, case.features, requires_grad=True)
        mine = _own(case.input, x.detach(), rank, t).requires_grad_()
        y_dense, y = dense(x), split(mine)
        dy = torch.randn_like(y_dense)
        y_dense.backward(dy)
        y.backward(_own(case.output, dy, rank, t))
        differences[f"output {step}"] = _largest(y, _own(case.output, y_dense, rank, t))
        differences[f"input's gradient {step}"] = _largest(mine.grad, _own(case.input, x.grad, rank, t))
        wholes = _renamed(case, {key: parameter.grad for key, parameter in dense.named_parameters()})
        for key, parameter in split.named_parameters():
            own = _own(case.cuts[key], wholes[key], rank, t)
            differences[f"{key}'s gradient {step}"] = _largest(parameter.grad, own)
        for optimizer in optimizers:
            optimizer.step()
    back = split.to_dense()
    assert type(back) is type(dense)
    for (key, whole), (other, stepped) in zip(back.named_parameters(), dense.named_parameters(), strict=True):
        assert key == other
        differences[f"{key} after two steps"] = _largest(whole, stepped)
    return differences, len(list(dense.parameters())), len(list(split.parameters()))


class Adam:
    """Adam with weight decay. Torch's own takes seconds to import; one test below uses it."""

    def __init__(self, module):
        self.entries = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in module.parameters()]

    @torch.no_grad()
    def step(self):
        for p, mean, square in self.entries:
            grad = p.grad + 0.1 * p
            mean.lerp_(grad, 0.1)
            square.lerp_(grad**2, 0.01)
            p -= 0.1 * mean / (square.sqrt() + 1e-3)
            p.grad = None


def _own(cut, whole, rank, t):
    return whole.clone() if cut is None else cut.of(whole, rank, t)


def _renamed(case, wholes):
    """Dense tensors under the split layer's names: gate and up are one there."""
    if case.split is ParallelSwiGLU:
        for kind in ("weight", "bias"):
            if f"gate_proj.{kind}" in wholes:
                wholes[f"gate_up.{kind}"] = torch.cat([wholes[f"gate_proj.{kind}"], wholes[f"up_proj.{kind}"]])
    return wholes


def _largest(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == torch.float64
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


answers = functools.cache(lambda t, members=None: launch(compare_all, t, members))


def assert_equal(by_rank, name, t):
    assert len(by_rank) == t
    for answer in by_rank:
        differences, dense_parameters, split_parameters = answer[name]
        assert len(differences) == 2 * (2 + split_parameters) + dense_parameters  # nothing was left out
        assert {what: size for what, size in differences.items() if not size < TOLERANCE} == {}


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_split_equals_dense(name, t):
    """Not vacuous: the number of comparisons is counted, and a difference of any entry by 1e-12 fails."""
    assert_equal(answers(t), name, t)


@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((2, 0), (3, 1))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_split_equals_dense_in_subgroups_of_four(name, members):
    """Rules out: a collective or a shard by the world's ranks. Not vacuous: the groups' problems differ. Every rank
    makes every group, in one order; a group made by its members only would hang."""
    assert_equal(answers(4, members), name, 4)


def padding_after_training():
    """The largest entry of the padding, of its gradient, and of the change of the rest, over five steps of AdamW."""
    torch.manual_seed(0)
    found = []
    for split in (
        ParallelSwiGLU.from_dense(SwiGLU(HIDDEN, 9, bias=True), pad=True),
        ParallelFFN.from_dense(FFN(HIDDEN, 9), pad=True),
    ):
        before = [parameter.detach().clone() for parameter in split.parameters()]
        optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, weight_decay=0.1)
        gradients = 0.0
        for _ in range(5):
            optimizer.zero_grad()
            split(torch.randn(BATCH, SEQUENCE, HIDDEN)).square().sum().backward()
            gradients += sum(_padding(split, key, p.grad) for key, p in split.named_parameters())
            optimizer.step()
        padding = sum(_padding(split, key, p) for key, p in split.named_parameters())
        moved = min((p - b).abs().max().item() for p, b in zip(split.parameters(), before, strict=True))
        found.append((padding, gradients, moved))
    return found


def _padding(split, key, tensor):
    """The largest entry of rank 1's padding: of F = 9 over two ranks, its fifth of five in each segment."""
    placement = split.placements[key]
    if placement.dim is None or dist.get_rank() == 0:
        return 0.0
    parts = tensor.chunk(len(placement.segments), placement.dim)
    assert all(part.shape[placement.dim] == 5 for part in parts)
    return max(part.select(placement.dim, 4).abs().max().item() for part in parts)


def test_padding_stays_zero_under_training():
    """Padded entries get gradients of exactly zero: act(0) = 0 makes those of the second matrix zero, and its zero rows
    those of the first. Not vacuous: every parameter moved."""
    for found in launch(padding_after_training, 2):
        for padding, gradients, moved in found:
            assert padding == gradients == 0.0
            assert moved > 0.1
