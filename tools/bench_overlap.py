"""`make bench`: how much of its all-reduces an FFN on 2 ranks hides, and how, over a link of 1 Gbit/s and on loopback.

Ways, each forward and backward, of one thread: *floor*, the products alone, with nothing sent; *sync*, which waits for
both all-reduces; *async*, which sums dX while dA is computed; *chunked*, which besides multiplies and sums in chunks of
the tokens. They take turns in each round, so that a busy moment hits all alike; the floor is there twice, and what the
second is over the first is the null: how much of a ratio is noise.

The link is a pair of virtual Ethernet devices between two network namespaces, slowed down by `tc ... tbf`. Making them
takes root, `ip` and `tc` (Debian: iproute2). They are removed at the end, after a failure, a kill or Ctrl-C as well. On
loopback an all-reduce is mostly the CPU's own work, behind which nothing can hide: those ratios are shown and mean
little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tools.namespaces import NoNamespaces, linked_namespaces
from tpcode.comm import copy_to_tp, reduce_from_tp
from tpcode.dense import FFN
from tpcode.layers import ChunkedFFN, ParallelFFN

HIDDEN, TOKENS, ROUNDS, CHUNKS = 1024, 1024, 24, 4
RATE = "1gbit"
ATTEMPTS, NULL_WITHIN = 3, 0.03
AT_LEAST = {"async": 1 / 4, "chunked": 1 / 3}  # of (sync - floor), over the link


# ---- what is measured -----------------------------------------------------------------------------------------------


class PlainFFN(nn.Module):
    """The products of a rank's part, and, if it talks, both all-reduces, each waited for at once."""

    def __init__(self, dense: FFN, talks: bool):
        super().__init__()
        part = ParallelFFN.from_dense(dense)
        self.A_r, self.B_r, self.activation, self.talks = part.c_fc.weight, part.c_proj.weight, part.activation, talks

    def forward(self, x):
        x = copy_to_tp(x) if self.talks else x
        z = self.activation(nn.functional.linear(x, self.A_r))  # [b, s, h] -> [b, s, F/t]
        y = nn.functional.linear(z, self.B_r)  # [b, s, F/t] -> [b, s, h]
        return reduce_from_tp(y) if self.talks else y


def by_turns(h: int, tokens: int, rounds: int, chunks: int = CHUNKS) -> dict[str, list[float]]:
    """Seconds of each round, the slower rank's, for each way. Runs on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dense = FFN(h, 4 * h, bias=False)
    x, dy = torch.randn(2, 1, tokens, h)
    ways = {
        "floor": PlainFFN(dense, talks=False),
        "sync": PlainFFN(dense, talks=True),
        "async": ParallelFFN.from_dense(dense),
        "chunked": ChunkedFFN.from_dense(dense, chunks=chunks),
        "floor again": PlainFFN(dense, talks=False),
    }
    warm_up = 2
    seconds = torch.zeros(rounds + warm_up, len(ways), dtype=torch.float64)
    names = list(ways)
    for number in range(rounds + warm_up):
        for i in range(len(names)):
            which = (i + number) % len(names)
            dist.barrier()
            start = time.perf_counter()
            forward_and_backward(ways[names[which]], x, dy)
            seconds[number, which] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(names, seconds[warm_up:].T.tolist(), strict=True))


def forward_and_backward(ffn: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    ffn(x).backward(dy)
    for parameter in ffn.parameters():
        parameter.grad = None


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of each way's time over the floor's in the same round."""

    floor_seconds: float
    over_floor: dict[str, float]
    rounds: int

    @property
    def null(self) -> float:
        """The floor over the floor."""
        return self.over_floor["floor again"]

    def hidden(self, way: str) -> float:
        """Which part of (sync - floor) this way saves."""
        sync = self.over_floor["sync"]
        return (sync - self.over_floor[way]) / (sync - 1)


def result(seconds: dict[str, list[float]]) -> Result:
    """Of what `by_turns` returns."""
    floor = seconds["floor"]
    over = {
        way: statistics.median(own / least for own, least in zip(times, floor, strict=True))
        for way, times in seconds.items()
        if way != "floor"
    }
    return Result(statistics.median(floor), over, len(floor))


# ---- over a link ----------------------------------------------------------------------------------------------------


def over_the_link(arguments: list[str], rate: str = RATE, limit: float = 600) -> dict[str, list[float]]:
    """What `by_turns` returns on two ranks in two namespaces.

    Raises:
        NoNamespaces: they cannot be made.
        RuntimeError: a rank failed; with what it wrote.
    """
    with linked_namespaces(rate) as hosts:
        ranks = []
        try:
            for rank, host in enumerate(hosts):
                environment = os.environ | {
                    "GLOO_SOCKET_IFNAME": host.device,
                    "MASTER_ADDR": hosts[0].address,
                    "MASTER_PORT": "29517",
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                }
                bench = [sys.executable, "-m", "tools.bench_overlap", *arguments, "--as-rank"]
                command = ["ip", "netns", "exec", host.namespace, *bench]
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                    )
                )
            outputs = [rank.communicate(timeout=limit) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, outputs)):
        if rank.returncode:
            raise RuntimeError(f"rank {number} ended with {rank.returncode}:\n{errors[-2000:]}")
    return json.loads(outputs[0][0].splitlines()[-1])


def as_rank(options: argparse.Namespace) -> None:
    """One of the two ranks: measure, and print the times as JSON."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    seconds = by_turns(options.hidden, options.tokens, options.rounds, options.chunks)
    print(json.dumps(seconds))
    dist.destroy_process_group()


# ---- the report -----------------------------------------------------------------------------------------------------


def report(where: str, found: Result, bars: bool) -> list[str]:
    """Lines for people."""
    lines = [
        f"{where}: {found.rounds} rounds; floor {found.floor_seconds * 1e3:.0f} ms, "
        f"null {found.null:.3f}, load {os.getloadavg()[0]:.1f}"
    ]
    lines.append(f"  sync     {found.over_floor['sync']:.3f} of the floor")
    for way, least in AT_LEAST.items():
        line = f"  {way:8} {found.over_floor[way]:.3f} of the floor"
        if bars:
            share = found.hidden(way)
            verdict = "yes" if share >= least else "NO"
            line += f", hides {share:.0%} of what sync adds (at least {least:.0%}: {verdict})"
        lines.append(line)
    return lines


def measured(measure: Callable[[], dict[str, list[float]]], where: str, bars: bool) -> Result:
    """Measure until the null is near 1, a few times at most, and print each report."""
    for attempt in range(ATTEMPTS):
        found = result(measure())
        print("\n".join(report(where, found, bars)), flush=True)
        if abs(found.null - 1) <= NULL_WITHIN:
            break
        again = ": measured again" if attempt + 1 < ATTEMPTS else ": this machine is too busy to tell"
        print(f"  the null is off by more than {NULL_WITHIN}{again}", flush=True)
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.as_rank:
        as_rank(options)
        return 0

    sizes = {"hidden": options.hidden, "tokens": options.tokens, "rounds": options.rounds, "chunks": options.chunks}
    print("FFN on 2 ranks of 1 thread, float32: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    arguments = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    try:
        measured(lambda: over_the_link(arguments), f"link of {RATE}", bars=True)
    except NoNamespaces as reason:
        print(f"link of {RATE}: skipped. {reason}")

    from tpcode import RankPool

    with RankPool(2) as pool:
        measured(lambda: pool.run(by_turns, *sizes.values())[0], "loopback", bars=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
