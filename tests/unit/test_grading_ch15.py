"""Exercises 15.1 to 15.3: right answers in several styles pass, each wrong one hears what is wrong with it."""

import pytest
import torch
import torch.distributed as dist
from checking import passes, refused

from tpcode.comm import all_gather, all_reduce, broadcast, group_rank, group_size
from tpcode.generate import sample
from tpcode.grading import ch15
from tpcode.grading.ch15 import WORDS, A, D, K, V

# ---- 15.1 -----------------------------------------------------------------------------------------------------------


def by_max(config, t, tokens, bytes_each):
    return 2 * config.layers * max(config.kv_heads // t, 1) * config.head_dim * tokens * bytes_each


def by_rounding_up(config, t, tokens, bytes_each):
    heads = -(-config.kv_heads // t)
    return sum(2 * heads * config.head_dim * tokens * bytes_each for _ in range(config.layers))


def by_cases(config, t, tokens, bytes_each):
    whole = 2.0 * config.layers * config.kv_heads * config.head_dim * tokens * bytes_each
    return whole / t if t <= config.kv_heads else torch.tensor(whole / config.kv_heads)


@pytest.mark.parametrize("cache_bytes", [by_max, by_rounding_up, by_cases])
def test_bytes_of_a_cache_pass(cache_bytes, capsys):
    passes(capsys, "15.1", cache_bytes)


def per_head(config, tokens, bytes_each):
    return 2 * config.layers * config.head_dim * tokens * bytes_each


@pytest.mark.parametrize(
    "cache_bytes, said",
    [
        (lambda c, t, n, e: per_head(c, n, e) * c.kv_heads / t, ch15.BEYOND.format(k=2, t=4)),
        (lambda c, t, n, e: per_head(c, n, e) * (c.kv_heads // t), ch15.NONE_HELD.format(k=2, t=4)),
        (lambda c, t, n, e: per_head(c, n, e) * c.heads // t, ch15.QUERY_HEADS),
        (lambda c, t, n, e: by_max(c, t, n, e) // 2, ch15.ONE_OF_TWO),
        (lambda c, t, n, e: by_max(c, t, n, 1), ch15.ELEMENTS),
        (lambda c, t, n, e: by_max(c, t, n, e) // c.layers, ch15.ONE_LAYER),
        (lambda c, t, n, e: by_max(c, t, 1, e), ch15.ONE_TOKEN),
        (lambda c, t, n, e: by_max(c, 1, n, e), ch15.ALL_RANKS),
        (lambda c, t, n, e: by_max(c, t, n, e) + 1, "is not right"),
        (lambda c, t, n, e: None, "Is there a return?"),
    ],
)
def test_wrong_bytes_hear_why(cache_bytes, said):
    refused(said, "15.1", cache_bytes)


# ---- 15.2 -----------------------------------------------------------------------------------------------------------


def rank_0_draws(z_r, step):
    return broadcast(all_gather(z_r, 1).softmax(-1).multinomial(1)[:, 0], 0)


def the_step_is_the_seed(z_r, step):
    z = all_gather(z_r, -1)
    generator = torch.Generator().manual_seed(step)
    return z.softmax(-1).multinomial(1, generator=generator).squeeze(1)


def best_of_each_rank(z_r, step):
    """With noise from each rank's own generator: the largest of z + G, as the chapter has it."""
    noisy = z_r - (-torch.rand_like(z_r).log()).log()
    best, place = noisy.max(-1)
    values = all_gather(best[:, None], 1)
    ids = all_gather(place[:, None] + group_rank() * z_r.shape[-1], 1)
    return ids.gather(1, values.argmax(1, keepdim=True))[:, 0]


def torchs_own_calls(z_r, step):
    parts = [torch.empty_like(z_r) for _ in range(group_size())]
    dist.all_gather(parts, z_r.contiguous())
    token = torch.multinomial(torch.cat(parts, -1).softmax(-1), 1).flatten()
    dist.broadcast(token, 0)
    return token


def the_packages(z_r, step):
    return sample(z_r, vocab_size=WORDS, temperature=1.0, key=f"0/{step}")


@pytest.mark.parametrize(
    "next_token", [rank_0_draws, the_step_is_the_seed, best_of_each_rank, torchs_own_calls, the_packages]
)
def test_one_token_for_all_passes(next_token, capsys):
    passes(capsys, "15.2", next_token)


def each_for_itself(z_r, step):
    return all_gather(z_r, 1).softmax(-1).multinomial(1)[:, 0]


def own_part_as_places(z_r, step):
    return z_r.softmax(-1).multinomial(1)[:, 0]


def own_part_as_ids(z_r, step):
    return own_part_as_places(z_r, step) + group_rank() * z_r.shape[-1]


def greedy(z_r, step):
    return all_gather(z_r, 1).argmax(-1)


def rank_0s_part(z_r, step):
    return broadcast(own_part_as_places(z_r, step), 0)


def one_seed_for_ever(z_r, step):
    generator = torch.Generator().manual_seed(1)
    return all_gather(z_r, 1).softmax(-1).multinomial(1, generator=generator)[:, 0]


def averaged(z_r, step):
    return all_reduce(each_for_itself(z_r, step)) // group_size()


def largest_id_drawn(z_r, step):
    return all_reduce(each_for_itself(z_r, step), "max")


@pytest.mark.parametrize(
    "next_token, said",
    [
        (each_for_itself, "Each drew for itself"),
        (own_part_as_places, "it drew from its own part of the vocabulary"),
        (own_part_as_ids, "it drew from its own part of the vocabulary"),
        (greedy, ch15.GREEDY),
        (rank_0s_part, ch15.RANK_0_ALONE.format(first=0, last=5)),
        (one_seed_for_ever, ch15.SAME_DRAW.format(rows=ch15.ROWS)),
        (averaged, "All ranks agree, but id"),
        (largest_id_drawn, "All ranks agree, but id"),
        (lambda z_r, step: all_reduce(each_for_itself(z_r, step)) + WORDS, "ids go from 0 to 11"),
        (lambda z_r, step: rank_0_draws(z_r, step)[:, None], "it should be a tensor of integers"),
        (lambda z_r, step: rank_0_draws(z_r, step).double(), "it should be a tensor of integers"),
        (lambda z_r, step: 3, "it should be a tensor of integers"),
        (lambda z_r, step: None, "Is there a return?"),
    ],
)
def test_wrong_tokens_hear_why(next_token, said):
    refused(said, "15.2", next_token)


def test_the_likeliest_id_is_far_from_certain():
    """Not vacuous: a greedy choice, and ids of one rank alone, are far from what softmax says."""
    p = ch15._logits(0)[0].softmax(-1)
    assert p.max() < 0.6 and all(part.sum() < 0.9 for part in p.chunk(2))


# ---- 15.3 -----------------------------------------------------------------------------------------------------------


def shard(whole, t):
    rows = -(-V // t)
    filled = torch.nn.functional.pad(whole["embed"], (0, 0, 0, rows * t - V))
    heads = whole["k"].split(D)
    cuts = zip(filled.split(rows), whole["q"].chunk(t), [heads[r * K // t] for r in range(t)], strict=True)
    return [{"embed": e, "q": q, "k": k, "o": whole["o"].chunk(t, 1)[r]} for r, (e, q, k) in enumerate(cuts)]


def shard_by_indices(whole, t):
    rows, own = -(-V // t), A // t * D
    shards = []
    for r in range(t):
        embed = torch.zeros(rows, whole["embed"].shape[1], dtype=whole["embed"].dtype)
        for i in range(rows):
            if r * rows + i < V:
                embed[i] = whole["embed"][r * rows + i]
        first = r * (A // t) // (A // K) * D
        at = slice(r * own, (r + 1) * own)
        shards.append({"embed": embed, "q": whole["q"][at], "k": whole["k"][first : first + D], "o": whole["o"][:, at]})
    return tuple(shards)


def merge(shards):
    whole = {name: torch.cat([part[name] for part in shards], int(name == "o")) for name in shards[0]}
    whole["embed"] = whole["embed"][:V]
    whole["k"] = torch.cat([part["k"] for part in shards[:: len(shards) // K]])
    return whole


def merge_by_averaging_replicas(shards):
    k = torch.stack([part["k"] for part in shards]).view(K, -1, D, shards[0]["k"].shape[1]).mean(1).flatten(0, 1)
    return merge(shards) | {"k": k}


@pytest.mark.parametrize("cut", [shard, shard_by_indices])
@pytest.mark.parametrize("join", [merge, merge_by_averaging_replicas])
def test_round_trips_pass(cut, join, capsys):
    passes(capsys, "15.3", cut, join)


def with_part(name, part):
    """shard, but of one tensor part(whole, r, t)."""
    return lambda whole, t: [own | {name: part(whole, r, t)} for r, own in enumerate(shard(whole, t))]


def filled_with_ones(whole, r, t):
    rows = -(-V // t)
    return torch.cat([whole["embed"], torch.ones(rows * t - V, 5)])[r * rows : (r + 1) * rows]


def merged(name, of):
    return lambda shards: merge(shards) | {name: of(shards)}


def joined(name):
    return lambda shards: torch.cat([part[name] for part in shards])


def sum_of_replicas(shards):
    return torch.stack([part["k"] for part in shards]).view(K, -1, D, 5).sum(1).flatten(0, 1)


@pytest.mark.parametrize(
    "cut, join, said",
    [
        (with_part("k", lambda w, r, t: w["k"].chunk(t)[r]), merge, ch15.CUT_INSIDE.format(rows=1)),
        (with_part("k", lambda w, r, t: w["k"].chunk(K)[r % K]), merge, ch15.WRONG_REPLICA),
        (with_part("k", lambda w, r, t: w["k"]), merge, ch15.ALL_KV),
        (
            with_part("embed", lambda w, r, t: w["embed"].tensor_split(t)[r]),
            merge,
            ch15.NO_PADDING.format(rank=2, t=3, rows=3, want=4),
        ),
        (with_part("embed", filled_with_ones), merge, ch15.NOT_ZEROS),
        (with_part("o", lambda w, r, t: w["o"][r * 5 // t : (r + 1) * 5 // t]), merge, ch15.WRONG_DIM),
        (with_part("q", lambda w, r, t: w["q"].chunk(t)[t - 1 - r]), merge, "q on rank 0 at t = 3"),
        (lambda whole, t: shard(whole, t)[:2], merge, "a list of 3 dictionaries"),
        (lambda whole, t: [{}] * t, merge, "embed is not there"),
        (lambda whole, t: None, merge, "Is there a return?"),
        (shard, merged("k", joined("k")), ch15.REPLICAS_SAVED.format(found=27, want=9)),
        (shard, merged("k", lambda s: torch.cat([part["k"] for part in s[:K]])), ch15.FIRST_ONLY),
        (shard, merged("k", sum_of_replicas), ch15.SUMMED),
        (shard, merged("embed", joined("embed")), ch15.PADDING_KEPT.format(found=12, want=11)),
        (shard, lambda shards: None, "Is there a return?"),
        (shard, lambda shards: 3, "should be a dictionary"),
    ],
)
def test_wrong_checkpoints_hear_why(cut, join, said):
    refused(said, "15.3", cut, join)


def test_a_round_trip_that_forgets_is_refused():
    """merge that is right for the check's own shards, and keeps something of one call for the next."""
    seen = []

    def forgetful(shards):
        seen.append(len(shards))
        whole = merge(shards)
        return whole if len(seen) < 3 else whole | {"q": whole["q"] + 1}

    refused(ch15.HALF_MERGED, "15.3", shard, forgetful)


def test_every_entry_of_the_whole_is_another():
    entries = torch.cat([tensor.flatten() for tensor in ch15.whole_checkpoint().values()])
    assert len(entries.unique()) == len(entries) and entries.min() > 0


@pytest.mark.parametrize("id, answers", [("15.1", 1), ("15.2", 1), ("15.3", 2)])
def test_stubs_are_told_to_be_filled(id, answers):
    def stub(*_):
        result = None  # replace None
        return result

    refused("not filled in yet: replace None", id, *[stub] * answers)
