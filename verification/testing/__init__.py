"""Inputs, references, tolerances and poisoning: what the tests, the verification and the benchmark's gate share."""

# ruff: noqa: F401
from verification.testing.cases import (
    INTERVALS,
    LAYOUTS,
    ROWS,
    TABLES,
    Case,
    Inputs,
    LatentCase,
    LatentInputs,
    bounds_of,
    ends_of,
    make_inputs,
    make_latent_inputs,
    masks_of,
    norms_of,
)
from verification.testing.poison import poison_empty
from verification.testing.rounding import RandomRounding
from verification.testing.runs import (
    Results,
    reference_attention,
    run_latent_op,
    run_latent_reference,
    run_op,
    run_reference,
    run_rotation_reference,
)
from verification.testing.tolerance import DRAWS, Finding, compare, noise_of_zero
