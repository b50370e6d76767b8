"""Generation on t ranks: the dense model's text, one stream for all ranks, drawn as softmax says, and what it sends."""

import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpcode.generate as module
from tpcode import ModelConfig, ParallelTransformer
from tpcode.comm import record
from tpcode.dense import MODELS, set_dropout_step
from tpcode.generate import generate, sample
from tpcode.runtime import launch

B, S, V, L = 2, 5, 11, 2  # t = 2 and 4 do not divide V: there is padding
CASES = list(product(("gpt2", "llama"), (True, False)))  # family, tied


def config_of(family, tied=True, **sizes):
    kv_heads = 2 if family == "llama" else 4  # replicated at t = 4
    sizes = {"hidden": 8, "ffn": 10, "heads": 4, "kv_heads": kv_heads, "layers": L, "vocab": V, "max_seq": 64, **sizes}
    return ModelConfig(family=family, tied=tied, **sizes)


def dense_of(family, tied=True, **sizes):
    """A dense model with large weights, norms of either sign: others say one word for ever, the tied ones above all."""
    torch.manual_seed(4)
    torch.set_default_dtype(torch.float64)
    dense = MODELS[family](config_of(family, tied, **sizes))
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=1.0)
    return dense


def prompt():
    return torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 10, 0]])


def stream(model, ids, n, **asked):
    return torch.stack(list(generate(model, ids, n, **asked)), 1).tolist()  # n times [b] -> [b, n]


# ---- the dense model's text -----------------------------------------------------------------------------------------


def greedy():
    """What the ranks say, and what the dense model says that reads everything anew for each token."""
    found = {}
    for family, tied in CASES:
        dense = dense_of(family, tied)
        ids = prompt()
        for _ in range(12):
            with torch.no_grad():
                ids = torch.cat([ids, dense(ids)[:, -1:].argmax(-1)], 1)
        split = ParallelTransformer.from_dense(dense)
        torch.rand(dist.get_rank() + 1)
        found[family, tied] = stream(split, prompt(), 12), ids[:, S:].tolist()
    return found


@pytest.mark.parametrize("t", [1, 2, 4])
def test_greedy_text_is_the_dense_models(t):
    """Token by token from caches, against a dense model without any. Not vacuous: the texts have several words, and
    are not the same for both sequences and all models."""
    answers = launch(greedy, t)
    for found in answers:
        for ours, wanted in found.values():
            assert ours == wanted
            assert len(set(wanted[0] + wanted[1])) > 3
    assert len({str(wanted) for _, wanted in answers[0].values()}) == len(CASES)


# ---- one stream for all ranks ---------------------------------------------------------------------------------------


def drawn(seed, **asked):
    """50 steps at temperature 1, on ranks whose default generators are in different states."""
    split = ParallelTransformer.from_dense(dense_of("llama"))
    torch.manual_seed(dist.get_rank())
    return stream(split, prompt(), 50, temperature=1.0, seed=seed, **asked)


drawn_at = functools.cache(lambda t, seed, **asked: launch(drawn, t, seed, **asked))


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("asked", [{}, {"top_k": 4}])
def test_all_ranks_draw_one_stream_and_the_same_at_every_t(t, asked):
    """Rules out that each rank samples its own token. Not vacuous: many words come up, both sequences differ, and
    another seed says something else."""
    first, *others = drawn_at(t, 0, **asked)
    assert others == [first] * (t - 1)
    assert first == drawn_at(1, 0, **asked)[0]
    assert len(set(first[0])) > 4 and first[0] != first[1]
    assert first != drawn_at(1, 1, **asked)[0]


def share_of(logits, t, rank):
    """A rank's logits, filled up with what would win if it took part."""
    width = -(-V // t)
    padded = torch.cat([logits, torch.full((len(logits), t * width - V), 99.0)], 1)
    return padded[:, rank * width : (rank + 1) * width].contiguous()


ROWS = 40_000
LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -3.0, 1.0, 0.5, -0.5, 1.5, 0.2])


