"""Cards, and the links between them: what each can do at most, per GPU and per direction, with the source.

Two doublings are taken out here, so that numbers can be compared. A link's speed is often given for both directions
together (NVLink's 600 GB/s is 300 each way), or for a whole node (InfiniBand's 200 GB/s is 25 for each of 8 GPUs). And
FLOP/s are often given with sparsity, which doubles them; these are dense.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpcode.shapes import require_int

GB = 10**9  # of links
GiB = 2**30  # of memory, which is sold in these and called GB


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU in its server.

    Attributes:
        name: what it is called.
        flops_per_second: dense FLOP/s of its tensor cores, in fp16 or bf16, at most.
        memory_bytes: what it holds.
        memory_bytes_per_second: between its memory and its cores.
        nvlink_bytes_per_second: to the other GPUs of its node, per GPU and direction.
        network_bytes_per_second: to GPUs of other nodes, its share of the node's adapters, per direction.
        gpus_per_node: GPUs that NVLink joins.
        multiprocessors: SMs, among which a GEMM's tiles are dealt out.
        sources: where each number stands.
    """

    name: str
    flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float
    network_bytes_per_second: float
    gpus_per_node: int
    multiprocessors: int
    sources: tuple[str, ...] = ()

    def nodes(self, ranks: int, ranks_per_node: int | None = None) -> int:
        """Over how many nodes `ranks` lie, with `ranks_per_node` in each (as many as fit, unless said).

        Raises:
            ValueError: they do not fill the nodes evenly.
        """
        ranks = require_int(ranks, "ranks")
        in_a_node = min(ranks, self.gpus_per_node if ranks_per_node is None else require_int(ranks_per_node, "ranks"))
        if in_a_node > self.gpus_per_node:
            raise ValueError(f"a node of {self.name} has {self.gpus_per_node} GPUs, and {in_a_node} were asked for")
        if ranks % in_a_node:
            raise ValueError(f"{ranks} ranks do not fill nodes with {in_a_node} each")
        return ranks // in_a_node

    def ring_bytes_per_second(self, ranks: int, ranks_per_node: int | None = None) -> float:
        """What a ring over these ranks passes on at most, per rank and direction.

        Within a node that is NVLink. Across nodes all the node's bytes leave through the adapters of the GPUs that take
        part: with one rank in each node one adapter, with g ranks g of them, and never more than NVLink brings there.
        """
        nodes = self.nodes(ranks, ranks_per_node)
        if nodes == 1:
            return self.nvlink_bytes_per_second
        return min(self.nvlink_bytes_per_second, ranks // nodes * self.network_bytes_per_second)


def bytes_per_second(gigabits_per_second: float) -> float:
    """Bytes a second from Gbit/s: InfiniBand's 200 Gbit/s are 25 GB/s.

    >>> bytes_per_second(200) / GB
    25.0
    """
    return gigabits_per_second * GB / 8


def per_direction(both_directions: float) -> float:
    """Of a speed that counts both directions, one.

    >>> per_direction(600)
    300.0
    """
    return both_directions / 2


CARDS = {
    "v100": Card(
        name="V100-SXM3-32GB in a DGX-2H",
        flops_per_second=130e12,
        memory_bytes=32 * GiB,
        memory_bytes_per_second=900 * GB,
        nvlink_bytes_per_second=per_direction(300 * GB),
        network_bytes_per_second=100 * GB / 16,
        gpus_per_node=16,
        multiprocessors=80,
        sources=(
            "FLOP/s: Shoeybi et al. 2019, section 5, where 39 TFLOP/s are 30% of the peak",
            "memory, SMs: NVIDIA Tesla V100 data sheet (900 GB/s; 80 SMs)",
            "links: Shoeybi et al. 2019, section 5 (NVLink 300 GB/s, both directions; 8 InfiniBand adapters with "
            "100 GB/s for a server of 16 GPUs)",
        ),
    ),
    "a100": Card(
        name="A100-SXM-80GB in a DGX A100",
        flops_per_second=312e12,
        memory_bytes=80 * GiB,
        memory_bytes_per_second=2039 * GB,
        nvlink_bytes_per_second=per_direction(600 * GB),
        network_bytes_per_second=bytes_per_second(200),
        gpus_per_node=8,
        multiprocessors=108,
        sources=(
            "FLOP/s: Narayanan et al. 2021, section 5 (312 TFLOP/s)",
            "memory, SMs: NVIDIA A100 80GB data sheet (2,039 GB/s; 108 SMs)",
            "links: 12 of NVLink 3, 600 GB/s in both directions (NVIDIA A100 data sheet); eight 200 Gbit/s HDR "
            "adapters for 8 GPUs (Narayanan et al. 2021, section 5)",
        ),
    ),
    "h100": Card(
        name="H100-SXM-80GB in a DGX H100",
        flops_per_second=989e12,
        memory_bytes=80 * GiB,
        memory_bytes_per_second=3350 * GB,
        nvlink_bytes_per_second=per_direction(900 * GB),
        network_bytes_per_second=bytes_per_second(400),
        gpus_per_node=8,
        multiprocessors=132,
        sources=(
            "FLOP/s, memory, SMs, NVLink: NVIDIA H100 data sheet (1,979 TFLOP/s with sparsity, half of it dense; "
            "3.35 TB/s; 132 SMs; 18 links, 900 GB/s in both directions)",
            "network: docs.nvidia.com, DGX BasePOD (eight 400 Gbit/s NDR adapters for 8 GPUs)",
        ),
    ),
    "h200": Card(
        name="H200-SXM-141GB in a DGX H200",
        flops_per_second=989e12,
        memory_bytes=141 * GiB,
        memory_bytes_per_second=4800 * GB,
        nvlink_bytes_per_second=per_direction(900 * GB),
        network_bytes_per_second=bytes_per_second(400),
        gpus_per_node=8,
        multiprocessors=132,
        sources=(
            "FLOP/s, memory, SMs: NVIDIA H200 data sheet (1,979 TFLOP/s with sparsity; 141 GB; 4.8 TB/s; 132 SMs)",
            "NVLink: 18 links of NVLink 4, 900 GB/s in both directions (NVIDIA, MLPerf inference v4.1)",
            "network: docs.nvidia.com, DGX BasePOD (eight 400 Gbit/s NDR adapters for 8 GPUs)",
        ),
    ),
}


def card(name: str | Card) -> Card:
    """A card by name, see `CARDS`; a `Card` of your own is handed back.

    Raises:
        ValueError: no such name; the message lists them.
    """
    if isinstance(name, Card):
        return name
    if not isinstance(name, str) or name.lower() not in CARDS:
        raise ValueError(f"no card {name!r}; there are {', '.join(CARDS)}")
    return CARDS[name.lower()]


# ---- latencies of NCCL ----------------------------------------------------------------------------------------------
# What NCCL itself assumes when it chooses an algorithm and a protocol (NVIDIA/nccl, src/graph/tuning.cc).

ALGORITHMS = ("ring", "tree")
PROTOCOLS = ("LL", "LL128", "Simple")

# Seconds of a collective before its first hop.
NCCL_BASE_SECONDS = {
    "tree": {"LL": 6.8e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
    "ring": {"LL": 6.6e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
}
# Seconds of one hop.
NCCL_HOP_SECONDS = {
    "nvlink": {
        "tree": {"LL": 0.6e-6, "LL128": 1.25e-6, "Simple": 4.0e-6},
        "ring": {"LL": 0.6e-6, "LL128": 1.9e-6, "Simple": 3.4e-6},
    },
    "network": {
        "tree": {"LL": 5.0e-6, "LL128": 8.5e-6, "Simple": 14.0e-6},
        "ring": {"LL": 2.7e-6, "LL128": 4.0e-6, "Simple": 14.0e-6},
    },
}
# What of a link's speed a protocol leaves for data: LL sends 4 bytes of flag with 4 of data, LL128 8 with 120.
NCCL_PROTOCOL_SHARE = {"LL": 1 / 2, "LL128": 120 / 128, "Simple": 1.0}
# What NCCL expects of a tree's all-reduce on top of that.
NCCL_TREE_SHARE = 0.92
