"""A patched model against the unpatched one: drawn calls of every class, and a row for each call that is not drawn.

A row with a reason is a call that the kernels do not serve: the modules' own attention runs, with a warning that gives
the reason, and the results are the same bits.
"""

import copy
import functools
import random
import re
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import masking_utils, modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fused_rope_attn import masks, rope_attention, rope_attention_varlen
from fused_rope_attn.integrations.transformers import attention, patch_model, patch_report
from fused_rope_attn.integrations.transformers.families import RELEASE, convention_of
from tests.support.hf_models import MODELS, WINDOW, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, declared, make_cache, parts, run
from tests.support.hf_vision_models import MODELS as VISION_MODELS, make_inputs, make_vision_model

IGNORES_IS_CAUSAL = RELEASE < (5, 6)  # here or there
COUNTS_BY_DOCUMENT = RELEASE >= (5, 23)  # chunks
HAS_SWITCH = hasattr(transformers.Gemma3TextConfig(), "use_bidirectional_attention")
OTHER_WINDOW = "a layer that was made with the window"
PLACES = torch.arange(LENGTH)
FLASH = "flash_attention_3"  # transformers imports its functions without a look at the GPU


@pytest.fixture(autouse=True)
def flash(monkeypatch):
    """flash-attention on the CPU: transformers' functions, which decide which tokens belong together, call these."""
    names = ("flash_attn_func", "flash_attn_with_kvcache"), ("flash_attn_varlen_func",)
    module = SimpleNamespace(**dict.fromkeys(names[0], attend), **dict.fromkeys(names[1], attend_packed))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_3_available", lambda: True, raising=False)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn"):
        monkeypatch.setattr(modeling_flash_attention_utils, name, None, raising=False)


def attend(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None):
    options = {"softmax_scale": softmax_scale, "window": window_size, "softcap": softcap, "sinks": s_aux}
    return rope_attention(q, k, v, *nothing_turned(k.shape[1]), causal, layout="bshd", **options)


def attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
                  window_size=(-1, -1), softcap=0.0, s_aux=None):  # fmt: skip
    options = {"softmax_scale": softmax_scale, "window": window_size, "softcap": softcap, "sinks": s_aux}
    ends = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)  # which may be tensors
    return rope_attention_varlen(q, k, v, *nothing_turned(ends[3]), *ends, causal, **options)


def nothing_turned(rows):
    return torch.ones(rows, 1), torch.zeros(rows, 1)


def row(model, what, reason="", skip=False, **given):
    mark = pytest.mark.skipif(skip, reason="another release of transformers")
    return pytest.param(model, reason, given, marks=mark, id=f"{model}, {what}")


def said(reason):
    return pytest.warns(UserWarning, match=reason) if reason else nullcontext()


def own_reasons(model):
    return {reason for part in patch_report(model) for reason in part.own}


def present_of(mask):
    """The tokens (2, N) to be compared: those that are no padding, or that see something."""
    if not isinstance(mask, torch.Tensor):
        return slice(None)
    sees = mask if mask.dtype == torch.bool else mask == 0
    return mask.bool() if mask.ndim == 2 else sees.any(3)[:, 0].expand(2, -1)


def compare(name, reason, calls, *, options=None, change=None, implementation="eager", size=(2, LENGTH), grad=False,
            operator="rope_attention", passes=1, **inputs):  # fmt: skip
    model, ids = make_model(name, **options or {}), make_ids(*size)
    model.config._attn_implementation = implementation
    if change is not None:
        change(model)
    if reason:
        torch.manual_seed(5)  # of dropout
        expected = run(model, ids, **inputs)[0]
        patch_model(model)
        torch.manual_seed(5)
        with said(reason):
            assert torch.equal(run(model, ids, **inputs)[0], expected)
        assert not calls
    else:
        with said(reason):
            assert_same(model, ids, present_of(inputs.get("attention_mask")), grad, **inputs)
        assert set(calls) == set(operator.split()) and sum(calls.values()) == passes * len(attentions_of(model))


def changed(**values):
    return lambda model: model.config.update(values)


def turned_round(model):
    model.config.layer_types = model.config.layer_types[::-1]


def checkpointing(model, reentrant=False):
    model.train().enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def of_modules(model, count=None):
    """Set ``is_causal`` of the first modules, as recipes of embedding models do."""
    for module in attentions_of(model)[:count]:
        module.is_causal = False