def draws():
    """Many rows of the same logits: temperature and top_k to tokens."""
    own = share_of(LOGITS.expand(ROWS, V), dist.get_world_size(), dist.get_rank())
    before = own.clone()
    found = {
        (temperature, k): sample(own, vocab_size=V, temperature=temperature, top_k=k, key="a")
        for temperature, k in product((0.0, 0.7, 1.0, 2.0), (None, 1, 3, 4, V, 99))
        if temperature or k is None
    }
    assert torch.equal(own, before)
    return found


@functools.cache
def draws_at(t):
    return launch(draws, t)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_tokens_are_drawn_by_softmax(t):
    """Frequencies in 40,000 draws, within 4.5 standard deviations of each. Of equal logits at top_k's border all stay
    in (4: ids 2, 9, 4 and 6). Padding is never drawn, though its logits are the largest."""
    for found in draws_at(t):
        assert found.keys() == draws_at(1)[0].keys()
        for (temperature, k), tokens in found.items():
            assert torch.equal(tokens, draws_at(1)[0][temperature, k])
            if not temperature:
                assert tokens.unique().tolist() == [2]
                continue
            border = LOGITS.topk(min(k or V, V)).values[-1]
            p = (LOGITS.double() / temperature).masked_fill(border > LOGITS, -torch.inf).softmax(0)
            counts = tokens.bincount(minlength=V)
            assert ((counts - ROWS * p).abs() <= 4.5 * (ROWS * p * (1 - p)).sqrt()).all(), (temperature, k)
            assert len(counts) == V and not counts[p == 0].any()


def test_the_draw_of_a_step_is_another_one_for_another_key():
    logits = LOGITS.expand(1000, V)
    tokens = [sample(logits, vocab_size=V, temperature=1.0, key=key) for key in ("a", "b", "a")]
    assert torch.equal(tokens[0], tokens[2]) and not torch.equal(tokens[0], tokens[1])


# ---- what is sent, kept and computed --------------------------------------------------------------------------------


def ledgers():
    """For each way of choosing: what was sent before the first token, for the first, and for the second."""
    split, found = ParallelTransformer.from_dense(dense_of("llama")), {}
    seen = []
    split.head.register_forward_hook(lambda head, args, output: seen.append(args[0].shape[1]))
    for name, asked in {"greedy": {}, "drawn": {"temperature": 1.0}, "top 3": {"temperature": 1.0, "top_k": 3}}.items():
        with record() as ledger:
            tokens = generate(split, prompt(), 2, **asked)
            borders = [len(ledger.events)]
            for _ in range(2):
                next(tokens)
                borders.append(len(ledger.events))
        events = [(event.op, event.shape) for event in ledger.events]
        found[name] = [events[i:j] for i, j in zip([0, *borders], borders)]
    return found, seen


@pytest.mark.parametrize("t", [2, 4])
def test_what_a_token_sends(t):
    """The vocabulary is never gathered: a token of each sequence is chosen by two all-reduces of one number each, and
    by k numbers of each rank for top_k. The head sees one position, of a prompt too."""

    def forward(s):
        return [("all_reduce", (B, s, 8))] * (1 + 2 * L)

    choice = [("all_reduce", (B,))] * 2
    for found, positions in launch(ledgers, t):
        for name, (before, first, second) in found.items():
            best = [("all_gather", (B, 3 * t))] if name == "top 3" else []
            assert before == [("all_gather", (t,))]  # what comes of it: a number of each rank
            assert first == forward(S) + best + choice
            assert second == forward(1) + best + choice
        assert positions == [1] * 6


