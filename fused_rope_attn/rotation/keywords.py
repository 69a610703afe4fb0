"""Keywords of other rotations, and what does the same in this package's."""

from __future__ import annotations

FLASH, TRANSFORMERS, ENGINE = "flash-attn's apply_rotary_emb's", "transformers'", "Transformer Engine's"

ROTATION: dict[str, tuple[str, str]] = {
    "unsqueeze_dim": (TRANSFORMERS, "use layout, which says where the heads are"),
    "position_embeddings": (TRANSFORMERS, "pass its two tables as cos and sin"),
    "inplace": (FLASH, "use out=x"),
    "seqlen_offsets": (FLASH, "use position_ids"),
    "max_seqlen": (FLASH, "it is not needed, leave it out"),
    "conjugate": (FLASH, "use inverse"),
    "rotary_interleaved": (FLASH, "use interleaved"),
    "rotary_cos": (FLASH, "pass the table as cos"),
    "rotary_sin": (FLASH, "pass the table as sin"),
    "tensor_format": (ENGINE, "use layout"),
    "start_positions": (ENGINE, "use position_ids"),
    "fused": (ENGINE, "there is one kernel, leave it out"),
    "freqs": (ENGINE, "pass freqs.cos() and freqs.sin() as cos and sin"),
    "freqs_cis": ("Meta's Llama's", "pass freqs_cis.real and freqs_cis.imag as cos and sin, with interleaved=True"),
    "input_pos": ("torchtune's", "use position_ids"),
    "cu_seqlens_q": ("rope_attention_varlen's", "use cu_seqlens, with layout='thd'"),
    "cu_seqlens_k": ("rope_attention_varlen's", "use cu_seqlens, with layout='thd'"),
}
