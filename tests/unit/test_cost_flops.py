"""FLOPs and parameters: by PyTorch's own counter, and by the papers' formulas."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tpcode import Layout, ModelConfig
from tpcode.config import PRESETS
from tpcode.cost import flops
from tpcode.dense import MODELS

B, S = 3, 5
SMALL = {"hidden": 12, "ffn": 22, "heads": 4, "layers": 2, "vocab": 17, "max_seq": 7}
CONFIGS = {
    "gpt2": ModelConfig(family="gpt2", **SMALL),
    "gpt2, untied": ModelConfig(family="gpt2", tied=False, **SMALL),
    "llama": ModelConfig(family="llama", head_dim=6, **SMALL),
    "llama, GQA": ModelConfig(family="llama", head_dim=6, kv_heads=2, tied=False, **SMALL),
}
GPTS = [name for name, config in PRESETS.items() if config.family == "gpt2"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_those_that_torch_counts(config):
    """Forward, and forward with backward, of a real model; the explicit core writes its scores as products."""
    model = MODELS[config.family](config, core="explicit")
    ids, targets = torch.randint(config.vocab, (2, B, S))
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(ids, targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == flops.forward_flops(config, B, S)
    assert forward.get_total_flops() + backward.get_total_flops() == flops.model_flops(config, B, S)


@pytest.mark.parametrize("name", GPTS)
def test_the_papers_formulas(name):
    """N21's equation 3 and K22's equation 7 are what is counted for a GPT. K22's equation 8 adds three times the
    attention core's forward, which is what selective recomputation runs again."""
    config = PRESETS[name]
    model = flops.model_flops(config, 8, 1024)
    assert model == pytest.approx(flops.k22_model_flops(config, 8, 1024), rel=1e-12)
    assert flops.hardware_flops(config, 8, 1024, "full") == pytest.approx(flops.n21_flops(config, 8, 1024), rel=1e-12)
    exact = flops.hardware_flops(config, 8, 1024, "selective") - model
    assert flops.k22_hardware_flops(config, 8, 1024) - model == pytest.approx(3 * exact, rel=1e-9)
    counted = flops.n21_parameters(config.layers, config.hidden, config.vocab, config.max_seq)
    assert config.num_parameters == counted + 2 * config.hidden


def test_recomputation_of_gpt3():
    """Full: a third more, less the head. Selective: K22 says 2.7%, and a forward of the core alone is 0.9%."""
    config = ModelConfig.preset("k22-175b")
    model = flops.model_flops(config, 1, 2048)
    extra = {kind: flops.hardware_flops(config, 1, 2048, kind) / model - 1 for kind in flops.RECOMPUTE}
    assert extra["none"] == 0
    assert extra["full"] == pytest.approx(0.332, abs=1e-3)
    assert extra["selective"] == pytest.approx(0.0090, abs=1e-4)
    assert flops.k22_hardware_flops(config, 1, 2048) / model - 1 == pytest.approx(0.027, abs=1e-3)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_of_ranks_are_the_model(config):
    """One rank holds all. Stages hold all between them, and the table twice where it is tied."""
    assert flops.rank_parameters(config, Layout(tp=1)).elements == config.num_parameters
    stages = sum(flops.rank_parameters(config, Layout(tp=1, pp=2), stage).elements for stage in range(2))
    assert stages == config.num_parameters + (config.vocab * config.hidden if config.tied else 0)
    halves = flops.rank_parameters(config, Layout(tp=2))
    padding = config.hidden  # a row of zeros fills V = 17 up to 18
    assert 2 * halves.sharded + halves.replicated == config.num_parameters + padding * (1 if config.tied else 2)


def test_training_takes_as_long_as_narayanan_says():
    assert flops.training_seconds(175e9, 300e9, 1024, 140e12) / 86_400 == pytest.approx(33.9, abs=0.05)
    assert flops.utilization(300, 2.0, 3, 100.0) == 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda c: flops.hardware_flops(c, 1, 4, "some"),
            "recompute must be one of none, selective, full and is 'some'",
        ),
        (lambda c: flops.rank_parameters(c, Layout(tp=1, pp=2), 2), "stage must be below pp = 2 and is 2"),
        (lambda c: flops.rank_parameters(c, Layout(tp=1, pp=3)), "pp = 3 stages do not hold 2 layers evenly; pp that "),
        (lambda c: flops.layers_of_a_stage(c, Layout(tp=1, pp=2), 2), "in 2 chunks each do not hold 2 layers evenly"),
        (
            lambda c: flops.layers_of_a_stage(c, Layout(tp=1), 2),
            "interleave = 2 cuts the stages of a pipeline in chunks",
        ),
        (lambda c: flops.rank_parameters(c, Layout(tp=3)), "query heads = 4 and KV heads = 4 do not split over t = 3"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError) as caught:
        call(CONFIGS["gpt2"])
    assert words in str(caught.value)
