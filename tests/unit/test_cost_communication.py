"""What is sent, against the claims' arithmetic, the papers' formulas and the ring of NCCL."""

from fractions import Fraction

import pytest

from tpcode import Layout, ModelConfig
from tpcode.cost import communication, flops
from tpcode.cost.communication import Transfer, Volume, alpha_beta, busbw, collective_seconds
from tpcode.cost.workload import Workload

GPT3 = ModelConfig.preset("gpt3-175b")
LLAMA = ModelConfig.preset("llama-3-70b")
BSH = 4 * 2048 * 12_288
SIZES = {"microbatch": 4, "sequence": 2048}


def layer(t=8, sp=False, **options):
    return communication.tp_layer(GPT3, Layout(tp=t, sequence_parallel=sp), **SIZES, **options)


def test_a_layer_of_gpt3():
    """E14 to E17: one payload is 201.3 MB, four a layer are 805 MB, on the wire 1.409 GB per GPU and microbatch."""
    volume = layer()
    assert volume.count() == volume.count("all_reduce") == 4
    assert volume[0].elements == BSH == 100_663_296
    assert volume.payload_bytes() == 4 * 2 * BSH == 805_306_368
    assert volume.wire_elements() == 8 * BSH * 7 // 8  # N21, section 3.2
    assert volume.wire_bytes() == 2 * volume.wire_elements() == 1_409_286_144
    assert layer(recompute="full").wire_bytes() == Fraction(3, 2) * volume.wire_bytes()
    assert layer(recompute="selective") == volume


def test_payload_does_not_shrink_with_t_and_the_wire_grows():
    """E19, R8: 1.0, 1.5, 1.75 payloads at t = 2, 4, 8; one rank sends nothing."""
    payload = 2 * BSH
    assert layer(t=1) == Volume() and layer(t=1).wire_bytes() == 0
    assert [layer(t=t).payload_bytes() for t in (2, 4, 8)] == [4 * payload] * 3
    assert [layer(t=t).wire_bytes() / (4 * payload) for t in (2, 4, 8)] == [1.0, 1.5, 1.75]


def test_sequence_parallelism_sends_a_quarter_more():
    """E39: 4 all-gathers and 4 reduce-scatters, and 2 all-gathers again: 10 units against 8; 14 against 12."""
    volume = layer(sp=True)
    assert (volume.count("all_gather"), volume.count("reduce_scatter"), volume.count("all_reduce")) == (6, 4, 0)
    assert Fraction(volume.wire_bytes()) / layer().wire_bytes() == Fraction(10, 8)
    again = layer(sp=True, recompute="full").wire_bytes(), layer(recompute="full").wire_bytes()
    assert Fraction(*again) == Fraction(14, 12)


def test_stages_send_far_less_than_tensor_parallel_ranks():
    """E20: GPT-3 with 12 layers a stage and t = 8: 84 bsh against 2 bsh at a boundary."""
    layout, workload = Layout(tp=8, pp=8), Workload(batch=64, sequence=2048, microbatch=4, scatter_gather=False)
    tp = 12 * layer().wire_elements()
    pp = communication.pp_microbatch(GPT3, layout, workload, stage=3).wire_elements()
    assert (tp / BSH, pp / BSH) == (84, 2)


def test_the_ends_of_a_pipeline_interleaving_and_scatter_gather():
    """E21: bsh forward and as much backward, v times interleaved; bsh/t from each of t ranks, gathered then."""
    layout = Layout(tp=8, pp=4)

    def sent(stage, layout=layout, **options):
        workload = Workload(batch=64, sequence=2048, microbatch=4, **options)
        volume = communication.pp_microbatch(GPT3, layout, workload, stage=stage)
        return [volume.select("send", phase).wire_elements() / BSH for phase in ("forward", "backward")], volume

    assert sent(0, scatter_gather=False)[0] == [1, 0]
    assert sent(1, scatter_gather=False)[0] == [1, 1]
    assert sent(3, scatter_gather=False)[0] == [0, 1]
    assert sent(1, scatter_gather=False, interleave=3)[0] == [3, 3]
    assert sent(3, scatter_gather=False, interleave=3)[0] == [2, 3]  # its last chunk has no next
    each, volume = sent(1)
    assert each == [1 / 8, 1 / 8]
    assert volume.wire_elements(axis="tp") == 2 * BSH * 7 // 8
    each, volume = sent(1, Layout(tp=8, pp=4, sequence_parallel=True))
    assert each == [1 / 8, 1 / 8] and volume.count(axis="tp") == 0
    assert sent(0, Layout(tp=8))[1] == Volume()
    assert communication.bubble_fraction(8, 64) == 7 / 64 == 3 * communication.bubble_fraction(8, 64, 3)


