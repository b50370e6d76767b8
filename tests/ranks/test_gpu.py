"""The same on GPUs: NCCL is taken where each rank has one, and sharded equals dense there too."""

import pytest
import torch
import torch.distributed as dist

from tpcode import CollectiveMismatch, RankPool, record
from tpcode.comm import all_reduce
from tpcode.dense import FFN
from tpcode.layers import ParallelFFN


def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank() + 1)], device="cuda")
    return dist.get_backend(), x.device.index, all_reduce(x)


@pytest.mark.gpu(1)
def test_one_gpu_is_one_nccl_rank_and_its_tensors_come_back():
    with RankPool(1) as pool:
        assert pool.backend == "nccl"
        [(_, device, total)] = pool.run(sum_of_ranks)
    assert device == 0 and total.item() == 1.0


@pytest.mark.gpu(2)
def test_each_rank_has_a_gpu_of_its_own():
    with RankPool(2) as pool:
        results = pool.run(sum_of_ranks)
    assert all("nccl" in backend for backend, _, _ in results)
    assert [device for _, device, _ in results] == [0, 1]
    assert [total.item() for *_, total in results] == [3.0, 3.0]


def split_ffn(dense, x):
    dense, x = dense.cuda(), x.cuda().requires_grad_()
    ffn = ParallelFFN.from_dense(dense)
    with record() as ledger:
        ffn(x).square().sum().backward()
    counts = ledger.count("all_reduce", "forward"), ledger.count("all_reduce", "backward")
    return ffn(x).detach().cpu(), x.grad.cpu(), counts


@pytest.mark.gpu(2)
def test_the_split_ffn_equals_the_dense_one_on_gpus():
    """Backward runs on a thread of autograd's own there; the ledger must see its all-reduce all the same."""
    torch.manual_seed(0)
    dense, x = FFN(8, 32).double(), torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    y = dense(x)
    y.square().sum().backward()
    with RankPool(2) as pool:
        for found_y, found_dx, counts in pool.run(split_ffn, dense, x.detach()):
            torch.testing.assert_close(found_y, y.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(found_dx, x.grad, rtol=0, atol=1e-12)
            assert counts == (1, 1)


@pytest.mark.gpu(2)
def test_a_mismatch_is_noted_before_nccl_waits():
    def job():
        dist.all_reduce(torch.ones(3 + dist.get_rank(), device="cuda"))

    with RankPool(2) as pool, pytest.raises(CollectiveMismatch, match="the world group"):
        pool.run(job)
