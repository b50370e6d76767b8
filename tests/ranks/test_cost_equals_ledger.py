"""What `tpcode.cost` says on paper is what a real step sends, to the byte, and what a rank holds.

The paper knows sizes alone; the ledger notes what the layers call. Sizes differ from one another, so that no product
of the wrong ones can be equal; heads, FFN width and vocabulary are such that padding and KV replicas occur.
"""

from itertools import product

import pytest
import torch

from tpcode import Layout, ModelConfig, ParallelTransformer
from tpcode.comm import record
from tpcode.cost import communication, flops
from tpcode.training import finalize_grads

B, S = 3, 8
SEQUENCE_PARALLEL = (False, True)
RECOMPUTE = {False: "none", True: "full"}
SIZES = {"hidden": 20, "ffn": 26, "heads": 4, "layers": 2, "vocab": 11, "max_seq": S + 2}
MODELS = {
    "gpt2": (ModelConfig(family="gpt2", **SIZES), torch.float64),
    "gpt2, untied": (ModelConfig(family="gpt2", tied=False, **SIZES), torch.bfloat16),
    "llama": (ModelConfig(family="llama", head_dim=6, **SIZES), torch.bfloat16),
    "llama, replicas": (ModelConfig(family="llama", head_dim=6, kv_heads=1, tied=False, **SIZES), torch.float64),
}
CASES = list(product(MODELS, SEQUENCE_PARALLEL, RECOMPUTE))


def steps():
    """For each case: what this rank sent in a step and in the sum of partial gradients, and what it holds."""
    found = {}
    for name, sp, recompute in CASES:
        config, dtype = MODELS[name]
        model = ParallelTransformer(config, recompute=recompute, dtype=dtype, sequence_parallel=sp)
        ids, targets = torch.randint(config.vocab, (2, B, S))
        with record() as ledger:
            model.loss(ids, targets).backward()
        with record() as update:
            finalize_grads(model)
        held = [0, 0]
        for parameter, placement in model.placements.items():
            held[placement.dim is None] += model.get_parameter(parameter).numel()
        found[name, sp, recompute] = sums(ledger), sums(update), held
    return found


def sums(ledger):
    """(phase, op) -> calls, payload bytes, wire bytes."""
    kinds = {(event.phase, event.op) for event in ledger.events}
    return {(p, op): (ledger.count(op, p), ledger.payload_bytes(op, p), ledger.wire_bytes(op, p)) for p, op in kinds}


def on_paper(volume):
    """The same of a volume."""
    kinds = {(one.phase, one.op) for one in volume}
    return {(p, op): (volume.count(op, p), volume.payload_bytes(op, p), volume.wire_bytes(op, p)) for p, op in kinds}


@pytest.mark.parametrize("t", [2, 4])
def test_a_step_sends_what_the_paper_says(t, request):
    """Calls, payload and wire by phase and op, on every rank; then the sum of partial gradients; and the parameters of
    a rank, cut and whole. Not vacuous: with another element size the paper says something else."""
    for found in request.getfixturevalue(f"pool{t}").run(steps):
        assert found.keys() == set(CASES)
        for (name, sp, recompute), (step, update, held) in found.items():
            config, dtype = MODELS[name]
            layout, sizes = Layout(tp=t, sequence_parallel=sp), {"microbatch": B, "sequence": S}
            paper = {
                width: communication.tp_model(
                    config, layout, recompute=RECOMPUTE[recompute], element_bytes=width, **sizes
                )
                for width in (4, dtype.itemsize)
            }
            assert step == on_paper(paper[dtype.itemsize]) != on_paper(paper[4]), (name, sp, recompute)
            once = on_paper(communication.tp_update(config, layout, element_bytes=dtype.itemsize))
            assert list(update.values()) == list(once.values())  # outside of autograd the ledger has no name for it
            assert len(once) == sp
            own = flops.rank_parameters(config, layout)
            assert held == [own.sharded, own.replicated]
