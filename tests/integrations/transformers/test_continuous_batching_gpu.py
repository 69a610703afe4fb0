"""Continuous batching of patched models on a GPU: kernels, CUDA graphs, and passes prepared while others run."""

import pytest
import torch

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_model
from tests.support.hf_serving import answers, prompts

# The experts of gpt-oss in float32 copy to the host, and warn that their passes take no graphs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
# No graphs: windows are read from their rings. Graphs: they are gathered, and other models have tables of pages.
GRAPHS = [{"use_cuda_graph": False}, {}, {"use_cuda_graph": True, "use_async_batching": False}]
FLOAT32 = {"lengths": (5, 17, 40, 1, 23, 33, 150), "like": torch.float32, "least": 1.0}
# Rounding may change which token is the largest, and with it all that follow, but rarely.
BFLOAT16 = {"lengths": (5, 17, 40, 100, 300, 290, 33, 64), "like": torch.bfloat16, "least": 0.8}
# More requests than a pass holds, in pages that are freed and given to others.
MANY = torch.randint(1, 120, (80,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        # Layers that are all alike, windows, both with norms of heads, sinks, and heads with partial rotation.
        *((name, FLOAT32, {"page": 16}) for name in ("llama", "mistral", "gpt_oss")),
        ("llama", FLOAT32, {"page": 8}),
        *((name, FLOAT32, {"page": 64}) for name in ("gemma3", "glm4")),
        ("llama", BFLOAT16, {"new": 4}),
        ("llama", FLOAT32 | {"lengths": MANY}, {"blocks": 80, "most_tokens": 96, "max_requests_per_batch": 24}),
    ],
    ids=["llama", "mistral", "gpt_oss", "small pages", "gemma3", "glm4", "bfloat16", "many requests"],
)
def test_tokens_are_those_of_the_model_unpatched(name, given, options):
    model = make_model(name, **({"head_dim": 64} if given is BFLOAT16 else {})).cuda().to(given["like"])
    requests, found = prompts(given["lengths"]), {}
    expected = torch.tensor(answers(model, requests, **GRAPHS[0], **options))
    patch_model(model)
    for graphs in GRAPHS:
        got = torch.tensor(answers(model, requests, **graphs, **options))
        found[str(graphs)] = (got == expected).double().mean().item()
    assert min(found.values()) >= given["least"], found
    assert not any(row.own for row in patch_report(model))
    assert answers(unpatch_model(model), requests, **GRAPHS[0], **options) == expected.tolist()
