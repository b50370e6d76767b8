"""SmolLM2-135M, whole, on 1, 3 and 9 ranks, against transformers' reading of the same file: logits and greedy text.

At t = 9 each of the 3 KV heads is on 3 ranks, and the FFN's 1536 are filled up to 1539. Transformers computes RMSNorm
in float32 whatever it is given; for the float64 logits torch's norm stands in its place.
"""

import os
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode.checkpoint import SMOLLM2, smollm2, smollm2_file, smollm2_tokenizer, smollm2_weight
from tpcode.comm import all_gather
from tpcode.generate import generate
from tpcode.runtime import launch

PROMPT = "The capital of France is"
TOKENS = {1: 16, 3: 16, 9: 8}  # nine ranks on two cores take seconds for a token


def prompt_ids():
    return torch.tensor([smollm2_tokenizer().encode(PROMPT).ids])


@cache
def theirs():
    """Logits in float64 and float32, and the greedy text's ids."""
    gguf, transformers = map(pytest.importorskip, ("gguf", "transformers"))  # here, since ranks import this file
    file, ids = smollm2_file(), prompt_ids()
    # It reads the file twice, and makes a table of names for every module: ten seconds for nothing.
    with patch.multiple(gguf, GGUFReader=cache(gguf.GGUFReader), get_tensor_name_map=cache(gguf.get_tensor_name_map)):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            os.path.dirname(file), gguf_file=file.name, dtype=torch.float32
        ).eval()
    with torch.no_grad():
        narrow = model(ids).logits
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        model.double()
        for name, norm in list(model.named_modules()):
            if "RMSNorm" in type(norm).__name__:
                exact = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=torch.float64)
                exact.weight = norm.weight
                model.set_submodule(name, exact)
        return model(ids).logits, narrow, text[0, ids.shape[1] :].tolist()


def ours(ids, n):
    """The same on this rank, how many entries it has read, and how many it holds."""
    from tpcode.checkpoint import pretrained as module

    read = []

    def counting(*arguments):
        found = smollm2_weight(*arguments)
        read.append(found.numel())
        return found

    module.smollm2_weight = counting
    try:
        model = smollm2(dtype=torch.float64)
    finally:
        module.smollm2_weight = smollm2_weight
    held = sum(parameter.numel() for parameter in model.parameters())
    logits = []
    with torch.no_grad():
        for _ in range(2):
            logits.append(all_gather(model(ids), 2)[..., : SMOLLM2.vocab])  # [1, s, V/t] -> [1, s, V]
            model.float()
    text = [int(token) for token in generate(model, ids, n)]
    return logits if dist.get_rank() == 0 else None, text, sum(read), held


ours_at = cache(lambda t: launch(ours, t, prompt_ids(), TOKENS[t]))


@pytest.mark.parametrize("t", TOKENS)
def test_logits_are_transformers(t):
    """Float64 to 1e-9. Float32 to four times the error that transformers' own float32 makes, measured here. Not
    vacuous: the logits span more than ten, and float32's error is above the float64 tolerance."""
    wide, narrow, _ = theirs()
    (our_wide, our_narrow), *_ = ours_at(t)[0]
    assert our_wide.dtype == wide.dtype == torch.float64 and our_narrow.dtype == narrow.dtype == torch.float32
    assert our_wide.shape == wide.shape == (1, 5, SMOLLM2.vocab)
    own_error = (narrow - wide).abs().max()
    assert 1e-9 < own_error < 1e-2 and wide.max() - wide.min() > 10
    assert (our_wide - wide).abs().max() < 1e-9
    assert (our_narrow - wide).abs().max() <= 4 * own_error


@pytest.mark.parametrize("t", TOKENS)
def test_the_greedy_text_is_transformers(t):
    """On every rank."""
    _, _, wanted = theirs()
    assert [text for _, text, _, _ in ours_at(t)] == [wanted[: TOKENS[t]]] * t
    assert smollm2_tokenizer().decode(wanted).startswith(" Paris.")


@pytest.mark.parametrize("t", TOKENS)
def test_each_rank_reads_what_it_holds(t):
    """No entry besides: padding is not read. Of the 135 million a rank has 1/t, and all of the norms."""
    for _, _, read, held in ours_at(t):
        assert held * 0.99 < read <= held
        kv_copies = max(0, t // 3 - 1) * 2 * 64 * 576 * 30  # of the heads that are on several ranks
        norms = 61 * 576
        assert held <= (SMOLLM2.num_parameters - norms + 3 * kv_copies) / t * 1.01 + norms


def test_the_tokenizer_cuts_and_joins():
    """Bytes, digits and spaces come back as they were."""
    text = "In 1776: café's don't, 42 pins!\n\tAnother 🙂"
    tokenizer = smollm2_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
