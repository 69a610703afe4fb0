"""Continuous batching of ``bench models``: requests of mixed lengths through a manager of transformers.

The manager runs and is warm, as in a server, and answers all requests again in each call. It shares no blocks between
requests, because it would remember the prompts of the call before.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench.models.shapes import NEW_TOKENS, Work

# The most tokens of a pass, and the tokens of a page.
_MOST_TOKENS, PAGE = 4096, 256


class Served:
    """All requests of one work: calling it answers them once; ``result`` is their new tokens, (requests, new tokens).

    Prompts have from a sixteenth of ``work.length`` to all of it, evenly in the logarithm.
    """

    def __init__(self, model: nn.Module, work: Work):
        self.model, self.work = model, work
        generator = torch.Generator().manual_seed(1)
        shares = torch.rand(work.batch, generator=generator)
        lengths = [max(1, round(work.length * 16 ** (share - 1))) for share in shares.tolist()]
        vocabulary = model.config.vocab_size
        self.prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
        self.result: Tensor | None = None
        self._manager: Any = None
        model.eval()

    def begin(self, **chosen: Any) -> None:
        """Make and start the manager with the present attention of the model. chosen: further options of it."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model: Any = self.model
        pages = sum(math.ceil((len(prompt) + NEW_TOKENS) / PAGE) for prompt in self.prompts)
        options: dict[str, Any] = {
            "page_size": PAGE,
            "num_blocks": pages + len(self.prompts),
            "max_batch_tokens": max(_MOST_TOKENS, self.work.batch),
            "max_requests_per_batch": self.work.batch,
            "allow_block_sharing": False,
            "auto_switch_to_flash": False,  # where it is installed
        }
        greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
        self._attention = model.config._attn_implementation
        with self.active():
            self._manager = model.init_continuous_batching(
                generation_config=greedy, continuous_batching_config=ContinuousBatchingConfig(**options | chosen)
            )
            self._manager.warmup()
            self._manager.start()
            self._attention = model.config._attn_implementation

    def active(self) -> AbstractContextManager:
        """Give the model's config the attention in which the manager has left it, and restore it after."""
        return mock.patch.object(self.model.config, "_attn_implementation_internal", self._attention)

    @staticmethod
    def distance(result: Tensor, first: Tensor) -> float:
        """Return the share of tokens that differ."""
        return (first != result).double().mean().item()

    def __call__(self) -> None:
        ids = self._manager.add_requests(self.prompts, max_new_tokens=NEW_TOKENS)
        found: dict[str, list[int]] = {}
        while len(found) < len(ids):
            output = self._manager.get_result(timeout=1)
            if output is None and not self._manager.is_running():
                raise RuntimeError("continuous batching has ended before all requests were answered")
            if output is not None and output.error is not None:
                raise RuntimeError(output.error)
            if output is not None and output.is_finished():
                found[output.request_id] = output.generated_tokens
        self.result = torch.tensor([found[name] for name in ids])

    def __del__(self) -> None:
        if self._manager is not None:
            self._manager.destroy()
