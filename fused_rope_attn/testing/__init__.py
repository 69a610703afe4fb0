"""Inputs, references, tolerances and poisoning: what the tests, the verification and the benchmark's gate share."""

from fused_rope_attn.testing.cases import INTERVALS, LAYOUTS, TABLES, Case, Inputs, make_inputs, masks_of, norms_of
from fused_rope_attn.testing.latent import (
    LatentCase,
    LatentInputs,
    LatentResults,
    compare_latent,
    make_latent_inputs,
    run_latent_op,
    run_latent_reference,
)
from fused_rope_attn.testing.poison import poison_empty
from fused_rope_attn.testing.rotation import RotationResults, run_rotation_reference
from fused_rope_attn.testing.rounding import RandomRounding
from fused_rope_attn.testing.runs import Results, run_op, run_reference
from fused_rope_attn.testing.tolerance import DRAWS, Comparison, compare, noise_of_zero

__all__ = [
    "DRAWS",
    "INTERVALS",
    "LAYOUTS",
    "TABLES",
    "Case",
    "Comparison",
    "Inputs",
    "LatentCase",
    "LatentInputs",
    "LatentResults",
    "RandomRounding",
    "Results",
    "RotationResults",
    "compare",
    "compare_latent",
    "make_inputs",
    "make_latent_inputs",
    "masks_of",
    "noise_of_zero",
    "norms_of",
    "poison_empty",
    "run_latent_op",
    "run_latent_reference",
    "run_op",
    "run_reference",
    "run_rotation_reference",
]
