"""Continuous batching (``generate_batch``) of patched models: what runs, and that it answers as unpatched models do."""

import gc
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import cache as paged_cache, continuous_api

from fused_rope_attn.integrations.transformers import attention, obstacles, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.families import RELEASE
from fused_rope_attn.integrations.transformers.obstacles import lasting_obstacle
from fused_rope_attn.integrations.transformers.patch import capture
from fused_rope_attn.integrations.transformers.state import DECODER, state_of
from tests.support.hf_models import MODELS, attentions_of, make_model
from tests.support.hf_runs import assert_close

# From this release on managers can be told that attention reads pages, and rings are read in order.
TOLD = RELEASE >= (5, 17)
needs_tables = pytest.mark.skipif(not TOLD, reason="the manager has no tables of pages")
NEW_TOKENS = 10


def prompts(lengths=(5, 17, 40, 1, 23, 33), shared=32):
    """Random tokens: single ones, parts of pages, and whole ones; and a prompt that begins as the longest one does."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(2, 96, (length,), generator=generator).tolist() for length in lengths]
    return [*made, max(made, key=len)[:shared] + [5, 6, 7]]


SHORT = prompts((5, 20))


def greedy(new=3):
    return transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)


def options_of(page=16, most_tokens=64, blocks=64, **options):
    """A ContinuousBatchingConfig, of transformers 5."""
    fields = transformers.ContinuousBatchingConfig.__dataclass_fields__
    options["page_size" if "page_size" in fields else "block_size"] = page
    options |= {"auto_switch_to_flash": False} if "auto_switch_to_flash" in fields else {}
    return transformers.ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=most_tokens, **options)


def answers(model, given, implementation="eager", new=NEW_TOKENS, **options):
    before, config, memory = model.config._attn_implementation, greedy(new), nullcontext()
    if RELEASE >= (5,):
        model.set_attn_implementation(implementation)
        more = {"continuous_batching_config": options_of(**options)}
    else:
        model.set_attn_implementation(f"{implementation}_paged")
        sizes = {"page": 16, "blocks": 64, "most_tokens": 64} | options
        config.block_size, config.num_blocks, config.max_batch_tokens = list(sizes.values())[:3]
        more = {"progress_bar": False}
        if model.device.type == "cpu":  # 4.57 asks how much memory a GPU has
            found = (model.device, 1 << 40, 0, 0)
            memory = mock.patch.object(paged_cache, "get_device_and_memory_breakdown", lambda: found)
    try:
        with memory:
            outputs = model.generate_batch(given, generation_config=config, **more)
    finally:
        model.set_attn_implementation(before)
    found = sorted(outputs.items(), key=lambda item: int(item[0].rsplit("_", 1)[1]))
    assert len(found) == len(given) and all(output.error is None for _, output in found), found
    return [output.generated_tokens for _, output in found]


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Managers collect garbage several times, which takes longer than all else that happens here. If a collection frees
    a CUDA graph of another test while one is captured, PyTorch aborts."""
    gc.disable()
    monkeypatch.setattr("gc.collect", lambda *given: 0)
    yield
    gc.enable()


def logits_of(model, *given, **options):
    seen = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output.logits.flatten(0, 1)))
    try:
        found = answers(model, *given, **options)
    finally:
        handle.remove()
    return found, torch.cat(seen)


# GQA, windows, both with norms of heads, norms of heads, sinks, a prefix that two requests share if the first of them
# was read in fewer passes; and all others where there is time.
CHOSEN = [(name, page, 24) for name, page in (("mistral", 16), ("gemma3", 32), ("qwen3", 8), ("gpt_oss", 16))]
CHOSEN += [("llama", 16, 24), ("llama", 16, 40)]
EVERY = [pytest.param(name, 16, 64, marks=pytest.mark.gpu) for name in MODELS]


