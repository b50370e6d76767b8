"""Model sizes: parameter counts against published ones, and nonsense refused."""

from dataclasses import FrozenInstanceError, replace

import pytest

from tpcode.config import PRESETS, Layout, ModelConfig

SMALL = {"family": "gpt2", "hidden": 12, "ffn": 48, "heads": 4, "layers": 2, "vocab": 10, "max_seq": 8}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("smollm2-135m", 134_515_008),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
    ],
)
def test_parameters_of_released_models(name, count):
    assert ModelConfig.preset(name).num_parameters == count


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("m19", "n21", "gpt3"))])
def test_parameters_of_the_papers_tables(name):
    """The published billions, within their rounding. Not vacuous: the next larger row differs by 20% at least."""
    digits = name.split("-")[1]
    published = 1008.0 if digits == "1t" else float(digits.removesuffix("b"))
    step = 10.0 ** -(len(digits.removesuffix("b").split(".")[1]) if "." in digits else 0)
    assert ModelConfig.preset(name).num_parameters / 1e9 == pytest.approx(published, abs=step / 2)


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if config.family == "gpt2"])
def test_parameters_follow_the_papers_formula(name):
    """P = 12 L h² (1 + 13/(12h) + (V+s)/(12Lh)) (Narayanan et al. 2021, eq. 2), which leaves out the last norm's 2h."""
    c = ModelConfig.preset(name)
    terms = 12 * c.layers * c.hidden**2 + 13 * c.layers * c.hidden + (c.vocab + c.max_seq) * c.hidden
    assert c.num_parameters == terms + 2 * c.hidden


def test_papers_that_name_the_same_model_agree():
    assert PRESETS["k22-530b"] == PRESETS["n21-529.6b"]
    assert PRESETS["k22-1t"] == PRESETS["n21-1t"]
    assert PRESETS["k22-175b"] == replace(PRESETS["gpt3-175b"], vocab=51_200)


def test_defaults_are_filled_in():
    config = ModelConfig(**SMALL)
    assert (config.kv_heads, config.head_dim, config.bias, config.gated) == (4, 3, True, False)
    assert hash(config) == hash(ModelConfig(**SMALL, kv_heads=4, head_dim=3))


def test_parameters_with_a_head_size_of_its_own():
    """q and o are 12 x (4·5), k and v 12 x (2·5); biases 20 + 10 + 10 + 12."""
    config = ModelConfig(**{**SMALL, "hidden": 12}, kv_heads=2, head_dim=5)
    assert config.attention_parameters == 2 * 12 * 20 + 2 * 12 * 10 + 52
    assert config.ffn_parameters == 2 * 12 * 48 + 48 + 12


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"family": "gpt3"}, ValueError, "family must be one of gpt2, llama and is 'gpt3'"),
        ({"hidden": 13}, ValueError, "heads = 4 must divide hidden = 13, unless head_dim is given"),
        ({"kv_heads": 3}, ValueError, "kv_heads = 3 must divide heads = 4"),
        ({"kv_heads": 8}, ValueError, "kv_heads = 8 must divide heads = 4"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1 and is 0"),
        ({"hidden": 0}, ValueError, "hidden must be at least 1"),
        ({"layers": -1}, ValueError, "layers must be at least 1 and is -1"),
        ({"vocab": 10.0}, TypeError, "vocab must be an integer and is 10.0"),
        ({"max_seq": True}, TypeError, "max_seq must be an integer and is True"),
        ({"ffn": None}, TypeError, "ffn must be an integer and is None"),
        ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1, and is 1.0"),
        ({"dropout": -0.1}, ValueError, "-0.1"),
        ({"dropout": float("nan")}, ValueError, "nan"),
        ({"tied": 1}, TypeError, "tied must be True or False and is 1"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps = 0.0"),
        ({"rope_theta": -1.0}, ValueError, "rope_theta = -1.0"),
        ({"family": "llama"}, ValueError, "head_dim = 3 must be even"),
    ],
)
def test_nonsense_is_refused_with_the_numbers(change, error, words):
    with pytest.raises(error) as caught:
        ModelConfig(**{**SMALL, **change})
    assert words in str(caught.value)


def test_configs_are_frozen_and_take_keywords_only():
    with pytest.raises(FrozenInstanceError):
        ModelConfig(**SMALL).hidden = 5
    with pytest.raises(TypeError):
        ModelConfig("gpt2", 12, 48, 4)
    with pytest.raises(TypeError):
        Layout(8)


def test_an_unknown_preset_is_answered_with_the_list():
    with pytest.raises(ValueError, match="no preset 'gpt4'; there are gpt2, .*smollm2-135m"):
        ModelConfig.preset("gpt4")


def test_layout():
    assert Layout(tp=8, pp=4, dp=2).world_size == 64
    assert Layout(tp=1) == Layout(tp=1, pp=1, dp=1, cp=1, sequence_parallel=False)
    for bad, error in [
        ({"tp": 0}, ValueError),
        ({"tp": 2, "pp": -1}, ValueError),
        ({"tp": 2.0}, TypeError),
        ({"tp": 2, "sequence_parallel": 1}, TypeError),
    ]:
        with pytest.raises(error, match="must be"):
            Layout(**bad)
