"""Continuous batching of patched models on a GPU: kernels, CUDA graphs, and passes prepared while others run."""

import pytest
import torch

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import MODELS as FAMILIES, make_model
from tests.support.hf_serving import answers, prompts

# The experts of gpt-oss in float32 copy to the host, and warn that their passes take no graphs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
# No graphs: windows are read from their rings. Graphs: they are gathered, and other models have tables of pages.
GRAPHS = [{"use_cuda_graph": False}, {}]
# Layers that are all alike, windows, both, norms of heads, sinks, and heads with partial rotation.
MODELS = [("llama", 8), ("llama", 16), ("mistral", 16), ("gemma3", 64), ("qwen3", 16), ("gpt_oss", 16), ("glm4", 64)]


@pytest.mark.parametrize(("name", "page"), MODELS)
def test_tokens_are_those_of_the_model_unpatched(name, page):
    model = make_model(name).cuda()
    given = prompts((5, 17, 40, 1, 23, 33, 150), seed=page)
    expected = answers(model, given, page=page, use_cuda_graph=False)
    patch_model(model)
    for options in GRAPHS:
        assert answers(model, given, page=page, **options) == expected, options
    assert not any(row.own for row in patch_report(model))
    assert answers(unpatch_model(model), given, page=page, use_cuda_graph=False) == expected


def test_two_bytes():
    """Rounding may change which token is the largest, and with it all that follow, but rarely."""
    model = make_model("llama", head_dim=64).cuda().bfloat16()
    given = prompts((5, 17, 40, 100, 300, 290, 33, 64))
    expected = torch.tensor(answers(model, given, new=4))
    patch_model(model)
    for options in GRAPHS:
        got = torch.tensor(answers(model, given, new=4, **options))
        assert (got == expected).double().mean() > 0.8, options


def test_many_requests_come_and_go():
    """More requests than a pass has room for, in pages that are freed and given to others."""
    model = make_model("llama").cuda()
    lengths = torch.randint(1, 120, (80,), generator=torch.Generator().manual_seed(5)).tolist()
    given = prompts(lengths)
    expected = answers(model, given, blocks=80, most_tokens=96, max_requests_per_batch=24, use_cuda_graph=False)
    for options in (*GRAPHS, {"use_cuda_graph": True, "use_async_batching": False}):
        got = answers(patch_model(model), given, blocks=80, most_tokens=96, max_requests_per_batch=24, **options)
        assert got == expected, options


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, monkeypatch):
    """On the CPU, and here because they are too many for a small machine."""
    monkeypatch.setattr("gc.collect", lambda *given: 0)
    model, given = make_model(name), prompts((5, 17, 40))
    try:
        expected = answers(model, given, new=6)
    except (AssertionError, ValueError) as error:
        pytest.skip(f"not served unpatched: {str(error)[:60]}")
    # Layers that are neither convolutions nor recurrent are all supported; managers do not know the others.
    assert answers(patch_model(model), given, new=6) == expected
    # Capped scores, and the latent attention that transformers 5.17 serves.
    own = name in ("gemma2", "vaultgemma", "mistral4")
    assert all(bool(row.own) is own and bool(row.served) is not own for row in patch_report(model))