@pytest.mark.filterwarnings("ignore:patch_model")
@pytest.mark.parametrize(("name", "page", "most_tokens"), CHOSEN + EVERY)
def test_tokens_and_logits(name, page, most_tokens, calls):
    """Chunks of prompts, whole ones and single tokens in one pass."""
    model, given = make_model(name), prompts()
    try:
        expected, logits = logits_of(model, given, page=page, most_tokens=most_tokens)
    except (AssertionError, ValueError) as error:
        pytest.skip(f"not served unpatched: {str(error)[:60]}")
    got, others = logits_of(patch_model(model), given, page=page, most_tokens=most_tokens)
    assert got == expected
    if logits.shape == others.shape:  # with other budgets passes can hold other requests
        assert_close(others, logits, 1e-5)
    # Capped scores, and the latent attention that transformers 5.17 serves. Managers do not know recurrences.
    own = name in ("gemma2", "vaultgemma", "mistral4")
    assert all(bool(row.own) is own and bool(row.served) is not own for row in patch_report(model))
    if (name, page, most_tokens) in CHOSEN:
        rings = TOLD and name in ("mistral", "gemma3", "gpt_oss")
        steps = page >= 16 and (TOLD or name != "mistral")
        operators = {"rope_attention_varlen": True, "rope_attention_with_kvcache": steps, "write_kvcache": rings}
        assert set(calls) == {operator for operator, runs in operators.items() if runs}


@needs_tables
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lengths_that_are_padded_for_graphs(name, monkeypatch):
    """Sequences of no tokens after the real ones, tokens of no sequence, and no bounds but the padded ones."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    model, given = make_model(name), prompts()
    expected, own = answers(model, given), ModelRunner.__init__

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
    model = make_model("llama")
    expected = answers(model, SHORT)
    answers(patch_model(model), SHORT)
    assert answers(model, SHORT, max_blocks_per_request=0) == expected
    assert model.config._attn_implementation == "eager" and made[0][1] is False
    # 23 + 14 tokens in pages of 16, and one more.
    assert {facts for facts in made if facts[1]} == {(obstacles.PAGES, True, 4), (obstacles.PAGES, True, 0)}
    # Something else in the model reads masks, or has attention that is not patched.
    for change in (
        lambda: setattr(state_of(model.model, DECODER), "reads_masks", True),
        lambda: setattr(model, "tower", torch.nn.ModuleList([make_model("llama").model.layers[0].self_attn])),
    ):
        made.clear()
        change()
        assert answers(model, SHORT, "sdpa") == expected and made[0][1] is False
        state_of(model.model, DECODER).reads_masks = False
    assert not any(row.own for row in patch_report(model))


@needs_tables
@torch.no_grad()
def test_other_calls_beside_a_manager(monkeypatch):
    """The model is served as ever. A layer that is called with a mask takes its own forward, which must not fall back
    to eager attention. A second manager outlives the name that the first gives back."""
    monkeypatch.setattr(attention, "_passes_of_layers", Counter())
    model, tokens, x = make_model("llama"), torch.arange(20).reshape(2, 10), torch.randn(1, 10, 64)
    expected, config = model(tokens).logits, options_of()
    layer, tables = patch_model(model).model.layers[0], model.model.rotary_emb(x, torch.arange(10)[None])
    with model.continuous_batching_context_manager(greedy(), continuous_batching_config=config) as first:
        assert model.config._attn_implementation == obstacles.PAGES
        assert_close(model(tokens).logits, expected, 1e-5)
        with pytest.raises(KeyError, match="fused_rope_flash.* is not a valid attention implementation"):
            layer(x, position_embeddings=tables, attention_mask=torch.zeros(1, 1, 10, 10))
        second = model.init_continuous_batching(greedy(), config)
        second.start()
        first.stop(block=True)
        assert model.config._attn_implementation == "eager"
        monkeypatch.setattr(obstacles, "obstacle_to_pages", lambda *args: "such a thing")
        second.add_requests([[1, 2, 3]])
        # Without masks the model's own attention is no way out.
        assert "such a thing is not served" in second.get_result(timeout=10).error
        second.destroy()
    outputs = model.generate_batch(SHORT, greedy(), options_of())
    assert len(outputs) == 3
    assert all("such a thing is not served" in output.error for output in outputs.values())


@needs_tables
@pytest.mark.parametrize("why", ["compiled", "not on the GPU"])
def test_managers_with_masks(why, monkeypatch):
    """Compiled passes take the model's own attention, which needs masks. If a GPU is there and the model is not on it,
    managers without masks would capture graphs."""
    model = patch_model(make_model("llama"))
    options = {"varlen_compile_config": transformers.CompileConfig()} if why == "compiled" else {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: why != "compiled")
    manager = model.init_continuous_batching(greedy(), options_of(**options))
    assert model.config._attn_implementation == "paged|eager"
    assert why == "compiled" or not any(manager.continuous_batching_config.cuda_graph_booleans)
    manager.destroy()


@needs_tables
def test_a_manager_that_is_kept():
    """One of a patched model goes with the patch, one with masks serves on."""
    model, config = make_model("llama"), options_of()
    expected = answers(model, SHORT)

    def keep():
        outputs = model.generate_batch(SHORT, greedy(NEW_TOKENS), config, persistent_manager=True)
        return [output.generated_tokens for output in outputs.values()]

    def has_masks():
        manager = model._cached_continuous_batching_manager
        return manager.batch_processor.inputs_and_outputs.attention_mask is not None

    assert keep() == expected
    served = patch_report(patch_model(model))[0].served
    assert keep() == expected and patch_report(model)[0].served > served and has_masks()
    model.destroy_cached_continuous_batching_manager()
    assert keep() == keep() == expected and not has_masks()
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
    model = make_model(name)
    change(model)
    expected = answers(model, SHORT)
    with pytest.warns(UserWarning, match=reason):
        assert answers(patch_model(model), SHORT) == expected
    assert not calls and all(row.own and not row.served for row in patch_report(model))


def test_obstacles_that_last():
    """transformers' paged cache has no place for latent vectors and no chunks either: nothing to compare with."""
    for name, of in (("llama", ""), ("llama4", "attention in chunks"), ("deepseek_v3", "multi-head latent attention")):
        model = patch_model(make_model(name))
        assert lasting_obstacle(attentions_of(model), model.config) == (of and f"continuous batching of {of}")


