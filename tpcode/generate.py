"""Text from a model on t ranks: token by token, one stream for all ranks.

Symbols: b sequences, s tokens of the prompt, V vocabulary, t ranks, r this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from tpcode.comm import all_gather, group_rank, group_size
from tpcode.dense import KVCache, keyed_generator, require_ids
from tpcode.layers import vocab_parallel_argmax
from tpcode.model import ParallelTransformer
from tpcode.shapes import require_int


def generate(
    model: ParallelTransformer,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[Tensor]:
    """Go on with a prompt: ids [b, s] -> an iterator over new tokens, [b] each, the same on every rank.

    Every rank of the group calls it, and takes as many tokens as the others. The prompt goes through the model once;
    after that each step is one token, which reads the keys and values of those before it from caches. A rank's caches
    hold its own heads, 1/t of the bytes (more where KV heads are replicated). Dropout is off.

    What a step sends, besides what the model's forward does:

        greedy           [b]      2 all-reduces: MAX of the logits, MIN of the ids that reach it
        temperature      [b]      the same two, see `sample`
        top_k            [b, k]   1 all-gather of each rank's k largest logits, before these

    The vocabulary is never gathered. Before the first token one all-gather of 8 bytes a rank finds out whether all
    ranks were asked for the same.

    Args:
        temperature: the logits are divided by it, and a token is drawn by their softmax; 0 takes the largest logit.
        top_k: draw from the k largest logits alone (from more where several equal the k-th); None is from all.
        seed: of the draws. The same seed draws the same tokens at every t.
        stop: ids at which to end: it ends when every sequence has had one of them, and yields that one too.

    Raises:
        ValueError: the prompt has no token, or with the new ones more than `config.max_seq`; an id is not in the
            vocabulary; a setting makes no sense; the ranks were asked for different things; no logit is a number. On
            every rank alike.
        TypeError: ids are no tensor of integers, a count is no integer.
    """
    max_new_tokens = require_int(max_new_tokens, "max_new_tokens")
    seed, stop = require_int(seed, "seed", minimum=None), sorted(stop)
    _require_prompt(ids, max_new_tokens, model)
    _require_sampling(temperature, top_k)
    _require_same_everywhere(model.group, ids, max_new_tokens, float(temperature), top_k, seed, stop)
    return _tokens(model, ids, max_new_tokens, float(temperature), top_k, seed, stop)


def _tokens(model, ids, max_new_tokens, temperature, top_k, seed, stop) -> Iterator[Tensor]:
    caches = [KVCache() for _ in model.blocks]
    stop = torch.tensor(stop, dtype=torch.long, device=ids.device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for step in range(max_new_tokens):
        logits = _last_logits(model, ids, caches)  # [b, s] -> [b, V/t]
        how = {"temperature": temperature, "top_k": top_k, "key": f"{seed}/{step}"}
        token = sample(logits, model.group, vocab_size=model.config.vocab, **how)
        yield token
        ended |= torch.isin(token, stop)
        if ended.all():
            return
        ids = token.unsqueeze(1)  # [b] -> [b, 1]: all others are in the caches


@torch.no_grad()
def sample(
    logits: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: str = "",
) -> Tensor:
    """One token for each row of logits that lie over the group by vocabulary, the same on every rank: [b, V/t] -> [b].

    A draw by softmax(z / T) is the largest of z_i / T + G_i, with G_i = -log(-log(u_i)) and u_i uniform (the Gumbel-max
    trick, Maddison et al. 2014). So sampling is an argmax, for which each rank sends its best candidate and no logits.
    Every rank draws the u of the whole vocabulary from `key`, and takes its slice, as with dropout: the same token at
    every t, whatever else was drawn. It is chosen once, by the all-reduces that all ranks take part in; a rank that
    drew on its own would go on with another text than its neighbours, and their sums would belong to no text.

    Args:
        logits: this rank's, padding included.
        vocab_size: V, without padding, which is never chosen.
        temperature, top_k: as for `generate`.
        key: names the draw.

    Raises:
        ValueError: no logit of a row is a number.
    """
    z = logits
    if temperature > 0:
        z = logits.double() / temperature
        rank, width = group_rank(group), logits.shape[-1]
        words = min(max(vocab_size - rank * width, 0), width)  # the rest, at the end, is padding
        if top_k is not None and top_k < vocab_size:
            z = z.masked_fill(z < _kth_largest(z[..., :words], top_k, width, group), -torch.inf)
        noise = _gumbel(len(z), vocab_size, key)[:, rank * width : rank * width + words]
        z[..., :words] += noise.to(z.device)
    token = vocab_parallel_argmax(z, group, vocab_size=vocab_size)
    if token.max() >= vocab_size:
        raise ValueError("no logit is a number: they are all nan, as after an overflow or with damaged weights")
    return token


def _kth_largest(z: Tensor, k: int, width: int, group: ProcessGroup | None) -> Tensor:
    """The k-th largest over all ranks: [b, words of this rank] -> [b, 1]. It is among each rank's k largest."""
    best = z.topk(min(k, z.shape[-1])).values
    missing = min(k, width) - best.shape[-1]  # all ranks send the same number, one that is nearly all padding too
    best = pad(best, (0, missing), value=-torch.inf)
    return all_gather(best, 1, group).topk(k).values[:, -1:]  # [b, min(k, width)] -> [b, t·min(k, width)] -> [b, 1]


