"""The generation step in Triton's interpreter, for tests of those who call it."""

from fused_rope_attn.generation.api import run_step


def interpreted_step(*arguments, return_lse=False, **options):
    """`rope_attention_with_kvcache` by the kernels, where CPU tensors would take the reference."""
    o, lse = run_step(*arguments, backend="triton", **options)
    return (o, lse) if return_lse else o