def test_models_that_graphs_cannot_capture():
    """The pass has been computed before it is captured; nothing is captured from then on."""

    def fail(forward, stream, *args):
        forward(*args)
        raise RuntimeError("a copy during capture")

    runner, other = (SimpleNamespace(use_cuda_graph_varlen=True, use_cuda_graph_decode=True) for _ in range(2))
    seen = []
    with pytest.warns(UserWarning, match="cannot be captured .a copy during capture.; it runs without"):
        capture(runner, fail, seen.append, None, 1)
    assert seen == [1] and not runner.use_cuda_graph_varlen and not runner.use_cuda_graph_decode
    with pytest.raises(ZeroDivisionError):
        capture(other, fail, lambda x: 1 // x, None, 0)
    assert other.use_cuda_graph_decode


# No graphs: windows are read from their rings. Graphs: they are gathered, and other models have tables of pages.
GRAPHS = [{"use_cuda_graph": False}, {}, {"use_cuda_graph": True, "use_async_batching": False}]
FLOAT32 = {"lengths": (5, 17, 40, 1, 23, 33, 150), "like": torch.float32, "least": 1.0}
# Rounding may change which token is the largest, and with it all that follow, but rarely.
BFLOAT16 = {"lengths": (5, 17, 40, 100, 300, 290, 33, 64), "like": torch.bfloat16, "least": 0.8}
# More requests than a pass holds, in pages that are freed and given to others.
MANY = torch.randint(1, 120, (80,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # gpt-oss's experts in float32 copy to the host: no graphs
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
def test_kernels_and_graphs(name, given, options):
    """Kernels, CUDA graphs, and passes prepared while others run."""
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
