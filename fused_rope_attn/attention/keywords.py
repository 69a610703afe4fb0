"""Keywords of other attention functions, and their equivalents in this package."""

from __future__ import annotations

SDPA, FLASH, TRANSFORMERS, FLEX = "scaled_dot_product_attention's", "flash-attn's", "transformers'", "flex_attention's"
MODULE, FLASHINFER, LLAMA = "nn.MultiheadAttention's", "flashinfer's", "Meta's Llama's"
STEP, PACKED = "rope_attention_with_kvcache's", "rope_attention_varlen's"

_MASK = (
    "use causal and window for bands, kv_starts and kv_lens for padding, and query_starts and query_ends for an "
    "interval of query rows for each key, which fused_rope_attn.masks makes"
)
_PADDING = "use kv_starts and kv_lens, the first key and the number of keys of every batch entry"
_NO_DROPOUT = "there is no dropout here, leave it out"
_TABLES = "pass the table as cos or sin, the fourth and fifth argument"
_POSITIONS = "key j takes row j of the tables: pass the rows themselves, cos[position_ids] and sin[position_ids]"
_PAGES = "paged caches are not served by this function"
_INTERVALS = (
    "not served by this function yet: intervals count the rows of q, which are only a part of the sequence here"
)

# Keyword to (its library, advice), for every function of attention. Tables of other functions replace some entries.
ATTENTION: dict[str, tuple[str, str]] = {
    "query": (SDPA, "it is q here"),
    "key": (SDPA, "it is k here"),
    "value": (SDPA, "it is v here"),
    "attn_mask": (SDPA, _MASK),
    "is_causal": (SDPA, "use causal, which is aligned with the last key"),
    "scale": (SDPA, "use softmax_scale"),
    "dropout_p": (SDPA, _NO_DROPOUT),
    "enable_gqa": (SDPA, "k and v may always have fewer heads than q, leave it out"),
    "score_mod": (FLEX, "use softcap, sinks or window; other changes of the scores are not served"),
    "block_mask": (FLEX, _MASK),
    "key_padding_mask": (MODULE, _PADDING),
    "need_weights": (MODULE, "no probabilities are kept; return_lse gives their normaliser"),
    "attention_mask": (TRANSFORMERS, _MASK),
    "position_ids": (TRANSFORMERS, _POSITIONS),
    "position_embeddings": (TRANSFORMERS, "pass its two tables as cos and sin"),
    "scaling": (TRANSFORMERS, "use softmax_scale"),
    "sliding_window": (TRANSFORMERS, "use window=(sliding_window - 1, 0)"),
    "dropout": (TRANSFORMERS, _NO_DROPOUT),
    "s_aux": (TRANSFORMERS, "use sinks"),
    "output_attentions": (TRANSFORMERS, "no probabilities are kept; return_lse gives their normaliser"),
    "window_size": (FLASH, "use window, with the same meaning"),
    "alibi_slopes": (FLASH, "ALiBi is not served: positions are the rotation's"),
    "learnable_sink": (FLASH, "use sinks"),
    "return_attn_probs": (FLASH, "no probabilities are kept; return_lse gives their normaliser"),
    "return_softmax_lse": (FLASH, "use return_lse"),
    "rotary_cos": (FLASH, _TABLES),
    "rotary_sin": (FLASH, _TABLES),
    "rotary_interleaved": (FLASH, "use interleaved"),
    "num_splits": (FLASH, "the work is divided by the plan, leave it out"),
    "seqused_k": (FLASH, "use kv_lens"),
    "cache_leftpad": (FLASH, "use kv_starts"),
    "cache_batch_idx": (FLASH, "index the caches"),
    "logits_soft_cap": (FLASHINFER, "use softcap"),
    "sm_scale": (FLASHINFER, "use softmax_scale"),
    "softmax_temp": ("early flash-attn's", "use softmax_scale"),
    "freqs_cis": (LLAMA, "pass freqs_cis.real and freqs_cis.imag as cos and sin, with interleaved=True"),
    "cu_seqlens": (PACKED, "packed sequences are that function's, as cu_seqlens_q and cu_seqlens_k"),
    "cu_seqlens_q": (PACKED, "packed sequences are that function's"),
    "cu_seqlens_k": (PACKED, "packed sequences are that function's"),
    "max_seqlen_q": (PACKED, "packed sequences are that function's"),
    "max_seqlen_k": (PACKED, "packed sequences are that function's"),
    "cache_seqlens": (STEP, "call it to append to a cache, or use kv_lens here, the number of keys"),
    "k_cache": (STEP, "it is k here"),
    "v_cache": (STEP, "it is v here"),
    "block_table": (STEP, _PAGES),
    "query_starts": ("rope_attention's", _INTERVALS),
    "query_ends": ("rope_attention's", _INTERVALS),
    "return_max_logit": ("rope_attention's", "not served by this function yet: no rank has all queries"),
}

