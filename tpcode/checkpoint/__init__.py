"""Weights in files: Hugging Face directories in and out, shards for any number of ranks, and the shipped SmolLM2."""

from tpcode.checkpoint.files import CheckpointError
from tpcode.checkpoint.pretrained import (
    SMOLLM2,
    smollm2,
    smollm2_end,
    smollm2_ffn,
    smollm2_ffn_input,
    smollm2_file,
    smollm2_tokenizer,
    smollm2_tokens,
    smollm2_weight,
)
from tpcode.checkpoint.shards import load, merge, open_checkpoint, reshard, save, shard

__all__ = [
    "SMOLLM2",
    "CheckpointError",
    "load",
    "merge",
    "open_checkpoint",
    "reshard",
    "save",
    "shard",
    "smollm2",
    "smollm2_end",
    "smollm2_ffn",
    "smollm2_ffn_input",
    "smollm2_file",
    "smollm2_tokenizer",
    "smollm2_tokens",
    "smollm2_weight",
]
