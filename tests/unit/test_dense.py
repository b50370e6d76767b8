"""The dense modules against the same by hand, and against Hugging Face's names and values."""

import math

import numpy as np
import pytest
import torch

from tpcode import byhand
from tpcode.config import ModelConfig
from tpcode.dense import (
    CORES,
    FFN,
    MODELS,
    Attention,
    Dropout,
    GPT2Attention,
    KVCache,
    SwiGLU,
    rotate,
    set_dropout_step,
)

H, F = 6, 12


def test_ffn_equals_the_one_by_hand():
    ffn = FFN(H, F, bias=False, dtype=torch.float64)
    x, dy = torch.randn(7, H, dtype=torch.float64, requires_grad=True), torch.randn(7, H, dtype=torch.float64)
    y = ffn(x)
    y.backward(dy)
    A, B = (w.detach().numpy().T for w in (ffn.c_fc.weight, ffn.c_proj.weight))
    Y, H_, Z = byhand.ffn_forward(x.detach().numpy(), A, B, byhand.gelu)
    dX, dA, dB = byhand.ffn_backward(dy.numpy(), x.detach().numpy(), A, B, H_, Z, byhand.gelu)
    for ours, hand in [(y.detach(), Y), (x.grad, dX), (ffn.c_fc.weight.grad.T, dA), (ffn.c_proj.weight.grad.T, dB)]:
        np.testing.assert_allclose(ours.numpy(), hand, rtol=0, atol=1e-12)


def test_parameters_have_hugging_face_names():
    assert [name for name, _ in FFN(H, F).named_parameters()] == [
        "c_fc.weight",
        "c_fc.bias",
        "c_proj.weight",
        "c_proj.bias",
    ]
    names = [name for name, _ in SwiGLU(H, F).named_parameters()]
    assert names == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


def test_equal_to_hugging_face_modules():
    pytest.importorskip("transformers")
    from transformers import GPT2Config, LlamaConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    x = torch.randn(2, 3, H, dtype=torch.float64)
    theirs = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=F, num_attention_heads=1)).double()
    ours = SwiGLU(H, F, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)

    theirs = GPT2MLP(F, GPT2Config(n_embd=H, n_head=1)).double().eval()
    torch.nn.init.normal_(theirs.c_fc.bias)
    ours = FFN(H, F, dtype=torch.float64)
    transposed = {name: p.T if p.dim() == 2 else p for name, p in theirs.state_dict().items()}
    ours.load_state_dict(transposed)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu", "relu", "silu"])
def test_activations_by_name(name):
    reference = {
        "gelu_tanh": torch.nn.GELU("tanh"),
        "gelu": torch.nn.GELU(),
        "relu": torch.relu,
        "silu": torch.nn.SiLU(),
    }
    x = torch.linspace(-3, 3, 11, dtype=torch.float64)
    assert torch.equal(FFN(H, F, activation=name).activation(x), reference[name](x))


