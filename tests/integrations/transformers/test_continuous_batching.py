"""Continuous batching (``generate_batch``) of patched models: what runs, and that it answers as unpatched models do."""

from collections import Counter

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.generation.continuous_batching import cache as paged_cache, continuous_api

from fused_rope_attn.integrations.transformers import (
    attention,
    obstacles,
    patch_model,
    patch_report,
    unpatch_model,
)
from fused_rope_attn.integrations.transformers.patch import capture
from fused_rope_attn.integrations.transformers.state import DECODER, state_of
from tests.support.hf_models import make_model
from tests.support.hf_runs import assert_close
from tests.support.hf_serving import NEW_TOKENS, answers, options_of, prompts

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
# From this release on managers can be told that attention reads pages, and rings are read in order.
TOLD = Version(transformers.__version__) >= Version("5.17")
needs_tables = pytest.mark.skipif(not TOLD, reason="the manager has no tables of pages")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Managers collect garbage several times, which takes longer than all else that happens here."""
    monkeypatch.setattr("gc.collect", lambda *given: 0)


def logits_of(model, *given, **options):
    """(answers, the logits of all passes)."""
    seen = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output.logits.flatten(0, 1)))
    try:
        found = answers(model, *given, **options)
    finally:
        handle.remove()
    return found, torch.cat(seen)


@pytest.mark.parametrize(
    ("name", "page"), [("llama", 16), ("mistral", 16), ("gemma3", 32), ("qwen3", 8), ("gpt_oss", 16)]
)
def test_tokens_and_logits(name, page, calls):
    """Chunks of prompts, whole ones and single tokens in one pass; GQA, windows, norms of heads, sinks."""
    model, given = make_model(name), prompts()
    expected, logits = logits_of(model, given, page=page, most_tokens=24)
    got, others = logits_of(patch_model(model), given, page=page, most_tokens=24)
    assert got == expected
    if logits.shape == others.shape:  # with other budgets passes can hold other requests
        assert_close(others, logits, 1e-5)
    assert all(row.served and not row.own for row in patch_report(model))
    assert calls["rope_attention_varlen"] > 0 and "rope_attention" not in calls
    steps = page >= 16 and (TOLD or name != "mistral")
    assert ("rope_attention_with_kvcache" in calls) is steps
    rings = TOLD and name in ("mistral", "gemma3", "gpt_oss")
    assert ("write_kvcache" in calls) is rings


def test_a_prefix_that_two_requests_share(monkeypatch):
    model, given = make_model("llama"), prompts()
    if not hasattr(paged_cache.PagedAttentionCache, "search_prefix_match"):
        pytest.skip("no prefix is shared in this version")
    own, shared = paged_cache.PagedAttentionCache.search_prefix_match, []

    def noted(*args):
        shared.append(own(*args))
        return shared[-1]

    monkeypatch.setattr(paged_cache.PagedAttentionCache, "search_prefix_match", noted)
    expected = answers(model, given, most_tokens=40)
    assert answers(patch_model(model), given, most_tokens=40) == expected
    half = len(shared) // 2
    assert max(shared[:half]) == max(shared[half:]) == 16


@needs_tables
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lengths_that_are_padded_for_graphs(name, monkeypatch):
    """Sequences of no tokens after the real ones, tokens of no sequence, and no bounds but the padded ones."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    model, given = make_model(name), prompts()
    expected = answers(model, given)
    own = ModelRunner.__init__

    def padding(self, *args, **kwargs):
        own(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    assert answers(patch_model(model), given) == expected


@needs_tables
def test_managers_of_patched_models(monkeypatch):
    """No masks and tables of pages, while there is a manager; where it was asked for, no tables."""
    made, own = [], continuous_api.ContinuousBatchingManager._create_batch_processor

    def noted(manager):
        processor = own(manager)
        facts = model.config._attn_implementation, processor.inputs_and_outputs.attention_mask is None
        made.append((*facts, processor.cache.max_blocks_per_request))
        return processor

    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "_create_batch_processor", noted)
    model, given = make_model("llama"), prompts((5, 20))
    expected = answers(model, given)
    answers(patch_model(model), given)
    assert answers(model, given, max_blocks_per_request=0) == expected
    assert model.config._attn_implementation == "eager"
    found = {facts for facts in made if facts[1]}
    # 23 + 14 tokens in pages of 16, and one more.
    assert found == {(obstacles.PAGES, True, 4), (obstacles.PAGES, True, 0)}
    assert made[0][1] is False
    # Something else in the model reads masks, or has attention that is not patched.
    state_of(model.model, DECODER).reads_masks = True
    made.clear()
    assert answers(model, given, "sdpa") == expected and made[0][1] is False
    state_of(model.model, DECODER).reads_masks = False
    model.tower = torch.nn.ModuleList([make_model("llama").model.layers[0].self_attn])
    assert answers(model, given, "sdpa") == expected and made[1][1] is False
    assert not any(row.own for row in patch_report(model))