def caches():
    made = []
    original = module.KVCache

    class Counted(original):
        def __init__(self):
            super().__init__()
            made.append(self)

    module.KVCache = Counted
    try:
        found = {}
        for family in ("gpt2", "llama"):
            made.clear()
            stream(ParallelTransformer.from_dense(dense_of(family)), prompt(), 4)
            found[family] = [(len(cache), cache.nbytes) for cache in made]
        return found
    finally:
        module.KVCache = original


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_ranks_caches_are_those_of_its_heads(t):
    """Of GPT-2's 4 KV heads 1/t; of Llama's 2 one at least. The last token has not been read."""
    n, d, keys_and_values, bytes_each = S + 3, 2, 2, 8
    for found in launch(caches, t):
        for family, heads in (("gpt2", 4 // t), ("llama", max(1, 2 // t))):
            assert found[family] == [(n, B * heads * n * d * keys_and_values * bytes_each)] * L


def one_process(**sizes):
    return ParallelTransformer.from_dense(dense_of("gpt2", **sizes))


@pytest.fixture(autouse=True)
def float32_again():
    yield
    torch.set_default_dtype(torch.float32)


def test_it_ends_when_every_sequence_has_had_a_stop():
    model = one_process()
    whole = stream(model, prompt(), 12)
    stops = [whole[0][2], whole[1][4]]
    length = 1 + max(min(row.index(stop) for stop in stops if stop in row) for row in whole)
    assert 1 < length < 12
    assert stream(model, prompt(), 12, stop=stops) == [row[:length] for row in whole]


def test_dropout_is_off_and_the_model_stays_as_it_is():
    """No hook is left, and a forward between two tokens has logits for each position."""
    model = one_process(dropout=0.5)
    set_dropout_step(model, 0)
    model.train()
    tokens = generate(model, prompt(), 6)
    found = []
    for token in tokens:
        found.append(token)
        assert model.training and not token.requires_grad
        assert model(prompt()).shape == (B, S, V)
    assert torch.stack(found, 1).tolist() == stream(model.eval(), prompt(), 6)


# ---- bad input ------------------------------------------------------------------------------------------------------

REFUSALS = {
    "the prompt must have a token at least, and ids are [2, 0]": {"ids": torch.zeros(2, 0).long()},
    "the prompt must have a token at least, and ids are [0, 5]": {"ids": torch.zeros(0, 5).long()},
    "ids must be [b, s] and their shape is [5]": {"ids": torch.zeros(5).long()},
    "ids must be a tensor and not a list": {"ids": [[1]]},
    "5 tokens of the prompt and 60 new ones are 65, more than the model's context of 64": {"max_new_tokens": 60},
    "max_new_tokens must be at least 1 and is 0": {"max_new_tokens": 0},
    "max_new_tokens must be an integer and is 2.0": {"max_new_tokens": 2.0},
    "temperature must be at least 0 and finite, and is -1": {"temperature": -1},
    "temperature must be at least 0 and finite, and is nan": {"temperature": float("nan")},
    "temperature must be a number and is '1'": {"temperature": "1"},
    "top_k must be at least 1 and is 0": {"temperature": 1.0, "top_k": 0},
    "top_k = 3 says what to draw from, and at temperature 0 nothing is drawn": {"top_k": 3},
    "seed must be an integer and is None": {"seed": None},
    "ids must be from 0 to 10, and these go from 0 to 11": {"ids": torch.tensor([[0, 11]])},
    "rank 1 of the group got another prompt, or other settings, than rank 0": lambda rank: {"seed": rank},
    "rank 1 of the group got another prompt, or other settings": lambda rank: {"ids": prompt()[:, rank:]},
}


def said(model, **asked):
    """What generating raises, and what was sent until then."""
    asked = {"ids": prompt(), "max_new_tokens": 3, **asked}
    with record() as ledger:
        try:
            list(generate(model, **asked))
            return "nothing was raised", ledger.count()
        except (ValueError, TypeError) as error:
            return str(error), ledger.count()


def refusals():
    split, rank = ParallelTransformer.from_dense(dense_of("llama")), dist.get_rank()
    found = {words: said(split, **(asked(rank) if callable(asked) else asked)) for words, asked in REFUSALS.items()}
    nn.init.constant_(split.norm.weight, torch.nan)
    return found, said(split)[0], said(split, temperature=1.0, top_k=2)[0]


def test_bad_input_is_refused_on_every_rank_before_the_model_sends_anything():
    """At most the 8 bytes that find out whether all ranks were asked for the same."""
    for found, *without_numbers in launch(refusals, 2):
        assert found.keys() == REFUSALS.keys()
        assert {words: text for words, (text, _) in found.items() if words not in text} == {}
        assert all(sent == ("from 0 to 10" in words or "rank 1" in words) for words, (_, sent) in found.items())
        assert all(text.startswith("no logit is a number") for text in without_numbers)
