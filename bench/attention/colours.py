"""One colour for each provider, in the plots of every suite."""

# Red is ours, blue cuDNN, violet Triton, grey HF, and of FlashAttention amber is -2, teal -3, green -4.
COLOURS = {
    "fused": "#d7263d",
    "fused_inline": "#f46036",
    "fused_prepass": "#a4133c",
    "fused_hopper": "#ff5d8f",
    "hf_sdpa": "#adb5bd",
    "hf_flash_attn": "#6c757d",
    "hf_triton_fa2": "#b892ff",
    "liger_flash": "#f2a33a",
    "liger_cudnn": "#1f77b4",
    "liger_fa3": "#17a2a2",
    "liger_fa4": "#2a9d4b",
    "compiled_cudnn": "#56a3d9",
    "compiled_fa4": "#80c565",
    "bare_flash": "#8f5a08",
    "bare_cudnn": "#0b3c6f",
    "bare_fa3": "#0b5c5c",
    "bare_fa4": "#0f5c2e",
    "bare_triton_fa2": "#6a3d9a",
}