def test_an_activation_may_be_a_function():
    assert FFN(H, F, activation=torch.sigmoid).activation is torch.sigmoid


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="one of gelu_tanh, gelu, relu, silu, or a function, and is 'swish'"):
        FFN(H, F, activation="swish")
    with pytest.raises(TypeError, match="FFN width F must be an integer and is 12.0"):
        FFN(H, 12.0)
    with pytest.raises(ValueError, match="hidden h must be at least 1 and is 0"):
        SwiGLU(0, F)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "k"), [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_the_one_by_hand(a, k):
    """One sequence at a time by hand; as a batch in torch."""
    attention = Attention(H, a, k, head_dim=4, dtype=torch.float64)
    x, dy = (torch.randn(2, 5, H, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    y = attention(x)
    y.backward(dy)
    weights = [getattr(attention, f"{name}_proj").weight for name in "qkvo"]
    matrices = [w.detach().numpy().T for w in weights]
    of_weights = [0, 0, 0, 0]
    for i in range(2):
        X = x[i].detach().numpy()
        Y, kept = byhand.attention_forward(X, *matrices, a, k)
        dX, *gradients = byhand.attention_backward(dy[i].numpy(), X, *matrices, kept)
        of_weights = [total + one for total, one in zip(of_weights, gradients)]
        np.testing.assert_allclose(y[i].detach().numpy(), Y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(x.grad[i].numpy(), dX, rtol=0, atol=1e-12)
    for weight, hand in zip(weights, of_weights):
        np.testing.assert_allclose(weight.grad.T.numpy(), hand, rtol=0, atol=1e-12)


def test_attention_parameters_have_hugging_face_names():
    names = [name for name, _ in Attention(8, 4, 2, qk_norm="head").named_parameters()]
    assert names == [f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = [name for name, _ in GPT2Attention(8, 4).named_parameters()]
    assert names == ["c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"]


@pytest.mark.parametrize(("s", "n"), [(5, 5), (2, 5), (1, 5), (1, 1)])
def test_the_two_cores_are_equal(s, n):
    """Output and every gradient, for the last s of n tokens (what a cache leaves to do)."""
    torch.manual_seed(0)
    q, dy = (torch.randn(2, 6, s, 4, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for _ in range(2))
    found = []
    for core in CORES.values():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = core(*leaves)
        y.backward(dy)
        found.append([y, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("core", CORES)
def test_no_query_reads_a_later_token(core):
    attention = Attention(8, 4, 2, core=core, rope_theta=1e4, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    later = x.clone()
    later[:, 4:] += 1
    difference = (attention(x) - attention(later)).abs().amax((0, 2))
    assert difference[:4].max() == 0 and difference[4:].min() > 1e-3


def test_rope_depends_on_the_distance_alone():
    """A query at p and a key at p - 3 meet at the same angle wherever they are; the first position is not turned."""
    q, k = torch.randn(1, 8, dtype=torch.float64), torch.randn(1, 8, dtype=torch.float64)
    products = [rotate(q, p, 1e4) @ rotate(k, p - 3, 1e4).T for p in (3, 50, 500)]
    for product in products[1:]:
        torch.testing.assert_close(product, products[0], rtol=0, atol=1e-4)  # angles are float32
    assert torch.equal(rotate(q, 0, 1e4), q)
    assert (rotate(q, 5, 1e4) - q).abs().max() > 0.1
    torch.testing.assert_close(rotate(q, 5, 1e4).norm(), q.norm(), rtol=1e-6, atol=0)


def test_a_cache_says_what_it_holds_and_refuses_what_does_not_fit():
    cache = KVCache()
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.extend(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8))
    k, v = cache.extend(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 8))
    assert len(cache) == 5 and k.shape == v.shape == (2, 3, 5, 8)
    assert k[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1]
    assert cache.nbytes == 2 * 2 * 3 * 5 * 8 * 4
    with pytest.raises(ValueError, match="holds 2 sequences of 3 KV heads of size 8, and these are 1 of 3 of size 8"):
        cache.extend(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 8))
    assert len(cache) == 5


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Attention(8, 3), ValueError, "query heads = 3 must divide hidden h = 8, unless head_dim is given"),
        (lambda: Attention(8, 4, 3), ValueError, "query heads = 4 is no multiple of KV heads = 3"),
        (lambda: Attention(8, 8, rope_theta=1e4), ValueError, "head_dim = 1 must be even: rotary positions turn pairs"),
        (lambda: Attention(8, 4, core="flash"), ValueError, "core must be one of sdpa, explicit and is 'flash'"),
        (lambda: Attention(8, 4, qk_norm="both"), ValueError, "qk_norm must be 'head', 'all' or None and is 'both'"),
        (lambda: Attention(8.0, 4), TypeError, "hidden h must be an integer"),
        (lambda: GPT2Attention(8, 3), ValueError, "query heads = 3 must divide hidden h = 8"),
        (lambda: Attention(8, 4)(torch.zeros(5, 8)), ValueError, "must be [b, s, h] and its shape is [5, 8]"),
        (lambda: Dropout(1.0, "x"), ValueError, "dropout must be at least 0 and below 1, and is 1.0"),
        (lambda: Dropout(0.1, 3), TypeError, "place must be a name and is 3"),
        (lambda: set_dropout_step(Dropout(0.1, "x"), -1), ValueError, "step must be at least 0 and is -1"),
    ],
)
def test_nonsense_in_attention_and_dropout_is_refused(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


# ---- dropout --------------------------------------------------------------------------------------------------------


def test_a_mask_depends_on_seed_place_and_step_alone():
    """Rules out: masks that other draws from the default generator, or the order of the layers, move on."""
    x = torch.ones(1000)

    def dropped(seed, place, step):
        dropout = Dropout(0.3, place, seed)
        set_dropout_step(dropout, step)
        torch.rand(step + 7)
        return dropout(x)

    one = dropped(0, "a", 0)
    assert torch.equal(one, dropped(0, "a", 0))
    for other in (dropped(1, "a", 0), dropped(0, "b", 0), dropped(0, "a", 1)):
        assert not torch.equal(one, other)
    assert set(one.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert 0.25 < (one == 0).float().mean() < 0.35


def test_dropping_leaves_the_default_generator_alone():
    state = torch.get_rng_state()
    Dropout(0.3, "a")(torch.ones(10))
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_is_dropped_in_evaluation_or_at_p_0():
    x = torch.randn(10)
    assert Dropout(0.5, "a").eval()(x) is x and Dropout(0.0, "a")(x) is x


def test_one_byte_an_entry_is_kept_for_backward():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        Dropout(0.5, "a")(torch.randn(3, 4, requires_grad=True))
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in kept] == [(torch.bool, (3, 4))]


def test_attention_drops_probabilities():
    """Both cores the same: PyTorch's own dropout in scaled_dot_product_attention has a mask of its own, and is not
    used. Not vacuous: with dropout the output differs."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    outputs = []
    for core in CORES:
        torch.manual_seed(1)
        attention = Attention(8, 4, core=core, dropout=Dropout(0.5, "a"), dtype=torch.float64)
        outputs += [attention(x), attention.eval()(x)]
    dropped, whole, *others = outputs
    torch.testing.assert_close(others, [dropped, whole], rtol=0, atol=1e-12)
    assert (dropped - whole).abs().max() > 0.01


# ---- whole models ---------------------------------------------------------------------------------------------------


def config_of(family, **kwargs):
    sizes = {"hidden": 8, "ffn": 10, "heads": 4, "kv_heads": 2 if family == "llama" else 4, "layers": 2, "max_seq": 6}
    return ModelConfig(family=family, vocab=11, **{**sizes, **kwargs})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_has_the_parameters_that_its_config_counts(family, tied):
    config = config_of(family, tied=tied)
    model = MODELS[family](config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert bool(biases) is config.bias
    other = {
        name for name, _ in MODELS[family](config, bias=not config.bias).named_parameters() if name.endswith("bias")
    }
    assert bool(other) is not config.bias


def test_making_a_model_draws_nothing_from_the_default_generator():
    state = torch.get_rng_state()
    one, two = (MODELS["gpt2"](config_of("gpt2"), seed=3) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(p.is_meta for p in MODELS["gpt2"](config_of("gpt2"), device="meta").parameters())


@pytest.mark.parametrize("family", MODELS)
def test_a_models_loss_begins_near_that_of_guessing_and_falls(family):
    """log V, since the first logits are nearly equal; then three steps on one batch."""
    model = MODELS[family](config_of(family), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(11, (2, 2, 6), generator=generator)
    losses = []
    for _ in range(3):
        loss = model.loss(ids, targets)
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert losses[0] == pytest.approx(math.log(11), abs=0.06)
    assert losses[2] < losses[1] < losses[0]


def test_dropout_of_a_model_is_at_places_of_their_own():
    """GPT-2 drops after the embedding, scores, and after each block; Llama scores alone. Rules out: one mask twice."""
    for family, count in (("gpt2", 1 + 3 * 2), ("llama", 2)):
        model = MODELS[family](config_of(family, dropout=0.2), seed=4)
        active = [part for part in model.modules() if isinstance(part, Dropout) and part.active]
        assert len({part.place for part in active}) == len(active) == count
        assert all((part.p, part.seed) == (0.2, 4) for part in active)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MODELS["gpt2"](config_of("llama")), "GPT2 is of the family gpt2, and this config is of llama"),
        (lambda: MODELS["gpt2"](config_of("gpt2", kv_heads=2)), "GPT-2 has as many KV heads as query heads"),
        (lambda: MODELS["gpt2"](config_of("gpt2", head_dim=4)), "of size h / a: heads = 4, kv_heads = 4, head_dim = 4"),
        (
            lambda: MODELS["llama"](config_of("llama"))(torch.zeros(1, 7).long()),
            "7 tokens are more than the model's con",
        ),
        (
            lambda: MODELS["llama"](config_of("llama"))(torch.zeros(3).long()),
            "ids must be [b, s] and their shape is [3]",
        ),
    ],
)
def test_nonsense_in_models_is_refused(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)


def test_angles_kept_from_inference_can_be_trained_with():
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with torch.inference_mode():
        turned = rotate(x, first=123, theta=777.0)
    again = rotate(x.clone().requires_grad_(), first=123, theta=777.0)
    again.sum().backward()
    assert torch.equal(turned, again.detach())