_BOUNDS = "cu_seqlens_k says where the keys of every sequence begin and end"
_PACKED_INTERVALS = (
    "pass the packed tokens to rope_attention as one sequence, with intervals of fused_rope_attn.masks.documents"
)
_BANDS = "use causal and window for bands; other masks are not served, and padding is left out of packed tensors"
VARLEN = ATTENTION | {
    "attn_mask": (SDPA, _BANDS),
    "block_mask": (FLEX, _BANDS),
    "attention_mask": (TRANSFORMERS, _BANDS),
    "key_padding_mask": (MODULE, "padding is left out of packed tensors"),
    "seqused_k": (FLASH, _BOUNDS),
    "cache_leftpad": (FLASH, _BOUNDS),
    "position_ids": (
        TRANSFORMERS,
        "positions restart in every sequence; cu_seqlens_from_position_ids makes cu_seqlens",
    ),
    "cu_seqlens": (TRANSFORMERS, "pass it as cu_seqlens_q and as cu_seqlens_k"),
    "max_seqlen": (TRANSFORMERS, "pass it as max_seqlen_q and as max_seqlen_k"),
    "cache_seqlens": (STEP, _BOUNDS),
    "kv_starts": ("rope_attention's", _BOUNDS),
    "kv_lens": ("rope_attention's", _BOUNDS),
    "query_starts": ("rope_attention's", _PACKED_INTERVALS),
    "query_ends": ("rope_attention's", _PACKED_INTERVALS),
    "layout": ("rope_attention's", "packed tensors are always (T, H, D), leave it out"),
}

_PLANNED = (PACKED, "pass cu_seqlens to plan_varlen_cp once a batch, and its plan here")
_OF_PLAN = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
PACKED_PARALLEL = VARLEN | dict.fromkeys(_OF_PLAN, _PLANNED)

ALONE = "rope_attention's"
_NOT_LATENT = "multi-head latent attention does not serve it"
_OF_LATENT: dict[str, tuple[str, str]] = {
    "q": (ALONE, "pass its columns as q_nope and q_rope, for example from q.split([DN, R], -1)"),
    "k": (ALONE, "pass k_nope, and as k_rope the one head that is rotated"),
    "rotary_dim": (ALONE, "q_rope and k_rope hold exactly the columns that are rotated, leave it out"),
    "softcap": (ALONE, _NOT_LATENT),
    "sinks": (ALONE, _NOT_LATENT),
    "q_norm": (ALONE, _NOT_LATENT),
    "k_norm": (ALONE, _NOT_LATENT),
    "strategy": (ALONE, "k_rope is always rotated once, leave it out"),
    "batch_invariant": (ALONE, _NOT_LATENT),
    "return_max_logit": (ALONE, _NOT_LATENT),
}
LATENT = ATTENTION | _OF_LATENT
PACKED_LATENT = VARLEN | _OF_LATENT
