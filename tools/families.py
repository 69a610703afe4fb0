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
_NORMED = "q and k normed by head"
_ASKED = "where the config asks for it"
_NO_ROTATION = "layers without a window do not rotate"
# The meaning of each value of a field of Convention, other than the default, for a reader who knows Llama's attention.
_PHRASES: dict[str, dict[object, str]] = {
    "project": {
        on.rows_normed: "q and k normed over their whole width",
        on.keys_multiplied: "k times a factor",
        on.fused: "one projection for q, k and v",
        on.fused_by_head: "one projection, head by head",
        on.gate_in_q_proj: "a gate in the projection of q",
        on.latent: "multi-head latent attention",
    },
    "gate": {"gate_proj": "a projected gate", "g_proj": "a projected gate"},
    "clip": dict.fromkeys(("config.clip_qkv", "clip_qkv"), f"q, k and v clipped {_ASKED}"),
    "norms": {
        ("q_norm", "k_norm"): _NORMED,
        ("q_layernorm", "k_layernorm"): _NORMED,
        ("q_norm", "k_norm", "use_qk_norm"): f"{_NORMED} {_ASKED}",
        ("q_layernorm", "k_layernorm", "qk_layernorm"): f"{_NORMED} {_ASKED}",
    },
    "window": {
        "of layer": "windows in some layers",
        "of sliding layer": "windows in some layers",
        "of model": "a window in all layers",
    },
    "chunks": {True: "attention within chunks in some layers"},
    "rotates": {
        "where told": "layers that do not rotate",
        "with tables": "layers, or whole models, that do not rotate",
        "windowed": _NO_ROTATION,
        "windowed or told": "most layers without a window do not rotate",
        "local": _NO_ROTATION,
        "sliding or all": f"{_NO_ROTATION} where others have one",
    },
    "after_rotation": {
        ("query_layernorm", "key_layernorm"): "q and k normed after the rotation",
        ("qk_norm", "qk_norm", "qk_norm"): f"q and k normed after the rotation {_ASKED}",
    },
    "query_scale": {
        on.scaled_by_position: "queries scaled by position",
        on.scaled_where_unrotated: "queries scaled by position in layers that do not rotate",
    },
    "finish": {
        ("out_proj",): "",
        ("dense",): "",
        ("attn_sub_norm", "o_proj"): "a norm before the output projection",
        ("o_proj", "residual_dropout"): "dropout after the output projection",
        ("sigmoid", "o_proj"): "the output times the gate's sigmoid",
        ("softplus", "o_proj"): "the output times the gate's softplus",
    },
    "interleaved": {True: "interleaved pairs", "config.rope_interleave": "interleaved pairs where the config says so"},
    "half_width": {"pairs": "", "whole": "half-width tables"},
    "softcap": {True: "softcap"},
    "sinks": {True: "sinks"},
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
    """Say how a convention differs from Llama's attention. KeyError: ``_PHRASES`` lacks one of its values."""
    default = Convention()
    changed = [name for name in _PHRASES if getattr(convention, name) != getattr(default, name)]
    found = [_PHRASES[name][getattr(convention, name)] for name in changed]
    return "; ".join(filter(None, found))


def _classes(names: Iterable[str]) -> str:
    late = set(map(path_of, SINCE_5))
    return ", ".join(f"`{name.rpartition('.')[2]}`" + r"\*" * (name in late) for name in sorted(names))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