def test_data_parallelism_and_zero():
    """E22, R18: 2 Psi (dp-1)/dp elements in a step, by an all-reduce or its two halves; ZeRO-3 sends 3 Psi in each
    microbatch."""
    layout = Layout(tp=8, pp=8, dp=16)
    own = flops.rank_parameters(GPT3, layout, 3).elements
    plain = communication.dp_update(GPT3, layout, stage=3)
    shared = communication.dp_update(GPT3, layout, stage=3, distributed_optimizer=True)
    assert plain.wire_elements() == shared.wire_elements() == Fraction(15, 16) * 2 * own
    assert (plain.payload_bytes(), shared.payload_bytes()) == (4 * own, (4 + 2) * own)
    zero = communication.zero3_step(GPT3, layout, microbatches=6, stage=3)
    assert zero.wire_elements() == 6 * Fraction(15, 16) * 3 * own
    assert communication.dp_update(GPT3, Layout(tp=8)) == Volume()


def test_fewer_kv_heads_than_ranks_sum_their_replicas():
    extra = communication.tp_layer(LLAMA, Layout(tp=16), microbatch=1, sequence=8)[-1]
    assert (extra.ranks, extra.elements, extra.phase) == (2, 2 * 128 * 8192, "backward")
    assert communication.tp_layer(LLAMA, Layout(tp=8), microbatch=1, sequence=8).count() == 4


def test_a_step_is_the_sum_of_its_axes():
    layout = Layout(tp=8, pp=8, dp=2, sequence_parallel=True)
    workload = Workload(batch=64, sequence=2048, microbatch=2, recompute="selective", interleave=3)
    m, sizes = workload.microbatches(layout), {"microbatch": 2, "sequence": 2048}
    assert m == 16
    inner = communication.step(GPT3, layout, workload, stage=3)
    a_layer = communication.tp_layer(GPT3, layout, **sizes)
    update = communication.tp_update(GPT3, layout, stage=3, element_bytes=4)
    assert inner.wire_bytes(axis="tp") == 16 * 12 * a_layer.wire_bytes() + update.wire_bytes()
    assert inner.wire_bytes(axis="dp") == communication.dp_update(GPT3, layout, stage=3).wire_bytes()
    assert inner.count("all_reduce", axis="pp") == 0
    first, last = (communication.step(GPT3, layout, workload, stage=stage) for stage in (0, 7))
    assert first.count("all_reduce", axis="pp") == last.count("all_reduce", axis="pp") == 1  # the tied table
    assert first.count("reduce_scatter", "forward") - inner.count("reduce_scatter", "forward") == 16  # the embedding
    assert last.select("all_reduce", "forward").payload_bytes() == 16 * 3 * 4 * 2 * 2048  # the loss, in fp32


def test_volumes_add_up():
    one = Transfer("all_reduce", "tp", "forward", "x", 7, 2, 3)
    assert (one.payload_bytes, one.wire_elements, one.wire_bytes) == (14, Fraction(28, 3), Fraction(56, 3))
    assert (3 * Volume([one])).wire_bytes() == 56
    assert (Volume([one]) + Volume([one])).count() == 2
    assert type(3 * Volume([one])) is type(Volume([one]) + Volume()) is Volume
    for wrong, known in (("op", "all_reduce"), ("phase", "forward"), ("axis", "tp")):
        with pytest.raises(ValueError, match=f"{wrong} must be one of {known}, .* and is 'x'"):
            Volume([one]).count(**{wrong: "x"})


# ---- time -----------------------------------------------------------------------------------------------------------


def test_alpha_is_nccls_own():
    """A ring over 8 in one node: base + 14 hops."""
    alphas = [alpha_beta("all_reduce", 8, "a100", protocol=p).alpha_seconds for p in ("LL", "LL128", "Simple")]
    assert alphas == pytest.approx([15.0e-6, 40.6e-6, 56.0e-6])
    gather = alpha_beta("all_gather", 8, "a100").alpha_seconds
    assert gather == pytest.approx(8.4e-6 + 7 * 3.4e-6)


def test_hops_that_cross_the_network():
    """Over 2 nodes of 8 a ring crosses twice in its 30 steps; a tree goes up and down 7 hops and one level."""
    ring, tree = (alpha_beta("all_reduce", 16, "a100", algorithm=a).alpha_seconds for a in ("ring", "tree"))
    assert ring == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6)
    assert tree == pytest.approx(8.4e-6 + 2 * (7 * 4.0e-6 + 14e-6))
    send = alpha_beta("send", 2, "a100", ranks_per_node=1)
    assert (send.alpha_seconds, send.bytes_per_second) == (pytest.approx(22.4e-6), 25e9)


