"""Inputs, references, tolerances and poisoning: what the tests, the verification and the benchmark's gate share."""

from verification.testing.cases import INTERVALS, LAYOUTS, TABLES, Case, Inputs, make_inputs, masks_of, norms_of
from verification.testing.latent import (
    LatentCase,
    LatentInputs,
    LatentResults,
    compare_latent,
    make_latent_inputs,
    run_latent_op,
    run_latent_reference,
)
from verification.testing.poison import poison_empty
from verification.testing.rotation import RotationResults, run_rotation_reference
from verification.testing.rounding import RandomRounding
from verification.testing.runs import Results, reference_attention, run_op, run_reference
from verification.testing.tolerance import DRAWS, Comparison, compare, noise_of_zero

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
    "reference_attention",
    "run_latent_op",
    "run_latent_reference",
    "run_op",
    "run_reference",
    "run_rotation_reference",
]
