"""Whole decoders of the two families, and the weights that they begin with.

Symbols: b microbatch, s sequence, h hidden, F FFN width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from tpcode.config import ModelConfig
from tpcode.dense.attention import Attention, GPT2Attention, KVCache
from tpcode.dense.dropout import Dropout, keyed_generator
from tpcode.dense.ffn import FFN, SwiGLU

BLOCK_OUTPUTS = ("c_proj.weight", "o_proj.weight", "down_proj.weight")  # what is added to the residual stream


class Decoder(nn.Module):
    """What the families share: ids [b, s] -> logits [b, s, V]. Use `GPT2` or `Llama`.

    Args:
        config: sizes. Where `tied`, there is no head of its own, in the model as in Hugging Face's files.
        bias: whether linear layers (and GPT-2's norms) have one; None is the family's habit, `config.bias`.
        core: of the attention, see `CORES`.
        seed: of the first weights and of dropout.
        std: of the first weights, see `initial`.
        device, dtype: of the parameters; on "meta" they have no values.

    Attributes:
        names: where the parts are, by the names that `tpcode.ParallelTransformer` has for them.

    Raises:
        ValueError: the config is of another family, or has what the family has not.
    """

    family: str
    names: dict[str, str | tuple[str, ...]]

    def __init__(
        self,
        config: ModelConfig,
        *,
        bias: bool | None = None,
        core: str = "sdpa",
        seed: int = 0,
        std: float | None = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if config.family != self.family:
            raise ValueError(
                f"{type(self).__name__} is of the family {self.family}, and this config is of {config.family}"
            )
        self.config, self.core, self.seed = config, core, seed
        self.bias = config.bias if bias is None else bias
        self._build(config, {"device": "meta", "dtype": dtype})  # draws no random numbers only to overwrite them
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            whole = {
                name: initial(name, parameter.shape, config.layers, seed, std).to(device, parameter.dtype)
                for name, parameter in self.named_parameters()
            }
            self.load_state_dict(whole, assign=True)

    def _build(self, config: ModelConfig, factory: dict) -> None:
        raise NotImplementedError

    def part(self, name: str) -> nn.Module | None:
        """The part that `names` calls so, None where there is none."""
        path = self.names.get(name)
        return None if path is None or (name == "head" and self.config.tied) else self.get_submodule(path)

    def forward(self, ids: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """
        Args:
            ids: [b, s].
            caches: one for each layer, with what the tokens before these have left; each is extended by these.

        Raises:
            ValueError: ids are not [b, s]; with the tokens before they are more than `config.max_seq`.
        """
        first = require_ids(ids, caches, self.config)
        x = self.part("embedding")(ids)  # [b, s] -> [b, s, h]
        if (positions := self.part("positions")) is not None:
            x = x + positions(torch.arange(first, first + ids.shape[1], device=ids.device))
        x = self.dropout(x)
        for i, block in enumerate(self.part("blocks")):
            x = block(x, caches and caches[i])
        x = self.part("norm")(x)
        head = self.part("embedding") if self.config.tied else self.part("head")
        return linear(x, head.weight)  # [b, s, h] -> [b, s, V]

    def loss(self, ids: Tensor, targets: Tensor, **options) -> Tensor:
        """The cross-entropy of every token's target, ids and targets [b, s]; options as torch's function takes them."""
        return cross_entropy(self(ids).mT, targets, **options)  # [b, s, V] -> [b, V, s], as torch wants it

    def _drop(self, place: str) -> Dropout:
        return Dropout(self.config.dropout, place, self.seed)


class GPT2(Decoder):
    """GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GeLU, biases. Dropout after the embedding, of the
    attention probabilities, and after each block. Hugging Face's `GPT2LMHeadModel`."""

    family = "gpt2"
    names = {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks": "transformer.h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "norm_1": "ln_1",
        "attention": "attn",
        "norm_2": "ln_2",
        "ffn": "mlp",
        "qkv": "c_attn",
        "o_proj": "c_proj",
    }

    def _build(self, config: ModelConfig, factory: dict) -> None:
        h = config.hidden
        if (config.kv_heads, config.head_dim * config.heads) != (config.heads, h):
            raise ValueError(
                f"GPT-2 has as many KV heads as query heads, of size h / a: heads = {config.heads}, "
                f"kv_heads = {config.kv_heads}, head_dim = {config.head_dim}, hidden = {h}"
            )
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding(config.vocab, h, factory),
                "wpe": embedding(config.max_seq, h, factory),
                "h": nn.ModuleList(GPT2Block(self, i, factory) for i in range(config.layers)),
                "ln_f": nn.LayerNorm(h, config.norm_eps, bias=self.bias, **factory),
            }
        )
        if not config.tied:
            self.lm_head = nn.Linear(h, config.vocab, bias=False, **factory)
        self.dropout = self._drop("embedding")


class GPT2Block(nn.Module):
    """One of L blocks: attention, then FFN, each of the norm of the residual stream and added to it."""

    def __init__(self, model: GPT2, number: int, factory: dict):
        super().__init__()
        config, bias, h = model.config, model.bias, model.config.hidden
        drop_scores = model._drop(f"{number}/scores") if config.dropout else None
        self.ln_1 = nn.LayerNorm(h, config.norm_eps, bias=bias, **factory)
        self.attn = GPT2Attention(h, config.heads, bias=bias, core=model.core, dropout=drop_scores, **factory)
        self.ln_2 = nn.LayerNorm(h, config.norm_eps, bias=bias, **factory)
        self.mlp = FFN(h, config.ffn, bias=bias, **factory)
        self.dropout_1, self.dropout_2 = model._drop(f"{number}/attention"), model._drop(f"{number}/ffn")

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.dropout_1(self.attn(self.ln_1(x), cache))  # [b, s, h]
        return x + self.dropout_2(self.mlp(self.ln_2(x)))


