"""``python -m fused_rope_attn.integrations.transformers CHECKPOINT``: what ``patch_model`` would do with a checkpoint.

Make the model of a config without weights, on the meta device, and print which of its attention modules are served, by
which kernels at a batch size and length on this card, and why the others are not. Launch no kernels. Exit status: 0 if
all attention modules are served, 1 if one is not, 2 if the checkpoint cannot be examined.
"""

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn

from fused_rope_attn import plan, plan_mla, plan_with_kvcache
from fused_rope_attn.integrations.transformers import attention, families, obstacles, patch_model, state
from fused_rope_attn.integrations.transformers.batch import Batch
from fused_rope_attn.integrations.transformers.tables import rope_tables_from_config
from fused_rope_attn.masks import chunks


class Calls(NamedTuple):
    """The size of the calls to plan. card: the device that they would run on."""

    batch: int
    length: int
    dtype: torch.dtype
    card: torch.device


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of a checkpoint and return the exit status."""
    parser = argparse.ArgumentParser(f"python -m {__package__}", description="Examine a checkpoint.")
    parser.add_argument("checkpoint", help="a config.json, a folder with one, or a model's name on the hub")
    parser.add_argument("--batch", type=_size, default=1, help="batch size of the calls to plan")
    parser.add_argument("--length", type=_size, default=4096, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args(arguments)
    card = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    calls = Calls(given.batch, given.length, getattr(torch, given.dtype), card)
    try:
        config = transformers.AutoConfig.from_pretrained(given.checkpoint)
        model = empty_model(config, calls.dtype)
    except (OSError, ValueError, ImportError) as error:
        where = "" if os.path.exists(given.checkpoint) else " (no file or folder here has this name)"
        print(f"{given.checkpoint}{where} cannot be examined: {error}", file=sys.stderr)
        return 2
    report = examine(model)
    where = torch.cuda.get_device_name() if card.type == "cuda" else "no GPU"
    print(f"{type(model).__name__}, transformers {transformers.__version__}, {where}\n\n{report}")
    if any(row.patched for row in report):
        print(f"\nKernels for {given.dtype}, batch {calls.batch}, {calls.length} tokens:")
        print("\n".join(kernels(model, report, calls)))
    return 0 if report and all(row.patched for row in report) else 1


def _size(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {text}")
    return int(text)


def empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Make the model of a config without weights. Raise ValueError if transformers has no class for it."""
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    cls: Any = next(filter(None, named), None)
    with torch.device("meta"):
        if cls is not None:
            return cast(nn.Module, cls._from_config(config, dtype=dtype))
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
            if type(config) in auto._model_mapping:
                return cast(nn.Module, auto.from_config(config, dtype=dtype))
    raise ValueError(f"transformers {transformers.__version__} has no model for {type(config).__name__}")


def examine(model: nn.Module) -> state.PatchReport:
    """Patch the attention modules that are supported, and report on all of them."""
    with contextlib.suppress(NotImplementedError):  # no module is supported; the report gives the reasons
        patch_model(model, unsupported="skip")
    return state.patch_report(model)


def kernels(model: nn.Module, report: state.PatchReport, calls: Calls) -> list[str]:
    """Return lines on the kernels of each kind of served module: training or a prompt, and a step of generation."""
    kinds = Counter("\n".join(_lines_of(model.get_submodule(row.path), calls)) for row in report if row.patched)
    return [f"{count} x {text}" for text, count in kinds.items()]


def _lines_of(module: Any, calls: Calls) -> Iterator[str]:
    """Yield a line on the heads and masks of a module, and lines on the kernels of its calls."""
    latent = bool(cast(families.Convention, families.convention_of(module)).latent)
    rows, options = call_of(module, calls)
    yield ", ".join((type(module).__name__, *_facts(module, rows, options)))
    obstacle = obstacles.obstacle_of_any_kind(obstacles.Pass([module.train()], module.config, {}), options["causal"])
    if obstacle:
        yield f"  training: its own forward, because of {obstacle.rstrip(',')}"
    chosen = (plan_mla if latent else plan)(*rows, **options)
    yield f"  training, a prompt: {_described(chosen)}"
    yield from (f"    {which}: {found}" for which in ("forward", "backward") if (found := getattr(chosen, which)))
    if latent:
        yield "  a step of generation: its own forward, onto the cache in its own format"
    elif options["causal"]:
        q, k, v, *tables = rows
        lengths = torch.full((calls.batch,), calls.length - 1, dtype=torch.int32, device=q.device)
        new = k[:, :, :1], v[:, :, :1]
        step = plan_with_kvcache(q[:, :, :1], k, v, *tables, *new, cache_seqlens=lengths, **options)
        yield f"  a step of generation: {_described(step)}"


def call_of(module: Any, calls: Calls) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the tensors and options that a module's attention would have in training, uninitialised, on the card."""
    convention = cast(families.Convention, families.convention_of(module))
    chunk, embeddings = convention.chunk_of(module), None
    causal = bool(obstacles.is_causal(obstacles.Pass([module], module.config, {})))
    batch = Batch(causal=False, intervals=chunks(chunk, calls.length)) if chunk else Batch(causal=causal)
    parameters = getattr(module.config, "rope_parameters", None) or {}
    # transformers gives no tables to models without a base of the angles (OLMo hybrid).
    if parameters.get("rope_theta", 0.0) is not None and convention.rotates_in(module, ()):
        by_type = any(isinstance(value, dict) for value in parameters.values())
        layer_type = module.config.layer_types[module.layer_idx] if by_type else None
        row = rope_tables_from_config(module.config, 1, layer_type=layer_type, device="meta")[0]
        row = row if convention.half_width == "whole" else row.repeat(1, 2)
        embeddings = (row.repeat(1, calls.length, 1),) * 2
    hidden = torch.empty(calls.batch, calls.length, module.config.hidden_size, dtype=calls.dtype, device="meta")
    positions = torch.arange(calls.length, device="meta")
    given = {"position_embeddings": embeddings, "position_ids": positions[None], "cache_position": positions}
    with torch.no_grad():
        tokens, options, _ = attention.prepared(module, hidden, batch, None, given)

    def on_card(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=calls.card) if torch.is_tensor(x) else x

    options |= tokens.options
    return list(map(on_card, (*tokens.rows, *tokens.tables.arrays))), {name: on_card(x) for name, x in options.items()}


def _facts(module: Any, rows: list[Tensor], options: dict[str, Any]) -> Iterator[str]:
    """Yield a description of the heads, and of each option that changes the kernels."""
    convention = cast(families.Convention, families.convention_of(module))
    if convention.latent:
        q_nope, q_rope, _, _, v = rows[:5]
        yield f"{v.shape[1]} heads of {q_nope.shape[3]} + {q_rope.shape[3]} columns, values of {v.shape[3]}"
    else:
        yield f"{rows[0].shape[1]}/{rows[1].shape[1]} heads of {rows[0].shape[3]}"
    if options["window"] is not None:
        yield f"window of {options['window'][0] + 1}"
    if chunk := convention.chunk_of(module):
        yield f"chunks of {chunk}"
    elif not options["causal"]:
        yield "bidirectional"
    if options.get("sinks") is not None:
        yield "sinks"
    if cap := convention.cap_of(module):
        yield f"scores capped at {cap:g}"


def _described(chosen: Any) -> str:
    """Return the backend of a plan, its strategy and the reason."""
    strategy = f", {chosen.strategy}" if chosen.strategy else ""
    reason = f" ({chosen.reason})" if chosen.reason else ""
    return f"{chosen.backend}{strategy}{reason}"


if __name__ == "__main__":
    sys.exit(main())
