"""Keywords of other generation steps, and what does the same in this package's."""

from __future__ import annotations

from fused_rope_attn.attention.keywords import ATTENTION, FLASH, MODULE, SDPA, TRANSFORMERS

_MASK = "use causal and window for bands and kv_starts for left padding; other masks are not served"
_CHOICE = "the step has one set of kernels, leave it out"
KVCACHE = ATTENTION | {
    "attn_mask": (SDPA, _MASK),
    "attention_mask": (TRANSFORMERS, _MASK),
    "key_padding_mask": (MODULE, "use kv_starts for left padding and cache_seqlens for the number of keys"),
    "position_ids": (TRANSFORMERS, "new token i has position cache_seqlens + i, in the cache and in the tables"),
    "cache_position": (TRANSFORMERS, "use cache_seqlens, the number of keys of every sequence before the call"),
    "past_key_values": (TRANSFORMERS, "pass its tensors as k_cache and v_cache"),
    "cache": (TRANSFORMERS, "pass its tensors as k_cache and v_cache"),
    "seqused_k": (FLASH, "use cache_seqlens"),
    "block_tables": ("vLLM's", "use block_table"),
    "kv_lens": ("rope_attention's", "use cache_seqlens"),
    "strategy": ("rope_attention's", _CHOICE),
    "deterministic": ("rope_attention's", "the step has no gradient, and gives the same bits in every run"),
    "return_max_logit": ("rope_attention's", "clipping by the largest logit is for training, leave it out"),
}