class Llama(Decoder):
    """Llama (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, grouped KV heads, no bias. Dropout of the
    attention probabilities alone. Hugging Face's `LlamaForCausalLM`, whose two bias options are `bias`."""

    family = "llama"
    names = {
        "embedding": "model.embed_tokens",
        "blocks": "model.layers",
        "norm": "model.norm",
        "head": "lm_head",
        "norm_1": "input_layernorm",
        "attention": "self_attn",
        "norm_2": "post_attention_layernorm",
        "ffn": "mlp",
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "gate_up": ("gate_proj", "up_proj"),
    }

    def _build(self, config: ModelConfig, factory: dict) -> None:
        h = config.hidden
        self.model = nn.ModuleDict(
            {
                "embed_tokens": embedding(config.vocab, h, factory),
                "layers": nn.ModuleList(LlamaBlock(self, i, factory) for i in range(config.layers)),
                "norm": nn.RMSNorm(h, config.norm_eps, **factory),
            }
        )
        if not config.tied:
            self.lm_head = nn.Linear(h, config.vocab, bias=False, **factory)
        self.dropout = Dropout(0.0, "embedding")


class LlamaBlock(nn.Module):
    """As `GPT2Block`."""

    def __init__(self, model: Llama, number: int, factory: dict):
        super().__init__()
        config, h = model.config, model.config.hidden
        options = {"head_dim": config.head_dim, "rope_theta": config.rope_theta, "bias": model.bias, "core": model.core}
        drop_scores = model._drop(f"{number}/scores") if config.dropout else None
        self.input_layernorm = nn.RMSNorm(h, config.norm_eps, **factory)
        self.self_attn = Attention(h, config.heads, config.kv_heads, dropout=drop_scores, **options, **factory)
        self.post_attention_layernorm = nn.RMSNorm(h, config.norm_eps, **factory)
        self.mlp = SwiGLU(h, config.ffn, bias=model.bias, **factory)
        self.dropout_1, self.dropout_2 = Dropout(0.0, f"{number}/attention"), Dropout(0.0, f"{number}/ffn")

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.dropout_1(self.self_attn(self.input_layernorm(x), cache))  # [b, s, h]
        return x + self.dropout_2(self.mlp(self.post_attention_layernorm(x)))


MODELS: dict[str, type[Decoder]] = {model.family: model for model in (GPT2, Llama)}


def embedding(rows: int, h: int, factory: dict) -> nn.Embedding:
    """A table whose weight [rows, h] has no values yet. Left to itself, torch would draw them: on "meta" that imports
    its whole compiler, DTensor with it, a second for every rank of every job."""
    return nn.Embedding.from_pretrained(torch.empty(rows, h, **factory), freeze=False)


def initial(name: str, shape: Sequence[int], layers: int, seed: int = 0, std: float | None = 0.02) -> Tensor:
    """What a dense parameter begins with: whole, unpadded, in float32, from (seed, name) and nothing else.

    So every rank can make a parameter, take its slice and drop the rest, and the model is the same at every t. A
    generator that goes from one parameter to the next, or draws shards, makes another model for each t.

    Norms begin with 1, biases with 0, all else normal with mean 0. The last matrix of each block has its standard
    deviation divided by √(2L): 2L such outputs add up in the residual stream (Radford et al. 2019, section 2.3).

    Args:
        name, shape: of the dense parameter, as `Decoder` has it.
        layers: L.
        std: standard deviation; None is 1/√fan-in, of the whole weight: a shard of a row-parallel one has fewer
            inputs, and is no reason for larger weights.
    """
    if len(shape) == 1:
        return torch.full(tuple(shape), 0.0 if name.endswith("bias") else 1.0, dtype=torch.float32, device="cpu")
    scale = shape[1] ** -0.5 if std is None else std
    if name.endswith(BLOCK_OUTPUTS):
        scale /= sqrt(2 * layers)
    drawn = torch.randn(tuple(shape), generator=keyed_generator(f"{seed}/{name}"), dtype=torch.float32, device="cpu")
    return drawn.mul_(scale)


def require_ids(ids: Tensor, caches: Sequence[KVCache] | None, config: ModelConfig) -> int:
    """The position of the first of these ids.

    Raises:
        ValueError: they are not [b, s]; there is not one cache for each layer; together with the tokens before them
            they are more than the model's context.
        TypeError: they are no tensor.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a tensor and not a {type(ids).__name__}")
    if ids.dim() != 2:
        raise ValueError(f"ids must be [b, s] and their shape is {list(ids.shape)}")
    if caches is not None and len(caches) != config.layers:
        raise ValueError(f"there must be one cache for each of {config.layers} layers, and there are {len(caches)}")
    first = len(caches[0]) if caches else 0
    if first + ids.shape[1] > config.max_seq:
        before = f" after {first} before them" if first else ""
        raise ValueError(f"{ids.shape[1]} tokens{before} are more than the model's context of {config.max_seq}")
    return first
