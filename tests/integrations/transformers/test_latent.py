"""Patched models with multi-head latent attention: what attention is given, what the cache holds, what is refused."""

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import attention, is_patched, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.obstacles import lasting_obstacle
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Complex tables, pairs sorted by the module or kept, halves, factors of the latent vectors, a gate.
KINDS = [
    name for name in ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "bailing_hybrid") if name in MODELS
]
DECODING = "a step of latent attention onto a cache, whose format is the module's own,"
reads_is_causal = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"), reason="this transformers reads is_causal here or there only"
)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("deepseek")])
def test_attention_gets_views_of_the_projections(name, monkeypatch):
    """Nothing is concatenated, expanded or copied between a projection and attention."""
    given, made = [], {}
    own = attention.rope_attention_mla

    def attend(*args, **options):
        given.append((args, options))
        return own(*args, **options)

    monkeypatch.setattr(attention, "rope_attention_mla", attend)
    model = patch_model(make_model(name))
    module = attentions_of(model)[0]
    for part in ("q_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"):
        if getattr(module, part, None) is not None:
            getattr(module, part).register_forward_hook(lambda _, x, y, part=part: made.__setitem__(part, y))
    run(model, make_ids(2, LENGTH), use_cache=False)
    (q_nope, q_rope, k_nope, k_rope, v, cos, sin), options = given[0]
    q = made.get("q_b_proj", made.get("q_proj"))
    for x, source in ((q_nope, q), (q_rope, q), (k_nope, made["kv_b_proj"]), (v, made["kv_b_proj"])):
        assert x.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() and x.shape[1] == 4
    assert k_rope.untyped_storage().data_ptr() == made["kv_a_proj_with_mqa"].untyped_storage().data_ptr()
    assert k_rope.shape == (2, 1, LENGTH, 16) and cos.shape == sin.shape == (1, LENGTH, 8)
    assert options["softmax_scale"] == module.scaling
    assert options["interleaved"] is (name != "deepseek_v3-halves")
    if name == "deepseek_v3":  # of the config: 48 columns, YaRN by 4 with mscale_all_dim 1
        assert module.scaling == pytest.approx(48**-0.5 * (0.1 * torch.log(torch.tensor(4.0)).item() + 1) ** 2)


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_leaves_the_module_s_own_cache(name, calls):
    model, ids = make_model(name), make_ids(2, 13)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        caches = [
            getattr(out, "cache", None) or out.past_key_values
            for out in (each(model)(ids, attention_mask=mask) for each in (unpatch_model, patch_model))
        ]
    modules = attentions_of(model)
    assert calls == {"rope_attention_mla": len(modules)}
    for module in modules:
        expected, found = (cache.layers[module.layer_idx] for cache in caches)
        for part in ("keys", "values"):
            one, other = getattr(expected, part), getattr(found, part)
            assert one.shape == other.shape and one.dtype == other.dtype
            # What a layer writes for padding depends on outputs of padding, which are unspecified.
            assert_close(other[:1], one[:1], 1e-5, part)
            assert_close(other[1:, :, 5:], one[1:, :, 5:], 1e-5, part)


def test_steps_are_the_module_s_own(calls):
    """The tokens that follow a prompt, one or many, and the reason in the report."""
    model, ids = make_model("deepseek_v3"), make_ids(1, 12)
    expected = model(ids).logits
    patch_model(model)
    cache = None
    with pytest.warns(UserWarning, match=DECODING), torch.no_grad():
        for part in ids.split((6, 1, 5), dim=1):
            out = model(part, past_key_values=cache)
            cache = getattr(out, "cache", None) or out.past_key_values
    assert_close(out.logits, expected[:, -5:], 1e-5)
    assert calls == {"rope_attention_mla": 2}
    assert all(row.served == 1 and row.own == {DECODING: 2} for row in patch_report(model))


@pytest.mark.parametrize("name", KINDS)
def test_packed(name, calls):
    """By position ids, and by cu_seqlens with places of their own in each document."""
    ids, lengths = make_ids(1, LENGTH), (9, 1, 15)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model = make_model(name)
    assert_same(model, ids, grad=True, position_ids=positions, use_cache=False)
    count = len(attentions_of(model))
    assert calls.get("rope_attention_mla_varlen") == count, calls
    if name == "bailing_hybrid":  # its recurrences know nothing of documents
        return
    alone = torch.cat([run(model, part, use_cache=False)[0] for part in ids.split(lengths, dim=1)], dim=1)
    ends = torch.tensor([0, 9, 10, 25], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 15, "max_length_k": 15}
    assert_close(run(model, ids, position_ids=positions, use_cache=False, **packed)[0], alone, 1e-5)
    assert calls["rope_attention_mla_varlen"] == 2 * count


@reads_is_causal
@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3"])
def test_bidirectional_and_padded_on_both_sides(name, calls):
    model, ids = make_model(name), make_ids(2, LENGTH)
    model.config.is_causal = False
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, -4:] = 0, 0
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    assert calls == {"rope_attention_mla_varlen": 2}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_compiled_without_a_break(name):
    model, x = make_model(name), torch.randn(2, LENGTH, 64)
    model.set_attn_implementation("sdpa")  # a layer without its model is causal only then
    module = attentions_of(patch_model(model))[0]
    tables = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    torch.compiler.reset()  # another model's softmax scale would make this one a symbol
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    one, other = (call(x, position_embeddings=tables, attention_mask=None)[0] for call in (compiled, module))
    assert_close(one, other, 1e-6)
    assert patch_report(model)[0].served == 1  # calls in graphs are not counted


def test_continuous_batching_is_not_served():
    """transformers' paged cache has no room for latent vectors either, so that there is nothing to compare with."""
    model = patch_model(make_model("deepseek_v3"))
    reason = lasting_obstacle(attentions_of(model), model.config)
    assert reason == "continuous batching of multi-head latent attention"


def test_heads_that_no_kernel_takes(calls):
    model = make_model("deepseek_v3", qk_nope_head_dim=24)
    with pytest.warns(UserWarning, match="latent attention with heads of 24, 16 and 48 columns"):
        assert_same(model, make_ids(2, LENGTH), use_cache=False)
    assert not calls


def test_options_that_it_does_not_have():
    model = make_model("deepseek_v3")
    with pytest.raises(
        NotImplementedError, match="batch_invariant=True is not served for models with multi-head latent"
    ):
        patch_model(model, batch_invariant=True)
    assert not is_patched(model)
    patch_model(model, deterministic=True)
    assert is_patched(model)