@needs_tables
@torch.no_grad()
def test_other_calls_beside_a_manager():
    """The model is served as ever. A second manager outlives the name that the first gives back."""
    model, tokens = make_model("llama"), torch.arange(20).reshape(2, 10)
    expected = model(tokens).logits
    greedy = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
    config = options_of()
    patch_model(model)
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as first:
        assert model.config._attn_implementation == obstacles.PAGES
        assert_close(model(tokens).logits, expected, 1e-5)
        second = model.init_continuous_batching(greedy, config)
        second.start()
        first.stop(block=True)
        assert model.config._attn_implementation == "eager"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(obstacles, "obstacle_to_pages", lambda *args: "such a thing")
            second.add_requests([[1, 2, 3]])
            assert "such a thing is not served" in second.get_result(timeout=10).error
        second.destroy()


@needs_tables
def test_nobody_else_computes_under_the_name(monkeypatch):
    """A layer that is called with a mask takes its own forward, which must not fall back to eager attention."""
    monkeypatch.setattr(attention, "_passes_of_layers", Counter())
    model = patch_model(make_model("llama"))
    greedy = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
    layer, x = model.model.layers[0], torch.randn(1, 10, 64)
    tables = model.model.rotary_emb(x, torch.arange(10)[None])
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=options_of()):
        with pytest.raises(KeyError, match="fused_rope_flash.* is not a valid attention implementation"):
            layer(x, position_embeddings=tables, attention_mask=torch.zeros(1, 1, 10, 10))


@needs_tables
def test_a_manager_that_compiles():
    """Compiled passes take the model's own attention, which needs masks."""
    model = patch_model(make_model("llama"))
    config = options_of(varlen_compile_config=transformers.CompileConfig())
    manager = model.init_continuous_batching(transformers.GenerationConfig(eos_token_id=-1), config)
    assert model.config._attn_implementation == "paged|eager"
    manager.destroy()


@needs_tables
def test_a_model_that_is_not_on_the_gpu(monkeypatch):
    """On a GPU, managers without masks would capture graphs of any model."""
    model = patch_model(make_model("llama"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    manager = model.init_continuous_batching(transformers.GenerationConfig(eos_token_id=-1), options_of())
    assert model.config._attn_implementation == "paged|eager"
    assert not any(manager.continuous_batching_config.cuda_graph_booleans)
    manager.destroy()


@needs_tables
def test_a_manager_that_is_kept():
    """One of a patched model goes with the patch, one with masks serves on."""
    model, given = make_model("llama"), prompts((5, 20))
    expected = answers(model, given)
    greedy = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    config = options_of()

    def keep():
        outputs = model.generate_batch(given, greedy, config, persistent_manager=True)
        return [output.generated_tokens for output in outputs.values()]

    assert keep() == expected
    patch_model(model)
    served = patch_report(model)[0].served
    assert keep() == expected and patch_report(model)[0].served > served
    assert model._cached_continuous_batching_manager.batch_processor.inputs_and_outputs.attention_mask is not None
    model.destroy_cached_continuous_batching_manager()
    assert keep() == keep() == expected
    assert model._cached_continuous_batching_manager.batch_processor.inputs_and_outputs.attention_mask is None
    unpatch_model(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert keep() == expected
    model.destroy_cached_continuous_batching_manager()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gemma2", lambda model: None, "soft-capped scores, which transformers' .*eager.* leaves uncapped"),
        ("qwen3", lambda model: setattr(model.model.layers[0].self_attn, "sliding_window", 3), "a window of 3 tokens"),
        ("llama", lambda model: setattr(model.config, "is_causal", False), "bidirectional attention"),
    ],
)
def test_what_takes_the_models_own_attention(name, change, reason, calls):
    model, given = make_model(name), prompts((5, 20))
    change(model)
    expected = answers(model, given)
    with pytest.warns(UserWarning, match=reason):
        assert answers(patch_model(model), given) == expected
    assert not calls and all(row.own and not row.served for row in patch_report(model))


@needs_tables
def test_what_nobody_computes(monkeypatch):
    """Without masks the model's own attention is no way out: requests fail with the reason."""
    model, given = patch_model(make_model("llama")), prompts((5, 20))
    monkeypatch.setattr(obstacles, "obstacle_to_pages", lambda *args: "such a thing")
    outputs = model.generate_batch(
        given, transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1), options_of()
    )
    assert len(outputs) == 3
    assert all("such a thing is not served" in output.error for output in outputs.values())


class Runner:
    """A model runner with passes that cannot be captured, or not even be run."""

    use_cuda_graph_varlen = use_cuda_graph_decode = True

    def _capture_graph(self, forward, stream, *args):
        forward(*args)
        raise RuntimeError("a copy during capture")


def test_models_that_graphs_cannot_capture():
    """The pass has been computed before it is captured; nothing is captured from then on."""
    runner, seen = Runner(), []
    with pytest.warns(UserWarning, match="cannot be captured .a copy during capture.; it runs without"):
        capture(runner, runner._capture_graph, seen.append, None, 1)
    assert seen == [1] and not runner.use_cuda_graph_varlen and not runner.use_cuda_graph_decode
    runner = Runner()
    with pytest.raises(ZeroDivisionError):
        capture(runner, runner._capture_graph, lambda x: 1 // x, None, 0)
    assert runner.use_cuda_graph_decode
