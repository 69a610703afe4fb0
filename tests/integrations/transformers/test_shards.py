"""Patched models with sequences shared by several ranks: loss, logits and gradients of one unpatched model."""

import pytest
import torch

from tests.support import cp_models
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close
from verification.context_parallel import joined

ROWS = [
    ((0, 1), "llama", (24,), {"rows": 2}),
    ((0, 1, 2), "llama", (24,), {"sharding": "contiguous", "copied": True}),
    ((0, 1, 2), "llama", (5, 1, 13, 5), {}),
    ((0, 1), "gemma2", (24,), {}),
    ((0, 1), "gpt_oss", (24,), {"checkpoints": True}),
    ((0, 1), "mistral", (3, 14, 7), {}),
    ((0, 1), "qwen3", (24,), {"batch_invariant": True}),
    ((0, 1), "gemma3", (3, 14, 7), {}),
    ((0, 1), "llama", (3, 14, 7), {"sharding": "dealt:0,1,1,0,0,1"}),
    ((0, 1), "gemma2", (3, 14, 7), {"planned": "dealt:0,1,1,0,0,1", "checkpoints": True}),
    # Cut by torch, as Trainer and accelerate do.
    ((0, 1), "llama", (24,), {"by_torch": True, "rows": 2}),
    ((0, 1), "mistral", (3, 14, 7), {"by_torch": True}),
]


@pytest.mark.parametrize(("members", "family", "documents", "options"), ROWS)
def test_same_as_the_whole(ranks, members, family, documents, options):
    parts = ranks.results(cp_models.step, members, family, documents, options, ranks=members)
    model = make_model(family)
    ids = make_ids(options.get("rows", 1), sum(documents))
    positions = cp_models.positions_of(documents).expand(ids.shape[0], -1)
    inputs = {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}
    found = model(**inputs, shift_labels=cp_models.labels_of(ids, documents))
    found.loss.backward()
    shards = [{"logits": logits[:, None]} for logits, _, _ in parts]
    logits = joined(shards, options.get("planned", options.get("sharding", "zigzag")))["logits"][:, 0]
    assert_close(logits, found.logits.detach(), 1e-5, "logits")
    assert_close(sum(loss for _, loss, _ in parts), found.loss.detach(), 1e-5, "loss")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_close(sum(gradients[name] for _, _, gradients in parts), parameter.grad, 1e-4, name)


@pytest.mark.parametrize("message", cp_models.REFUSALS)
def test_refusals(ranks, message):
    for error in ranks.run(cp_models.refused, (0, 1), message, ranks=(0, 1)):
        assert isinstance(error, (ValueError, NotImplementedError)) and message in str(error), error


def test_a_cut_of_torch_that_is_not_the_models(ranks):
    options = {"by_torch": True, "sharding": "contiguous"}
    for error in ranks.run(cp_models.step, (0, 1), "llama", (24,), options, ranks=(0, 1)):
        assert isinstance(error, ValueError) and "cp_sharding must be how torch's context_parallel" in str(error)


def test_undone(ranks):
    for before, after in ranks.results(cp_models.undone, (0, 1), ranks=(0, 1)):
        assert torch.equal(before, after)
