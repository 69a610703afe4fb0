"""``init_continuous_batching`` of a patched model: transformers' manager treats the model like flash-attention.

For SDPA and eager attention a manager builds masks over all requests. For flash-attention it provides page tables, CUDA
graphs, and batches that are prepared while others run. It decides by the name of the config's attention implementation.
A patched model reads pages and needs no masks, so its config has a special name while a manager is in use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import transformers
from packaging.version import Version
from torch import nn

from fused_rope_attn.integrations.transformers.batch import Batch
from fused_rope_attn.integrations.transformers.caches import cache_of, is_paged
from fused_rope_attn.integrations.transformers.families import looks_like_attention
from fused_rope_attn.integrations.transformers.obstacles import PAGES, implementation_of
from fused_rope_attn.integrations.transformers.pages import FEWEST_ROWS, lasting_obstacle, window_of
from fused_rope_attn.integrations.transformers.state import DECODER, PATCH, Method, state_of
from fused_rope_attn.runtime.device import has_gpu

# Implementations for which managers build masks. For flash-attention nothing needs to change.
_MASKED = {"eager", "sdpa", "paged|eager", "paged|sdpa"}
# Earlier managers had no page tables and no CUDA graphs, or different ones.
_KNOWN = Version(transformers.__version__) >= Version("5.17")
# Attributes of a manager that are replaced. A manager without them is of another version, and keeps its masks.
_ATTRIBUTES = ("_original_attn_impl", "_create_batch_processor")
# Pages of a request if no length is given: transformers' own default for flash-attention.
_PAGES_OF_A_REQUEST = 32


class Serving(Method):
    """``init_continuous_batching`` of a patched model: it returns a manager that builds no masks, if possible."""

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, config = self.own, cast(Any, self.model.config)
        before, kept = implementation_of(config), _kept_manager(self.model)
        made_with_masks = kept is not None and not _is_ours(kept)
        if before == PAGES or made_with_masks or not self._reads_pages(before):
            return own(*args, **kwargs)
        config._attn_implementation = PAGES
        try:
            manager = own(*args, **kwargs)
        except BaseException:
            config._attn_implementation = before
            raise
        # The model's own attention runs in compiled passes.
        if _compiles(manager) or not all(hasattr(manager, name) for name in _ATTRIBUTES):
            config._attn_implementation = before
            return own(*args, **kwargs)
        manager._original_attn_impl = before  # the manager restores it when it stops
        if kept is None:
            manager._fused_rope_pages = True
            manager._create_batch_processor = partial(_create_batch_processor, manager._create_batch_processor)
            self._give_tables(manager, *args, **kwargs)
        return manager

    def _reads_pages(self, implementation: str) -> bool:
        """Return whether every pass over a paged cache will be served, as far as it can be known before."""
        if not _KNOWN or implementation not in _MASKED:
            return False
        # Without masks a manager uses CUDA graphs if there is a GPU, even if the model is not on it.
        where: Any = self.model.device
        if has_gpu() and where.type != "cuda":
            return False
        decoders = [decoder for m in self.model.modules() if (decoder := state_of(m, DECODER)) is not None]
        if len(decoders) != 1 or decoders[0].reads_masks or decoders[0].shards is not None:
            return False
        if any(looks_like_attention(m) and state_of(m, PATCH) is None for m in self.model.modules()):
            return False
        config: Any = self.model.config
        return not lasting_obstacle(decoders[0].attentions, config.get_text_config())

    def _give_tables(
        self,
        manager: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        **_: Any,
    ) -> None:
        """Ask for page tables in passes of single tokens. By itself a manager has them for flash-attention only."""
        patched = [module for module in self.model.modules() if state_of(module, PATCH) is not None]
        asked = getattr(continuous_batching_config, "max_blocks_per_request", None)
        config = manager.continuous_batching_config
        size = getattr(config, "page_size", None) or config.block_size
        if asked == 0 or size < FEWEST_ROWS or any(map(window_of, patched)):
            return
        longest = 0
        if workload_hints is not None:
            longest = workload_hints.max_prompt_length + workload_hints.max_generated_length
        pages = math.ceil(longest / size) + 1 if longest else _PAGES_OF_A_REQUEST
        config.max_blocks_per_request = asked or pages + pages % 2


def _create_batch_processor(own: Callable[[], Any]) -> Any:
    """Return the processor that a manager's ``own`` method makes; it continues without CUDA graphs if they fail."""
    processor = own()
    runner: Any = getattr(processor, "model_runner", None)
    if hasattr(runner, "_capture_graph") and "_capture_graph" not in runner.__dict__:
        runner._capture_graph = Capture(runner)
    return processor


class Capture:
    """``_capture_graph`` of a model runner: the runner continues without graphs if the model cannot be captured.

    With masks, managers use no graphs by default, and so serve models that synchronise, for example in their experts or
    in tables that grow. Such models must not fail here.
    """

    def __init__(self, runner: Any):
        self.runner = runner
        self.own = runner._capture_graph

    def __call__(self, forward: Callable[..., None], *args: Any) -> None:
        done = []

        def counted(*given: Any) -> None:
            forward(*given)
            done.append(given)

        try:
            self.own(counted, *args)
        except Exception as error:
            if not done:  # the pass itself failed, in its run before the capture
                raise
            self.runner.use_cuda_graph_varlen = self.runner.use_cuda_graph_decode = False
            warnings.warn(
                f"continuous batching: CUDA graphs of this model cannot be captured ({error}); it runs without them",
                stacklevel=2,
            )


def forget_kept_manager(model: nn.Module) -> None:
    """Destroy the manager that a model keeps for its next batch, if it relies on the model being patched."""
    kept: Any = _kept_manager(model)
    if _is_ours(kept):
        model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def refuse_what_lacks_masks(config: Any, given: dict[str, Any], batch: Batch) -> None:
    """Raise if a pass needs the modules' own forward, but its manager made no masks.

    given: the arguments of the decoder's forward by name.
    """
    implementation = implementation_of(config)
    unmasked = is_paged(cache_of(given)) and given.get("attention_mask") is None
    if batch.original and (implementation == PAGES or unmasked and implementation in _MASKED):
        raise NotImplementedError(
            f"{batch.original} is not served by the fused kernels, and this continuous batching was begun without the "
            "masks of the model's own attention: call unpatch_model(model) before it begins"
        )


def _kept_manager(model: nn.Module) -> Any:
    return getattr(model, "_cached_continuous_batching_manager", None)


def _compiles(manager: Any) -> bool:
    config = manager.continuous_batching_config
    return config.varlen_compile_config is not None or config.decode_compile_config is not None


def _is_ours(manager: Any) -> bool:
    return getattr(manager, "_fused_rope_pages", False)