def _gumbel(b: int, V: int, key: str) -> Tensor:
    """[b, V], on the CPU: a GPU's generator draws other numbers."""
    u = torch.rand(b, V, generator=keyed_generator(f"sample/{key}"), dtype=torch.float64, device="cpu")
    return -(-u.log()).log()


@torch.no_grad()
def _last_logits(model: ParallelTransformer, ids: Tensor, caches: list[KVCache]) -> Tensor:
    """This rank's logits of the last position, [b, s] -> [b, V/t]. A prompt's other positions skip the head, which is
    a quarter of a small model's work."""
    with _evaluating(model), _last_position_only(model.head):
        return model(ids, caches)[:, -1]


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


@contextmanager
def _last_position_only(head: torch.nn.Module) -> Iterator[None]:
    handle = head.register_forward_pre_hook(lambda head, args: (args[0][:, -1:],))  # [b, s, h] -> [b, 1, h]
    try:
        yield
    finally:
        handle.remove()


# ---- bad input ------------------------------------------------------------------------------------------------------


def _require_prompt(ids: Tensor, new: int, model: ParallelTransformer) -> None:
    require_ids(ids, None, model.config)
    b, s = ids.shape
    if not b or not s:
        raise ValueError(f"the prompt must have a token at least, and ids are {[b, s]}")
    if s + new > model.config.max_seq:
        raise ValueError(
            f"{s} tokens of the prompt and {new} new ones are {s + new}, more than the model's context of "
            f"{model.config.max_seq}"
        )


def _require_sampling(temperature: float, top_k: int | None) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"temperature must be a number and is {temperature!r}")
    if not (isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be at least 0 and finite, and is {temperature}")
    if top_k is not None:
        require_int(top_k, "top_k")
        if not temperature:
            raise ValueError(f"top_k = {top_k} says what to draw from, and at temperature 0 nothing is drawn")


def _require_same_everywhere(group: ProcessGroup | None, ids: Tensor, *settings) -> None:
    """Refuse, on every rank, what is not the same on all of them: they would go on together with different texts."""
    asked = f"{list(ids.shape)} {ids.tolist()} {settings}"
    own = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:7])
    first, *others = all_gather(torch.tensor([own], device=ids.device), 0, group).tolist()
    if different := [str(rank) for rank, other in enumerate(others, 1) if other != first]:
        raise ValueError(
            f"rank{'s' if len(different) > 1 else ''} {', '.join(different)} of the group got another prompt, or other "
            f"settings, than rank 0; all {group_size(group)} ranks speak one text together"
        )
