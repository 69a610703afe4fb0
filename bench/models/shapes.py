"""The models and the works of ``bench models``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.suite import length_name


@dataclass(frozen=True)
class Model:
    """A model: the family of its config class, and the config.

    kinds: the works that it is for. out: providers that cannot run it.
    """

    name: str
    family: str
    config: dict[str, Any]
    kinds: tuple[str, ...] = ("train", "step", "prefill", "decode", "serve")
    out: tuple[str, ...] = ()


def _sizes(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], head_dim: int, **more: Any) -> dict:
    """Return fields of a config. heads: of queries and of keys."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim} | more


_LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0}
_DEEPSEEK3 = _sizes(7168, 18432, 4, (128, 128), 64, first_k_dense_replace=61)
_NORMS = ("liger_norm", "own_norms")  # of heads
MODELS = (
    Model("Llama-3.2-1B", "Llama", _sizes(2048, 8192, 16, (32, 8), 64, **_LLAMA3), out=_NORMS),
    Model("Llama-3.1-8B", "Llama", _sizes(4096, 14336, 8, (32, 8), 128, **_LLAMA3), out=_NORMS),
    Model("Qwen3-0.6B", "Qwen3", _sizes(1024, 3072, 28, (16, 8), 128, **_QWEN3)),
    # Dense layers are as wide as a token's nine experts. Liger rotates halves.
    Model("DeepSeek-V3", "DeepseekV3", _DEEPSEEK3, kinds=("train", "prefill"), out=("liger", *_NORMS)),
)
# New tokens of each request of continuous batching.
NEW_TOKENS = 64


@dataclass(frozen=True)
class Work:
    """One work on a model.

    ``train`` is forward, loss and backward; ``step`` is the same and a step of AdamW; ``prefill`` fills a cache;
    ``decode`` adds one token after another to a dynamic cache of ``length`` tokens; ``serve`` answers requests of up to
    ``length`` tokens with NEW_TOKENS each, by continuous batching.
    """

    kind: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{length_name(self.length)}"

    @property
    def trains(self) -> bool:
        return self.kind in ("train", "step")

    @property
    def tokens(self) -> int:
        """Return the number of tokens; where tokens are generated, of new ones."""
        per_sequence = {"decode": 1, "serve": NEW_TOKENS}.get(self.kind, self.length)
        return self.batch * per_sequence


WORK = (
    Work("train", 4, 2048),
    Work("train", 2, 4096),
    Work("step", 4, 2048),
    Work("step", 2, 4096),
    Work("step", 1, 8192),
    Work("step", 1, 16384),
    Work("prefill", 1, 4096),
    Work("prefill", 1, 16384),
    Work("decode", 8, 4096),
    Work("serve", 64, 512),
    Work("serve", 64, 2048),
)


def make(shape: Model, device: torch.device) -> nn.Module:
    """Return the model with random weights, bfloat16 on a GPU."""
    import transformers

    config = getattr(transformers, f"{shape.family}Config")(**shape.config, tie_word_embeddings=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
