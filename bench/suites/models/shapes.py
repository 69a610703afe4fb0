"""The models and the works of ``bench models``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.names import length_name


@dataclass(frozen=True)
class Model:
    """A shape: the family of transformers' classes, what its config says, and how many layers memory costs it.

    config_class: where it is not the family's. norms: it norms the heads of q and k. kinds: of works that it is for.
    """

    name: str
    family: str
    config: dict[str, Any]
    left_out: int = 0
    config_class: str = ""
    norms: bool = False
    kinds: tuple[str, ...] = ("train", "prefill", "decode", "serve")


_LLAMA3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_attention_heads": 32,
}
MODELS = (
    Model(
        "Llama-3.2-1B",
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64} | _LLAMA3,
    ),
    Model(
        "Llama-3.1-8B",
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "head_dim": 128} | _LLAMA3,
        left_out=24,
    ),
    Model(
        "Qwen3-0.6B",
        "Qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        },
        norms=True,
    ),
    Model(
        "Gemma3-1B",
        "Gemma3",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
        },
        config_class="Gemma3TextConfig",
        norms=True,
        kinds=("train", "prefill", "serve"),
    ),
)


# What each request of continuous batching is answered with.
NEW_TOKENS = 64


@dataclass(frozen=True)
class Work:
    """What is timed: ``train`` is forward, loss and backward; ``prefill`` fills a cache; ``decode`` adds one token
    after another to a dynamic cache of ``length`` tokens; ``serve`` answers requests of up to ``length`` tokens with
    NEW_TOKENS each, by continuous batching.

    checkpoints: training keeps each layer's input alone, and runs the layer again before its backward pass.
    """

    kind: str
    batch: int
    length: int
    checkpoints: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}-{length_name(self.length)}{'-checkpoint' if self.checkpoints else ''}"

    @property
    def tokens(self) -> int:
        """New ones, where tokens are generated."""
        per_sequence = {"decode": 1, "serve": NEW_TOKENS}.get(self.kind, self.length)
        return self.batch * per_sequence


WORK = (
    Work("train", 4, 2048),
    Work("train", 2, 4096),
    Work("train", 2, 4096, checkpoints=True),
    Work("prefill", 1, 4096),
    Work("prefill", 1, 16384),
    Work("decode", 8, 4096),
    Work("serve", 64, 512),
    Work("serve", 64, 2048),
)


def make(shape: Model, device: torch.device) -> nn.Module:
    """The model with random weights, bfloat16 on a GPU."""
    import transformers

    config_class = getattr(transformers, shape.config_class or f"{shape.family}Config")
    config = config_class(**shape.config, tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return getattr(transformers, f"{shape.family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