def columns(*rows, length=LENGTH):
    """A padding mask: in each row the first column with a token, and the one after the last."""
    return torch.stack([(first <= torch.arange(length)) & (torch.arange(length) < last) for first, last in rows]).long()


def documents(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


MASKS = {
    "left": columns((3, LENGTH), (0, LENGTH), (LENGTH - 2, LENGTH)),
    "right": columns((0, LENGTH), (0, LENGTH - WINDOW - 1), (0, 1)),
    "both": columns((2, LENGTH - 4), (0, LENGTH - 1), (5, LENGTH)),
    "an empty row": columns((0, LENGTH - 3), (0, 0), (1, LENGTH)),
    "ones": columns(*[(0, LENGTH)] * 3),
    "holes": (torch.arange(3 * LENGTH).view(3, LENGTH) % 7 != 3).long(),
}
# Position ids of a row, which masks and flash-attention understand in different ways.
POSITIONS = {
    "documents": documents(9, 1, 15),
    "a short document": documents(3, 5, 17),
    "documents in float": documents(9, 1, 15).float(),
    "a gap": torch.cat((PLACES[:9], PLACES[:16] + 14))[None],
    "a gap in a document": torch.cat((PLACES[:4], PLACES[:6] + 9, PLACES[:15]))[None],
    "one document": PLACES[None] + 3,
    "one token each": torch.zeros(1, LENGTH, dtype=torch.int64),
    "halves": PLACES[None] / 2,
    "other numbers": torch.cat((PLACES[:12] + 5, PLACES[:13] + 3))[None],
    "other halves": torch.cat((PLACES[:12] + 0.5, PLACES[:13] + 3.5))[None],
    "two rows": torch.cat((documents(LENGTH), documents(2, 23))),
}
# Attributes of a config, which are changed if another value is drawn.
OF_CONFIG = {"config": "is_causal", "switch": "use_bidirectional_attention", "window": "sliding_window"}
FIELDS = {
    "rows": [1, 1, 2, 3],
    "length": [WINDOW - 1, WINDOW, WINDOW + 1, LENGTH, LENGTH],
    "mask": [None] * 3 + [*MASKS],
    "positions": [None] * 3 + [*POSITIONS],
    "use_cache": [None, False, True],
    "training": [False, True],
    "declared": [False, True],  # by cu_seqlens, which of the unpatched models' attention only flash-attention reads
    # The call, the config and the modules may each say whether attention is causal.
    "call": [None] * 5 + [True, False],
    "config": [None] * 5 + [True, False],
    "modules": [None] * 5 + [1, 2],  # how many of the first attention modules are not
    "switch": [None, True],  # of Gemma 3
    "window": [None] * 5 + [3],
}


# Unpatched models fail so with flash-attention: positions that do not begin with 0, recurrences, Persimmon before 5.
ERRORS = "must begin with 0|can't keep packed sequences apart|index .* is out of bounds"


def implementations_of(name, model):
    """The implementations of attention by which the unpatched model computes what its config says."""
    yield "eager"
    # Releases before 5.23 run SDPA without the softcap.
    if model._supports_sdpa and (COUNTS_BY_DOCUMENT or not convention_of(attentions_of(model)[0]).softcap):
        yield "sdpa"
    # The last two do not hand their windows on, and multimodal models make masks of their own.
    if model._supports_flash_attn and not name.startswith(("vision", "phimoe", "qwen2_moe")):
        yield FLASH


def drawn(name, model, count):
    draw = random.Random(name)
    fields = FIELDS | {"implementation": list(implementations_of(name, model))}
    for _ in range(count):
        setting = SimpleNamespace(**{field: draw.choice(values) for field, values in fields.items()})
        if not (name == "gemma3" and HAS_SWITCH):
            setting.switch = None
        if getattr(model.config, "sliding_window", None) is None:
            setting.window = None
        if setting.implementation != FLASH or setting.rows > 1 or setting.mask is not None:
            setting.declared = False
        if name.startswith("vision"):
            setting.call = setting.config = setting.modules = None
        yield setting


def expected_reasons(name, setting):
    kinds = [setting.call, setting.config, setting.modules, setting.switch]
    by_document = setting.positions is None or COUNTS_BY_DOCUMENT
    reasons = {
        "holes": setting.mask == "holes",
        "causal|bidirectional": any(kind is not None for kind in kinds) or name == "vision paligemma",
        "first position is not 0": setting.implementation == FLASH,
        "packed sequences in chunks": "llama4" in name and not by_document,
        OTHER_WINDOW: setting.window is not None and setting.implementation != FLASH,  # which gets those of modules
    }
    return "|".join(reason for reason, holds in reasons.items() if holds) or "none is expected"


def changed_copy(model, setting):
    model = copy.deepcopy(model).train(setting.training)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = setting.implementation
    for field, name in OF_CONFIG.items():
        if getattr(setting, field) is not None:
            setattr(attentions_of(model)[0].config, name, getattr(setting, field))
    of_modules(model, setting.modules or 0)
    return model


def outcome(model, setting):
    size = rows, length = setting.rows, setting.length
    given = {"use_cache": setting.use_cache, "is_causal": setting.call}
    given = {name: value for name, value in given.items() if value is not None}
    present = torch.ones(size, dtype=torch.bool)
    if setting.mask is not None:
        given["attention_mask"] = MASKS[setting.mask][:rows, :length]
        present = given["attention_mask"].bool()
    if setting.positions is not None:
        given["position_ids"] = POSITIONS[setting.positions].repeat(3, 1)[:rows, :length]
    if setting.declared:
        given |= declared(1, length - 3, 2)
    torch.manual_seed(5)  # of dropout, also of that after attention
    try:
        # Token ids below 82, because the multimodal models use larger ones for images and videos.
        logits = model(make_ids(*size) % 80 + 2, **given).logits[present]
        if not setting.training:
            return [logits.detach()]
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        return [logits.detach(), *torch.autograd.grad((logits * weight).sum(), model.get_input_embeddings().weight)]
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore:patch_model")
@pytest.mark.parametrize("count", [12, pytest.param(120, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", [*MODELS, *(f"vision {name}" for name in VISION_MODELS)])
def test_drawn_calls(name, count, calls):
    _, is_vision, vision = name.rpartition("vision ")
    unchanged, compared = make_vision_model(vision) if is_vision else make_model(name), 0
    for setting in drawn(name, unchanged, count):
        model = changed_copy(unchanged, setting)
        expected = outcome(model, setting)
        if isinstance(expected, Exception):
            assert re.search(ERRORS, str(expected)), (setting, expected)
            continue
        calls.clear()
        got = outcome(patch_model(model, unsupported="skip" if is_vision else "raise"), setting)
        assert not isinstance(got, Exception), (setting, got)
        reasons = own_reasons(model)
        assert bool(reasons) is not bool(calls), (setting, reasons, calls)
        assert all(re.search(expected_reasons(name, setting), reason) for reason in reasons), (setting, reasons)
        for x, y in zip(got, expected, strict=True):
            # A square root of less than this is rounding: nothing else is left of a gradient of 0.
            error = ((x - y).abs().max() / y.square().mean().sqrt().clamp(min=1e-6)).item() if y.numel() else 0
            assert error <= 2e-4, (setting, error)
        compared += 1
    assert compared >= count // 3


VARLEN, BIDIRECTIONAL = "rope_attention_varlen", {"skip": IGNORES_IS_CAUSAL, "change": changed(is_causal=False)}
SHORT = {"implementation": "sdpa", "size": (2, WINDOW), "use_cache": False}
SWITCHED = {"options": {"use_bidirectional_attention": True}, "skip": not HAS_SWITCH}
LATER = {"change": changed(use_bidirectional_attention=True), "skip": not HAS_SWITCH}
CAUSALITY = [
    row("llama", "bidirectional", **BIDIRECTIONAL, grad=True),  # it was silently causal
    row("mistral", "bidirectional, padded", **BIDIRECTIONAL, operator=VARLEN, size=(3, LENGTH), grad=True,
        attention_mask=MASKS["both"]),
    row("llama", "bidirectional, one padded row", **BIDIRECTIONAL, operator=VARLEN, size=(1, LENGTH),
        attention_mask=MASKS["left"][:1]),  # there were too few rows of tables
    row("llama4", "bidirectional, a chunk", "bidirectional attention in chunks", **BIDIRECTIONAL, size=(2, WINDOW)),
    row("llama", "of old", "is_causal=False with transformers", skip=not IGNORES_IS_CAUSAL, is_causal=False),
    row("mistral", "alone, the window", "is_causal = False of the att", change=of_modules, **SHORT),
    row("mistral", "alone, eager", change=of_modules),
    *(
        row("gemma3", f"its switch and is_causal, {when}", "causal in some modules", **given, is_causal=True)
        for when, given in (("loaded", SWITCHED), ("later", LATER))
    ),
]  # fmt: skip


def dense(starts, ends):
    """The matrix (B, 1, N, N) of intervals (B, N): the first query that sees a key, and the one after the last."""
    return ((starts[:, None, :] <= PLACES[:, None]) & (PLACES[:, None] < ends[:, None, :]))[:, None]


def random_intervals(seed):
    """Every query sees itself, and each key is seen by some adjacent queries."""
    before, after = torch.rand((2, 2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return dense((PLACES * before).long(), PLACES + 1 + ((LENGTH - PLACES - 1) * after).long())


def added(mask, low=-3.4028234663852886e38):
    return torch.zeros(mask.shape).masked_fill(~mask, low)


def causal(*where, value=False):
    """Causal masks of two rows with four heads, but at one place."""
    mask = dense(PLACES[None], torch.full((1, LENGTH), LENGTH)).repeat(2, 4, 1, 1)
    mask[where] = value if where else mask
    return mask


INTERVALS, GAPS, NOT_DENSE = random_intervals(4), "are not next to one another", r"an attention_mask that is not \(B, k"
STARTS, ENDS, TREE = masks.prefix_tree([-1, 0, 0], [10, 8, LENGTH - 18])
PADDED_ROW = causal()[:, :1]
PADDED_ROW[0, :, :, :4] = False
DENSE = {"grad": True, "use_cache": False}
# The mask has the last word: windows of the modules do not matter.
DENSE_MASKS = [
    row("llama", "bool", **DENSE, implementation="sdpa", attention_mask=INTERVALS),
    row("llama", "infinite", **DENSE, attention_mask=added(INTERVALS, -torch.inf)),
    *(row(name, "added", **DENSE, attention_mask=added(INTERVALS)) for name in ("gemma2", "qwen3", "gpt_oss")),
    row("gemma2", "by type", **DENSE, attention_mask={
        "sliding_attention": added(INTERVALS), "full_attention": added(random_intervals(5))
    }),
    row("llama", "a tree", **DENSE, attention_mask=added(dense(STARTS, ENDS)), position_ids=TREE),
    row("llama", "padding that sees nothing", use_cache=False, attention_mask=added(PADDED_ROW)),
    row("llama", "hole", GAPS, attention_mask=added(causal(1, slice(None), 9, 3)), use_cache=False),
    row("llama", "head", GAPS, attention_mask=added(causal(1, 2, 3, 4, value=True)), use_cache=False),
    # A row that sees nothing, but later rows see its key.
    row("llama", "seen padding", GAPS, attention_mask=added(causal(0, slice(None), 5)), use_cache=False),
    row("llama", "a bias", GAPS, attention_mask=added(causal()) / 1e30, use_cache=False),
    row("llama", "int", NOT_DENSE, attention_mask=causal().long(), use_cache=False),
    row("llama", "bool that eager adds", NOT_DENSE, attention_mask=causal(), use_cache=False),
    row("llama", "a gradient", NOT_DENSE, attention_mask=added(causal()).requires_grad_(), use_cache=False),
]  # fmt: skip
DOCUMENTS = {"size": (1, LENGTH), "position_ids": POSITIONS["documents"]}
OTHERS = [
    # With gradient checkpointing layers get no cache, and neither do the masks: documents are separated.
    row("llama", "checkpointing, packed", **DOCUMENTS, grad=True, operator=VARLEN, passes=2, change=checkpointing),
    *(
        row(name, f"checkpointing, {reentrant}", grad=True, attention_mask=MASKS["left"][:2], passes=2,
            change=functools.partial(checkpointing, reentrant=reentrant))
        for name in ("llama", "gemma3", "gpt_neox") for reentrant in (False, True)
    ),
    row("deepseek_v3", "widths", "heads of 24, 16 and 48 columns", options={"qk_nope_head_dim": 24}),
    row("gemma2", "its softcap switched off", options={"attn_logit_softcapping": None}),
    row("llama", "output_attentions", "output_attentions", output_attentions=True),
    row("llama", "dropout", "dropout", options={"attention_dropout": 0.5}, change=lambda model: model.train()),
    # Masks follow the config as it is now. Before 5 layers remember their type.
    row("mistral", "no window", change=changed(sliding_window=None)),
    row("gemma2", "other types", OTHER_WINDOW, change=turned_round, use_cache=False, skip=RELEASE < (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reason", "given"), [*CAUSALITY, *DENSE_MASKS, *OTHERS])
def test_one_pass(name, reason, given, calls):
    compare(name, reason, calls, **given)


@pytest.mark.unpoisoned
@pytest.mark.skipif(IGNORES_IS_CAUSAL, reason="another release of transformers")
def test_compiled_without_causality():
    """A graph cannot look into the mask: padded rows are found on the device."""
    model, ids, both = make_model("mistral"), make_ids(3, LENGTH), MASKS["both"]
    model.config.is_causal = False
    expected = run(model, ids, attention_mask=both, use_cache=False)[0]
    compiled = torch.compile(patch_model(model), backend="eager", fullgraph=True)
    got = run(compiled, ids, attention_mask=both, use_cache=False)[0]
    assert_close(got[both.bool()], expected[both.bool()], 1e-5)


@torch.no_grad()
def test_arguments_without_names(calls):
    decoder, ids = patch_model(make_model("llama")).model, make_ids(3, LENGTH)
    expected = decoder(input_ids=ids, attention_mask=MASKS["left"]).last_hidden_state
    assert torch.equal(decoder(ids, MASKS["left"]).last_hidden_state, expected)
    assert calls == {"rope_attention": 4}


def test_prompts_of_paligemma_2(calls):
    """The whole prompt sees itself, the answer is causal; there are windows, unlike in PaliGemma's test_images."""
    text = {"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 10}
    model, inputs = make_vision_model("paligemma", **text), make_inputs("paligemma")
    model.model.vision_tower.requires_grad_(False)
    ids, types = inputs.pop("input_ids"), inputs.pop("token_type_ids")
    inputs |= {"token_type_ids": types, "labels": ids, "use_cache": False}
    assert_same(model, ids, grad=True, unsupported="skip", **inputs)
    assert calls == {"rope_attention": 2} and not own_reasons(model)


STEPS = tuple(range(WINDOW + 3, 3 * WINDOW + 6))  # of one token each, after a prompt of more than a chunk
PADDING = columns((0, STEPS[-1]), (3, STEPS[-1]), length=STEPS[-1])
RIGHT_THEN_MORE = columns((0, 12), (0, 8), length=12)
RIGHT_THEN_MORE[1, 11] = 1
ONTO_CACHES = [
    *(
        row("llama4", f"{kind}, {what}", kind=kind, ends=STEPS, mask=mask, steps=len(STEPS) - 1)
        for kind in ("dynamic", "bare", "static")
        for what, mask in (("whole", None), ("padded", PADDING))
    ),
    row("llama4", "a long part", "several tokens in chunks with a cache that holds others", ends=(11, 13)),
    row("llama", "holes that appear", "holes", ends=(11, 12), mask=RIGHT_THEN_MORE),
    # A sliding layer drops nothing, then one token, then another, of those that padding is counted by.
    row("mistral", "a window moves on", ends=(6, 7, 8, 9, 10, 12), mask=columns((0, 12), (4, 12), length=12), steps=5),
    row("deepseek_v3", "steps", "a step of latent attention onto a cache, whose format is the module's own,",
        ends=(6, 7, 12), operator="rope_attention_mla"),
    *(
        row("llama", f"an unwritten cache, {implementation}", "bidirectional attention with a cache that", prompt=0,
            kind="static", ends=(LENGTH,), implementation=implementation, skip=IGNORES_IS_CAUSAL, is_causal=False)
        for implementation in ("eager", "sdpa")
    ),
]  # fmt: skip


def compare_parts(name, reason, calls, *, ends, mask=None, kind="dynamic", implementation="eager", is_causal=True,
                  prompt=1, steps=0, operator="rope_attention"):  # fmt: skip
    model, ids = make_model(name), make_ids(2, ends[-1])
    model.config.update({"is_causal": is_causal})
    model.config._attn_implementation = implementation

    def logits():
        past = transformers.DynamicCache() if kind == "bare" else make_cache(model, kind)
        return parts(model, past, ids, mask, ends)

    expected = logits()
    patch_model(model)
    with said(reason):
        assert_close(logits()[present_of(mask)], expected[present_of(mask)], 1e-5)
    assert Counter(calls) == Counter({operator: 2 * prompt, "rope_attention_with_kvcache": 2 * steps})
    rest = len(ends) - prompt if reason else 0
    assert all(sum(part.own.values()) == rest and reason in str(part.own) for part in patch_report(model))


@pytest.mark.parametrize(("name", "reason", "given"), ONTO_CACHES)
@torch.no_grad()
def test_parts_of_a_sequence(name, reason, given, calls):
    compare_parts(name, reason, calls, **given)


@torch.no_grad()
def test_dense_masks_and_caches(calls):
    """A prompt is put into the cache; onto one that holds tokens the modules' own attention runs."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    prompt = added(dense(*masks.prefix_lm(torch.tensor([9, LENGTH]), LENGTH)))
    more = torch.cat((torch.zeros_like(prompt), prompt), 3)

    def logits():
        past = make_cache(model, "dynamic")
        return [model(ids, attention_mask=mask, past_key_values=past).logits for mask in (prompt, more)]

    expected = logits()
    patch_model(model)
    with said("four dimensions with a cache that may hold tokens, is not served"):
        for one, other in zip(logits(), expected):
            assert_close(one, other, 1e-5)
    assert calls == {"rope_attention": 2}


def halved(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value / 2, attention_mask, **kwargs)


def sage(*args, **kwargs):
    return halved(*args, **kwargs)


halved.__name__ = sdpa_attention_forward.__name__  # by both its name and its module transformers' own is known
sage.__module__ = sdpa_attention_forward.__module__


class Wrapper:
    """Ulysses puts such an object in the place of a known function: the name in the config stays."""

    def __call__(self, *args, **kwargs):
        return halved(*args, **kwargs)


def nothing_hidden(batch_size, *_, kv_length, **__):
    return torch.ones((batch_size, 1, 1, kv_length), dtype=torch.bool)


HUB = functools.partial(flash_attention.flash_attention_forward, implementation=None)
REGISTERED = {  # name, attention, mask, reason
    "a user's": ("mine", halved, masking_utils.sdpa_mask, r"test_comparison.halved, registered as 'mine', is not ser"),
    "another name": ("mine", sage, masking_utils.sdpa_mask, "the attention function .*sage, registered as 'mine'"),
    "wrapped": ("sdpa", Wrapper(), masking_utils.sdpa_mask, "Wrapper, registered as 'sdpa'"),
    "a mask": ("mine", sdpa_attention_forward, nothing_hidden, "the mask function .*nothing_hidden, registered as 'mi"),
    "a kernel of transformers' hub": (FLASH, HUB, masking_utils.sdpa_mask, ""),
}


@pytest.mark.parametrize(("name", "function", "mask", "reason"), REGISTERED.values(), ids=REGISTERED)
def test_functions_that_are_registered(name, function, mask, reason, calls, monkeypatch):
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, function)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, mask)
    compare("llama", reason, calls, implementation=name)


def test_a_function_below_flash_attention(monkeypatch, calls):
    """verl exchanges shards of a sequence there; the registered function stays transformers' own."""

    def exchanging(query, key, value, *args, **kwargs):
        return torch.zeros_like(query)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", exchanging)
    reason = "_flash_attention_forward of transformers.* was replaced by .*exchanging"
    compare("llama", reason, calls, implementation="flash_attention_2")


# Layers that are called without their model: (model, implementation, further arguments, reason).
CAUSAL_MASK = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
UNKNOWN = "called with masks or caches and without its model"  # a cache may hold padding
LAYERS = {
    "alone": ("llama", "sdpa", dict, ""),
    "a mask": ("llama", "sdpa", lambda: {"attention_mask": CAUSAL_MASK}, UNKNOWN),
    "a cache": ("llama", "sdpa", lambda: {"past_key_values": transformers.DynamicCache()}, UNKNOWN),
    "eager": ("llama", "eager", dict, "hides no key from eager attention"),
    "a window": ("mistral", "sdpa", dict, "a layer with a window or chunks called without a mask"),
    "chunks": ("llama4", "sdpa", dict, "a layer with a window or chunks called without a mask"),
    "positions": ("llama", FLASH, lambda: {"position_ids": documents(9, 1, 15)}, "positions from which flash"),
}


@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_without_its_model(what, monkeypatch, calls):
    """SDPA knows windows by its masks; eager attention without a mask hides no key: patched or not."""
    name, implementation, given, reason = LAYERS[what]
    monkeypatch.setattr(attention, "_passes_of_layers", Counter())
    model, x = make_model(name), torch.randn(2, LENGTH, 64)
    model.config._attn_implementation = implementation
    layer, tables = model.model.layers[0].self_attn, model.model.rotary_emb(x, PLACES[None])
    inputs = {"position_embeddings": tables, "attention_mask": None}
    expected = layer(x, **inputs | given())[0]
    patch_model(model)
    with said(reason):
        found = layer(x, **inputs | given())[0]
    assert_close(found, expected, 0 if reason else 1e-5)
    assert calls == ({} if reason else {"rope_attention": 1})
