"""Which configuration a generation step runs. Decides; launches nothing."""

from __future__ import annotations

from fused_rope_attn.attention.configs import family
from fused_rope_attn.generation import configs
from fused_rope_attn.runtime import device


def reads_cache_once(len_q: int, group_size: int) -> bool:
    """Whether a generation step reads its cache once, or there is a single token. More tokens fill the tiles of
    ``rope_attention``, whose programs go through the keys once for each head instead."""
    return len_q == 1 or len_q * group_size <= configs.DECODE_ROWS


def decode_config(q, cache_is_rotated: bool) -> configs.DecodeConfig:
    """Configuration of the generation step for tensors that ``choose_backend`` has admitted."""
    return configs.decode(family(device.arch(q.device)), q.dtype.itemsize, q.shape[3], cache_is_rotated)
