"""The page that lists the attention classes of transformers that ``patch_model`` serves, and those that it does not.

    python -m tools.families              writes docs/reference/families.md from the tables of the integration
    python -m tools.families --check      writes nothing; exit 1 where the page does not match the tables

Needs transformers 5: before it the tables leave classes out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from fused_rope_attn.integrations.transformers import families as on
from fused_rope_attn.integrations.transformers.families import SINCE_5, SUPPORTED, UNSUPPORTED, Convention, path_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
# The meaning of each value of a field of Convention, other than the default, for a reader who knows Llama's attention.
_PHRASES: dict[object, str] = {
    on.q_and_k_norm: "q and k normed by head",
    on.q_and_k_layernorm: "q and k normed by head",
    on.q_and_k_norm_perhaps: "q and k normed by head where the config asks for it",
    on.q_and_k_layernorm_perhaps: "q and k normed by head where the config asks for it",
    on.rows_normed: "q and k normed over their whole width",
    on.clipped: "q, k and v clipped where the config asks for it",
    on.rows_normed_clipped: "q and k normed over their whole width, and with v clipped where the config asks for it",
    on.keys_multiplied: "k times a factor",
    on.fused: "one projection for q, k and v",
    on.fused_clipped: "one projection for q, k and v, clipped where the config asks for it",
    on.fused_by_head: "one projection, head by head",
    on.fused_by_head_layernormed_perhaps: "one projection, head by head, normed where the config asks for it",
    on.gate_in_q_proj: "a gate in the projection of q",
    on.gate_proj: "a projected gate",
    on.g_proj: "a projected gate",
    on.latent: "multi-head latent attention",
    on.latent_scaled: "multi-head latent attention with scaled queries and latent vectors",
    on.latent_gated: "multi-head latent attention with a projected gate",
    on.window_of_layer: "windows in some layers",
    on.window_of_sliding_layer: "windows in some layers",
    on.window_of_model: "a window in all layers",
    on.where_module_says: "layers that do not rotate",
    on.where_tables_are_given: "layers, or whole models, that do not rotate",
    on.where_windowed: "layers without a window do not rotate",
    on.where_windowed_or_told: "most layers without a window do not rotate",
    on.where_local: "layers without a window do not rotate",
    on.where_sliding_or_all: "layers without a window do not rotate where others have one",
    on.query_and_key_layernorm: "q and k normed after the rotation",
    on.qk_norm_perhaps: "q and k normed after the rotation where the config asks for it",
    on.scaled_by_position: "queries scaled by position",
    on.scaled_by_place: "queries scaled by position",
    on.scaled_where_unrotated: "queries scaled by position in layers that do not rotate",
    on.chunk_of_layer: "attention within chunks in some layers",
    on.out_proj: "",
    on.dense: "",
    on.normed_o_proj: "a norm before the output projection",
    on.o_proj_with_dropout: "dropout after the output projection",
    on.gated_o_proj: "the output times the gate's sigmoid",
    on.softplus_gated_o_proj: "the output times the gate's softplus",
}
_HEAD = """# Supported attention classes

<!-- Written by `python -m tools.families` from the tables in integrations/transformers/families.py, not by hand. -->

`patch_model` serves these {supported} attention classes, as far as the installed transformers has them, and subclasses
that override none of their methods. `*` marks classes that are served from transformers 5 on only.

| what differs from Llama | classes |
| --- | --- |
"""
_MIDDLE = """
Scales other than that of the head dimension and partial rotation are no difference here. In models with recurrent
layers beside attention (Bamba, Falcon-H1, Granite 4, LFM 2, MiniMax, OLMo Hybrid, Qwen3-Next and 3.5) the recurrences
stay as they are.

## Classes that are not served

Each is refused by name, or left alone with `unsupported="skip"`, and `patch_report` gives the reason. What is in
neither list is refused too.

| class | why |
| --- | --- |
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tools.families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page does not match")
    check, text = parser.parse_args(argv).check, page()
    if check and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text):
        print(f"{PAGE} does not match the tables: run `python -m tools.families`", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """Return the whole page."""
    served: dict[str, list[str]] = {}
    for name, convention in SUPPORTED.items():
        served.setdefault(describe(convention) or "nothing", []).append(name)
    rows = [f"| {difference} | {_classes(names)} |" for difference, names in served.items()]
    refused: dict[str, list[str]] = {}
    for name, reason in UNSUPPORTED.items():
        refused.setdefault(reason, []).append(name)
    reasons = [f"| {_classes(names)} | {reason} |" for reason, names in refused.items()]
    return _HEAD.format(supported=len(SUPPORTED)) + "\n".join(rows) + "\n" + _MIDDLE + "\n".join(reasons) + "\n"


def describe(convention: Convention) -> str:
    """Say how a convention differs from Llama's attention. KeyError: ``_PHRASES`` lacks one of its functions."""
    default, found = Convention(), []
    for name in ("project", "norms", "window", "chunk", "rotates", "after_rotation", "query_scale", "finish"):
        value = getattr(convention, name)
        if value != getattr(default, name):
            found.append(_PHRASES[value])
    words = {
        "interleaved pairs": convention.interleaved is on.adjacent,
        "interleaved pairs where the config says so": convention.interleaved is on.adjacent_perhaps,
        "half-width tables": convention.half_width is on.as_is,
        "softcap": convention.softcap,
        "sinks": convention.sinks,
    }
    found += [word for word, holds in words.items() if holds]
    return "; ".join(filter(None, found))


def _classes(names: Iterable[str]) -> str:
    late = set(map(path_of, SINCE_5))
    return ", ".join(f"`{name.rpartition('.')[2]}`" + r"\*" * (name in late) for name in sorted(names))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