def test_large_messages_go_at_the_links_speed():
    """busbw of the model is the link's speed times its efficiency, whatever the op: what nccl-tests' factor is for."""
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        seconds = alpha_beta(op, 8, "a100", efficiency=0.5).seconds(1e13)
        assert busbw(op, 1e13, seconds, 8) == pytest.approx(150e9, rel=1e-5)


def test_small_messages_are_latency_and_the_fastest_way_is_taken():
    """8 bytes go by LL, 1 GB by Simple."""
    ways = [("ring", p) for p in ("LL", "LL128", "Simple")] + [("tree", p) for p in ("LL", "LL128", "Simple")]
    for payload, best in ((8, "LL"), (10**9, "Simple")):
        times = {(a, p): alpha_beta("all_reduce", 8, "a100", algorithm=a, protocol=p).seconds(payload) for a, p in ways}
        assert min(times, key=times.get)[1] == best
        assert collective_seconds("all_reduce", payload, 8, "a100") == min(times.values())
    assert collective_seconds("all_reduce", 10**9, 1, "a100") == 0


def test_alpha_and_beta_from_measured_times():
    """Exact where the times are alpha + bytes / speed; with noise of 5% near it; and alpha is never negative."""
    true = communication.AlphaBeta(50e-6, 2e9)
    sizes = [8 * 4**i for i in range(13)]
    exact = communication.fit_alpha_beta([(size, true.seconds(size)) for size in sizes])
    assert (exact.alpha_seconds, exact.bytes_per_second) == (pytest.approx(50e-6), pytest.approx(2e9))
    noisy = [(size, true.seconds(size) * (1.05 if i % 2 else 0.95)) for i, size in enumerate(sizes)]
    found = communication.fit_alpha_beta(noisy)
    assert found.alpha_seconds == pytest.approx(50e-6, rel=0.05)
    assert found.bytes_per_second == pytest.approx(2e9, rel=0.06)
    assert communication.fit_alpha_beta([(10, 1.0), (100, 11.0)]).alpha_seconds == 0


def test_when_an_ffn_is_compute_bound():
    """E18, scaling-book: F = 28,000 on H100s, about 13 in a node and 11 beyond it."""
    assert communication.compute_bound_tp(28_000, "h100") == pytest.approx(28_000 * 450e9 / 989e12)
    assert round(communication.compute_bound_tp(28_000, "h100")) == 13
    assert round(communication.compute_bound_tp(28_000, "h100", ranks_per_node=8)) == 11
    assert communication.compute_bound_tp(28_000, "a100", ranks_per_node=1) < 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: alpha_beta("allreduce", 8, "a100"), "op must be one of all_reduce, "),
        (lambda: alpha_beta("all_gather", 8, "a100", algorithm="tree"), "a tree is for all_reduce"),
        (lambda: alpha_beta("all_reduce", 8, "a100", protocol="simple"), "protocol must be one of LL, LL128, Simple"),
        (lambda: alpha_beta("all_reduce", 8, "tpu"), "no card 'tpu'; there are v100,"),
        (lambda: communication.fit_alpha_beta([(8, 1.0), (8, 2.0)]), "two sizes at least"),
        (lambda: communication.fit_alpha_beta([(8, 1.0), (9, 0.0)]), "a time must be positive"),
        (lambda: communication.fit_alpha_beta([(8, 2.0), (10**6, 1e-3)]), "do not grow with the size"),
        (lambda: layer(t=5), "t that work: 1, 2, 3, 4, 6, 8"),
        (
            lambda: communication.tp_layer(GPT3, Layout(tp=8, sequence_parallel=True), microbatch=1, sequence=9),
            "sequence = 9",
        ),
        (lambda: communication.step(GPT3, Layout(tp=1, cp=2), Workload(batch=1, sequence=8)), "cp = 2; take cp = 1"),
        (lambda: Workload(batch=10, sequence=8, microbatch=2).microbatches(Layout(tp=1, dp=3)), "a multiple of 6"),
        (lambda: Workload(batch=6, sequence=8, interleave=2).microbatches(Layout(tp=1, pp=4)), "m = 6 is no multiple"),
        (lambda: Workload(batch=0, sequence=8), "batch must be at least 1 and is 0"),
        (lambda: Workload(batch=1, sequence=8, core="flash"), "core must be one of explicit, sdpa, or None"),
    ],
)
def test_bad_input_is_refused_with_the_numbers(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
