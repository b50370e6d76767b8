"""Placements: shard and merge read one declaration, and refuse what has the wrong length."""

import pytest
import torch
from torch import nn

from tpcode.dense import FFN, SwiGLU
from tpcode.layers import ColumnParallelLinear, ParallelFFN, ParallelSwiGLU, Placement, RowParallelLinear, placements


def distinct(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize(
    ("placement", "shape", "sizes"),
    [
        (Placement(0, (12,)), (12, 5), {1: 12, 2: 6, 4: 3}),
        (Placement(1, (12,)), (5, 12), {1: 12, 3: 4}),
        (Placement(0, (12,)), (12,), {1: 12, 4: 3}),
        (Placement(0, (12, 12)), (24, 5), {1: 24, 2: 12, 4: 6}),
        (Placement(0, (12, 4, 4)), (20, 3), {1: 20, 2: 10, 4: 5}),
        (Placement(0, (10,), pad=True), (10, 5), {1: 10, 2: 5, 4: 3, 8: 2}),
        (Placement(1, (3,), pad=True), (5, 3), {1: 3, 2: 2, 4: 1, 8: 1}),
        (Placement(0, (5, 7), pad=True), (12, 2), {1: 12, 2: 7, 4: 4}),
        (Placement(0, (6,), replicas=2), (6, 5), {2: 6, 4: 3}),
        (Placement(0, (12, 6, 6), replicas=(1, 2, 2)), (24, 2), {2: 18, 4: 9}),
        (Placement(), (7,), {1: None, 2: None, 4: None}),
    ],
    ids=str,
)
def test_shards_merge_to_the_whole_at_every_t(placement, shape, sizes):
    """Shard for one t, merge, shard for the next: what a checkpoint goes through. Entries are distinct."""
    whole = distinct(*shape)
    for t, size in sizes.items():
        shards = [placement.shard(whole, rank, t) for rank in range(t)]
        assert placement.shard_size(t) == size
        assert all(size is None or shard.shape[placement.dim] == size for shard in shards)
        assert torch.equal(placement.merge(shards), distinct(*shape))
        if placement.dim is not None:
            numbers = [placement.rows(rank, t)[placement.counted(rank, t)] for rank in range(t)]
            assert sorted(torch.cat(numbers).tolist()) == list(range(placement.true_size))  # each once, no padding
        for shard in shards:
            shard.zero_()  # a shard is a tensor of its own
        assert torch.equal(whole, distinct(*shape))


def test_a_fused_matrix_is_cut_part_by_part():
    """Rules out: gate above up, cut in plain halves, which have the right shape and are all gate and all up."""
    gate_up = torch.arange(8.0).reshape(8, 1)  # gate 0 1 2 3, up 4 5 6 7
    shards = [Placement(0, (4, 4)).shard(gate_up, rank, 2).flatten().tolist() for rank in range(2)]
    assert shards == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_padding_is_zeros_at_the_end_of_each_part():
    shards = [Placement(0, (3, 2), pad=True).shard(distinct(5), rank, 2).tolist() for rank in range(2)]
    assert shards == [[1, 2, 4], [3, 0, 5]]
    shards = [Placement(0, (2,), pad=True).shard(distinct(2), rank, 4).tolist() for rank in range(4)]
    assert shards == [[1], [2], [0], [0]]


def test_replicas_are_neighbours():
    placement = Placement(0, (4, 2), replicas=(1, 2))
    shards = [placement.shard(distinct(6), rank, 4).tolist() for rank in range(4)]
    assert shards == [[1, 5], [2, 5], [3, 6], [4, 6]]


def test_a_whole_is_not_taken_for_a_shard_nor_a_shard_for_a_whole():
    """Rules out: a local tensor where the global one is meant, and the reverse."""
    placement, whole = Placement(0, (12,)), distinct(12, 5)
    shard = placement.shard(whole, 0, 4)
    with pytest.raises(ValueError, match=r"a whole over t = 4 must have 12 along dimension 0, .* shape is \[3, 5\]"):
        placement.shard(shard, 0, 4)
    with pytest.raises(ValueError, match=r"a shard of t = 4 must have 3 along dimension 0, .* shape is \[12, 5\]"):
        placement.merge([shard, shard, shard, whole])
    with pytest.raises(ValueError, match=r"a shard of t = 2 must have 6 along dimension 0, .* shape is \[3, 5\]"):
        placement.merge([shard, shard])
    with pytest.raises(ValueError, match=r"must have 12 along dimension 0, .* shape is \[\]"):
        placement.shard(torch.tensor(1.0), 0, 4)


def test_sizes_that_do_not_divide_are_refused_or_carried():
    """Rules out: 5 features over 2 ranks that forget they were 5."""
    with pytest.raises(ValueError, match="F = 5 does not divide by t = 2; t that work: 1, 5; or pad it with zeros"):
        Placement(0, (5,)).shard(distinct(5), 0, 2, "F")
    carried = Placement(0, (5,), pad=True)
    assert (carried.true_size, carried.shard_size(2)) == (5, 3)
    assert carried.merge([carried.shard(distinct(5), rank, 2) for rank in range(2)]).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Placement(0), ValueError, "segments is empty"),
        (lambda: Placement(segments=(4,)), ValueError, "dim is None"),
        (lambda: Placement(replicas=2), ValueError, "dim is None"),
        (lambda: Placement(-1, (4,)), ValueError, "dim must be at least 0 and is -1"),
        (lambda: Placement(0, (4, 0)), ValueError, "segment must be at least 1"),
        (lambda: Placement(0, (4.0,)), TypeError, "segment must be an integer"),
        (lambda: Placement(0, (4,), replicas=0), ValueError, "replicas must be at least 1"),
        (lambda: Placement(0, (4, 4, 4), replicas=(1, 2)), ValueError, "2 numbers of replicas for 3 segments"),
        (lambda: Placement(0, (4,), replicas=2).shard_size(3), ValueError, "by the number of replicas, = 3"),
        (lambda: Placement(0, (4,)).shard(distinct(4), 4, 4), ValueError, "rank must be below t = 4"),
        (lambda: Placement(0, (4,)).merge([]), ValueError, "no shards"),
    ],
)
def test_nonsense_is_refused(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_placements_are_compared_hashed_and_read_only():
    assert Placement(0, [4, 4]) == Placement(0, (4, 4)) and len({Placement(0, [4, 4]), Placement(0, (4, 4))}) == 1
    assert Placement(0, (4, 4)) != Placement(0, (8,))
    with pytest.raises(AttributeError):
        Placement().dim = 1


def test_every_parameter_of_a_tree_is_found_by_name():
    """Rules out: a bias cut by its weight's rule. A column layer's bias is cut, a row layer's is not."""
    ffn = nn.Sequential(nn.GELU(), ParallelFFN.from_dense(FFN(5, 12)))
    expected = {
        "1.c_fc.weight": Placement(0, (12,)),
        "1.c_fc.bias": Placement(0, (12,)),
        "1.c_proj.weight": Placement(1, (12,)),
        "1.c_proj.bias": Placement(),
    }
    assert placements(ffn) == expected
    assert ffn[1].placements == {name.removeprefix("1."): placement for name, placement in expected.items()}
    swiglu = ParallelSwiGLU.from_dense(SwiGLU(5, 12))
    assert swiglu.placements == {"gate_up.weight": Placement(0, (12, 12)), "down_proj.weight": Placement(1, (12,))}


def test_a_parameter_that_nobody_placed_is_refused():
    with pytest.raises(ValueError, match="Linear does not place its parameter '1.weight'"):
        placements(nn.Sequential(ColumnParallelLinear.from_dense(nn.Linear(5, 12)), nn.Linear(5, 5)))


def test_layers_refuse_tensors_that_are_not_shards():
    column, row = Placement(0, (12,)), Placement(1, (12,))
    with pytest.raises(ValueError, match=r"a rank of t = 1 holds 12 along dimension 0 of the weight, .* is \[6, 5\]"):
        ColumnParallelLinear(distinct(6, 5), placement=column)
    with pytest.raises(ValueError, match=r"a rank of t = 1 holds 12 along dimension 1 of the weight, .* is \[5, 6\]"):
        RowParallelLinear(distinct(5, 6), placement=row)
    with pytest.raises(ValueError, match=r"a weight \[12, 5\] goes with a bias \[12\], and this bias is \[5\]"):
        ColumnParallelLinear(distinct(12, 5), distinct(5))
    with pytest.raises(ValueError, match=r"must be \[out, in\] and its shape is \[12\]"):
        RowParallelLinear(distinct(12))
