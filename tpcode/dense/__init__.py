"""The dense counterparts: plain PyTorch on one device. They are what "equals dense" means.

Parameters have Hugging Face's names, and torch's shapes: a weight is [out, in], so that the columns of the paper's A
are its rows. The dense counterpart of a split linear layer is `torch.nn.Linear`; of the vocabulary's layers,
`torch.nn.Embedding`, `torch.nn.Linear` and `torch.nn.functional.cross_entropy`; of the norms, torch's own; of a whole
transformer, `GPT2` or `Llama`. (Hugging Face's GPT-2 alone keeps its weights as [in, out], in a module called Conv1D:
transpose those of `c_attn`, `c_fc` and `c_proj` on the way in and out, as `tpcode.checkpoint` does.)
"""

from tpcode.dense.attention import (
    CORES,
    Attention,
    GPT2Attention,
    KVCache,
    attend,
    explicit_attention,
    named_core,
    require_sequence,
    rotate,
    sdpa_attention,
)
from tpcode.dense.dropout import Dropout, keyed_generator, set_dropout_step
from tpcode.dense.ffn import ACTIVATIONS, FFN, Activation, SwiGLU, gelu_tanh, named_activation
from tpcode.dense.models import GPT2, MODELS, Decoder, Llama, initial, require_ids

__all__ = [
    "ACTIVATIONS",
    "CORES",
    "FFN",
    "GPT2",
    "MODELS",
    "Activation",
    "Attention",
    "Decoder",
    "Dropout",
    "GPT2Attention",
    "KVCache",
    "Llama",
    "SwiGLU",
    "attend",
    "explicit_attention",
    "gelu_tanh",
    "initial",
    "keyed_generator",
    "named_activation",
    "named_core",
    "require_ids",
    "require_sequence",
    "rotate",
    "sdpa_attention",
    "set_dropout_step",
]
