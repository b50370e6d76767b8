"""What `tpcode.cost.communication` says on paper is what a real step sends, to the byte.

The paper knows sizes alone; the ledger notes what the layers call. Sizes differ from one another, so that no product
of the wrong ones can be equal; heads, FFN width and vocabulary are such that padding and KV replicas occur.
"""

from itertools import product

import pytest
import torch

from tpcode import Layout, ModelConfig, ParallelTransformer
from tpcode.comm import record
from tpcode.cost import communication
from tpcode.training import finalize_grads

B, S = 3, 8
SEQUENCE_PARALLEL = (False, True)
RECOMPUTE = {False: "none", True: "full"}
SIZES = {"hidden": 20, "ffn": 26, "heads": 4, "layers": 2, "vocab": 11, "max_seq": S + 2}
MODELS = {
    "gpt2": ModelConfig(family="gpt2", **SIZES),
    "gpt2, untied": ModelConfig(family="gpt2", tied=False, **SIZES),
    "llama": ModelConfig(family="llama", head_dim=6, **SIZES),
    "llama, replicas": ModelConfig(family="llama", head_dim=6, kv_heads=1, tied=False, **SIZES),
}
CASES = list(product(MODELS, SEQUENCE_PARALLEL, RECOMPUTE, (torch.float64, torch.bfloat16)))


def steps():
    """For each case what this rank sent: by phase and op the calls, payload and wire bytes."""
    found = {}
    for name, sp, recompute, dtype in CASES:
        model = ParallelTransformer(MODELS[name], recompute=recompute, dtype=dtype, sequence_parallel=sp)
        ids, targets = torch.randint(MODELS[name].vocab, (2, B, S))
        with record() as ledger:
            model.loss(ids, targets).backward()
        with record() as update:
            finalize_grads(model)
        found[name, sp, recompute, dtype] = sums(ledger), sums(update)
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
    """Calls, payload and wire by phase and op, on every rank; then the sum of partial gradients. Not vacuous: with
    another element size the paper says something else."""
    by_rank = request.getfixturevalue(f"pool{t}").run(steps)
    for found in by_rank:
        assert found.keys() == set(CASES)
        for (name, sp, recompute, dtype), (step, update) in found.items():
            config, layout = MODELS[name], Layout(tp=t, sequence_parallel=sp)
            sizes = {"microbatch": B, "sequence": S, "element_bytes": dtype.itemsize}
            paper = communication.tp_model(config, layout, recompute=RECOMPUTE[recompute], **sizes)
            assert step == on_paper(paper), (name, sp, recompute, dtype)
            once = on_paper(communication.tp_update(config, layout, element_bytes=dtype.itemsize))
            assert list(update.values()) == list(once.values())  # outside of autograd the ledger has no name for it
            plain = communication.tp_model(config, layout, **{**sizes, "element_bytes": 4})
            assert sum(sent for _, sent, _ in step.values()) != plain.payload_bytes()
