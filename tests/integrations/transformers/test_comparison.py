"""A patched model against the unpatched one, a row each: masks, documents, chunks, causality, changed windows.

A row with a reason is a call that the kernels do not serve: the modules' own attention runs, with a warning that gives
the reason, and the results are the same bits.
"""

import functools
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils, modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fused_rope_attn import masks
from fused_rope_attn.integrations.transformers import attention, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.families import RELEASE
from fused_rope_attn.integrations.transformers.obstacles import Pass, obstacle
from tests.support.hf_models import MODELS, WINDOW, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, declared, make_cache, parts, run
from tests.support.hf_vision_models import make_inputs, make_vision_model

IGNORES_IS_CAUSAL = RELEASE < (5, 6)  # here or there
COUNTS_BY_DOCUMENT = RELEASE >= (5, 23)  # chunks
HAS_SWITCH = hasattr(transformers.Gemma3TextConfig(), "use_bidirectional_attention")
LATENT = [name for name in ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash") if name in MODELS]
OF_OLD, OWN_IS_CAUSAL = "is_causal=False with transformers", "is_causal = False of the att"
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
    """Attend within rows (B, N, H, D), aligned at the bottom right."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = (distance > left) & (left >= 0) | (distance < -right) & (right >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux[:, None, None].expand(len(q), -1, q.shape[1], 1)), 3)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : k.shape[1]], v)


def attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
                  window_size=(-1, -1), softcap=0.0, s_aux=None):  # fmt: skip
    parts = (x.split(ends.diff().tolist()) for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)))
    options = softmax_scale, causal, window_size, softcap, s_aux
    return torch.cat([attend(*(x[None] for x in rows), *options)[0] for rows in zip(*parts)])


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


def of_modules(model, count=None, config=None):
    """Set ``is_causal`` of the first modules, as recipes of embedding models do."""
    model.config.update(config or {})
    for module in attentions_of(model)[:count]:
        module.is_causal = False


def columns(*rows, length=LENGTH):
    """A padding mask: in each row the first column with a token, and the one after the last."""
    return torch.stack([(first <= torch.arange(length)) & (torch.arange(length) < last) for first, last in rows]).long()


def documents(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


# Padding on the left, on the right, on both sides, and a row without a token.
LEFT = columns((3, LENGTH), (0, LENGTH), (LENGTH - 2, LENGTH))
RIGHT = columns((0, LENGTH), (0, LENGTH - WINDOW - 1), (0, 1))
BOTH = columns((2, LENGTH - 4), (0, LENGTH - 1), (5, LENGTH))
EMPTY_ROW = columns((0, LENGTH - 3), (0, 0), (1, LENGTH))
HOLES = (torch.arange(2 * LENGTH).view(2, LENGTH) % 7 != 3).long()
VARLEN, BIDIRECTIONAL = "rope_attention_varlen", {"skip": IGNORES_IS_CAUSAL, "change": changed(is_causal=False)}
PADDED = BIDIRECTIONAL | {"operator": VARLEN, "size": (3, LENGTH), "grad": True}
TWICE = functools.partial(of_modules, config={"is_causal": False})
# The case that was silently causal. The windows of masks reach one key further both ways than those of modules.
CAUSALITY = [
    row("llama", "bidirectional", **BIDIRECTIONAL, grad=True),
    row("mistral", "bidirectional", **BIDIRECTIONAL, implementation="sdpa"),
    row("llama", "bidirectional, both", **PADDED, attention_mask=BOTH),
    row("mistral", "bidirectional, left", **PADDED, implementation="sdpa", attention_mask=LEFT),
    row("mistral", "bidirectional, right", **PADDED, implementation="sdpa", attention_mask=RIGHT),
    row("gemma3", "bidirectional, both", **PADDED, attention_mask=BOTH),
    row("llama", "bidirectional, empty row", **PADDED | {"grad": False}, attention_mask=EMPTY_ROW),
    *(
        row(name, "bidirectional", **PADDED | {"operator": "rope_attention_mla_varlen"}, attention_mask=BOTH)
        for name in ("deepseek_v2", "minicpm3")
        if name in MODELS
    ),
    row("llama", "bidirectional, holes", "holes", **BIDIRECTIONAL, attention_mask=HOLES),
    row("llama", "by the call", skip=IGNORES_IS_CAUSAL, is_causal=False),
    row("llama", "causal by the call", **BIDIRECTIONAL, is_causal=True),
    row("llama", "causal twice", is_causal=True),
    row("llama", "of old", OF_OLD, skip=not IGNORES_IS_CAUSAL, is_causal=False),
    row("mistral", "positions alone", **BIDIRECTIONAL, size=(1, LENGTH), position_ids=documents(9, 1, 15)),
    *(
        row(name, "modules and config", "" if RELEASE >= (5, 6) else OF_OLD, change=TWICE)
        for name in ("mistral", "gemma3")
    ),
]
TWO = documents(22, 3).expand(2, -1)
SWITCHED = {"options": {"use_bidirectional_attention": True}, "skip": not HAS_SWITCH}
LATER = {"change": changed(use_bidirectional_attention=True), "skip": not HAS_SWITCH}
# Gemma 3's own switch changes its masks, also after loading; its windows end one key before those of is_causal=False.
SWITCH = [
    row("gemma3", "its switch, both", **SWITCHED, operator=VARLEN, size=(3, LENGTH), attention_mask=BOTH),
    row("gemma3", "its switch and is_causal", "causal in some modules", **SWITCHED, is_causal=True),
    *(
        row("gemma3", f"its switch, {what}, {implementation}, {when}", **by | given, implementation=implementation)
        for when, by in (("loaded", SWITCHED), ("later", LATER))
        for implementation in ("eager", "sdpa")
        for what, given in {
            "nothing": {},
            "padding": {"attention_mask": LEFT[:2], "operator": VARLEN},
            "packed": {"position_ids": TWO, "use_cache": False, "operator": VARLEN},
        }.items()
    ),
]


ALONE, FIRST = ({"change": functools.partial(of_modules, count=count)} for count in (None, 1))
SHORT = {"implementation": "sdpa", "size": (2, WINDOW - 1), "use_cache": False}
FULL, PADDED_LEFT = columns(*[(0, WINDOW - 1)] * 2, length=WINDOW - 1), columns((0, 7), (3, 7), length=WINDOW - 1)
SOME = "attention that is causal in some"
# The recipe of embedding models: a causal mask stays one, and SDPA without a mask becomes bidirectional. `is_causal` in
# test_obstacles.py has all cases.
MODULES_ALONE = [
    *(row(name, "alone, eager", **by) for name, by in (("llama", ALONE), ("mistral", FIRST))),
    row("mistral", "alone, no mask", "" if RELEASE >= (5,) else OWN_IS_CAUSAL, **ALONE, **SHORT),
    row("mistral", "alone, padding", **ALONE, **SHORT, attention_mask=PADDED_LEFT),
    row("mistral", "alone, the window", OWN_IS_CAUSAL, **ALONE, **SHORT | {"size": (2, WINDOW)}),
    row("mistral", "alone, packed", OWN_IS_CAUSAL, **ALONE, **SHORT, position_ids=documents(4, 3)),
    row("mistral", "the first, a full mask", SOME, **FIRST, **SHORT, attention_mask=FULL),
]


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
CHUNKED = {"grad": True, "use_cache": False, "implementation": "sdpa"}
TWO_OPERATORS = "rope_attention rope_attention_varlen"
TWO_ROWS = {"position_ids": torch.cat((documents(11, 1, 13), documents(2, 23))), "use_cache": False}
COUNTED = {"position_ids": torch.cat((PLACES[:12] + 5, PLACES[:13] + 3))[None], "size": (1, LENGTH)}
# The chunks of a row, and of a document, begin at its first token, or are counted by positions.
CHUNKS = [
    *(
        row("llama4", f"{length} tokens", **CHUNKED, size=(3, length), attention_mask=mask)
        for length in (WINDOW, WINDOW + 1, LENGTH)
        for mask in (None, columns((0, length), (3, length), (0, length - 4), length=length))
    ),
    row("llama4", "documents in a chunk", size=(1, 8), operator=VARLEN, position_ids=documents(3, 5), use_cache=False),
    row("llama4", "documents", skip=not COUNTS_BY_DOCUMENT, operator=TWO_OPERATORS, **TWO_ROWS, grad=True),
    row("llama4", "documents of old", "packed sequences in chunks", skip=COUNTS_BY_DOCUMENT, **TWO_ROWS),
    *(
        row("llama4", f"from {first} and {second}", skip=not COUNTS_BY_DOCUMENT, operator=TWO_OPERATORS,
            size=(1, LENGTH), position_ids=torch.cat((PLACES[:12] + first, PLACES[:13] + second))[None],
            use_cache=False)
        for first, second in ((0, 3), (5, 3), (0, 14), (0.5, 3.5))
    ),
    row("llama4", "a cache hides documents", skip=not COUNTS_BY_DOCUMENT, **COUNTED),
]  # fmt: skip
DOCUMENTS = {"size": (1, LENGTH), "position_ids": documents(9, 1, 15)}
PACKED = DOCUMENTS | {"use_cache": False, "grad": True}
OTHERS = [
    *(row(name, "packed", **PACKED, operator="rope_attention_mla_varlen") for name in LATENT),
    *(row(name, "packed", **PACKED, operator=VARLEN) for name in ("llama", "gemma3", "qwen3")),
    row("gpt_oss", "packed", **PACKED),  # its decoder makes masks without position ids, which show every document
    row("gemma3", "one packed row", **PACKED | {"position_ids": torch.cat((documents(9, 1, 15), documents(LENGTH)))}
        | {"size": (2, LENGTH)}, operator=VARLEN),
    # With gradient checkpointing layers get no cache, and neither do the masks: documents are separated.
    row("llama", "checkpointing, packed", **DOCUMENTS, grad=True, operator=VARLEN, passes=2, change=checkpointing),
    *(
        row(name, f"checkpointing, {reentrant}", grad=True, attention_mask=LEFT[:2], passes=2,
            change=functools.partial(checkpointing, reentrant=reentrant))
        for name in ("llama", "gemma3", "gpt_neox") for reentrant in (False, True)
    ),
    row("llama", "packed, with a cache", **DOCUMENTS, use_cache=True),  # transformers does not look for sequences
    row("llama", "one sequence from 5", position_ids=PLACES[None] + 5, use_cache=False),
    row("deepseek_v3", "widths", "heads of 24, 16 and 48 columns", options={"qk_nope_head_dim": 24}),
    row("gemma2", "its softcap switched off", options={"attn_logit_softcapping": None}),
    row("llama", "holes", "holes", attention_mask=HOLES),
    row("llama", "output_attentions", "output_attentions", output_attentions=True),
    row("llama", "dropout", "dropout", options={"attention_dropout": 0.5}, change=lambda model: model.train()),
    # Masks of these follow the config, and so do their modules.
    *(row(name, "another window", change=changed(sliding_window=3)) for name in ("mistral", "phi3")),
    row("mistral", "no window", change=changed(sliding_window=None)),
    # Masks follow the config as it is now, modules of these have a window of their own. Before transformers 5 layers
    # remember their type, and all those of Qwen 3 MoE are alike.
    *(
        row(name, f"other {what}", "a layer that was made with the window .* is not served", use_cache=False,
            change=changed(sliding_window=3) if what == "window" else turned_round)
        for name in "qwen2 qwen3_moe gemma2 gemma3 cohere2 gpt_oss olmo3 exaone4 smollm3".split()
        for what in ("window", "types")
        if name in MODELS and (what == "window" or RELEASE >= (5,) and name != "qwen3_moe")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason", "given"),
    [*CAUSALITY, *SWITCH, *MODULES_ALONE, *DENSE_MASKS, *CHUNKS, *OTHERS],
)
def test_one_pass(name, reason, given, calls):
    compare(name, reason, calls, **given)


@pytest.mark.parametrize("name", [*LATENT, "mistral", "llama", "gemma3", "gpt_oss"])
def test_sequences_that_are_declared(name, calls):
    """By cu_seqlens each sequence sees itself, and no other; Mistral is bidirectional here."""
    if name == "mistral" and IGNORES_IS_CAUSAL:
        pytest.skip("another release of transformers")
    model, lengths = make_model(name), (5, 1, 12, 7)
    model.config.is_causal = name != "mistral"
    pieces = make_ids(1, LENGTH).split(lengths, dim=1)
    expected = torch.cat([run(model, piece, use_cache=False)[0] for piece in pieces], 1)
    patch_model(model)
    for given in ({"position_ids": documents(*lengths)}, {"use_cache": False}):  # positions need not restart
        assert_close(run(model, torch.cat(pieces, 1), **given, **declared(*lengths))[0], expected, 1e-5)
    assert calls == {"rope_attention_mla_varlen" if name in LATENT else VARLEN: 2 * len(attentions_of(model))}


# Positions (1, LENGTH) that masks and flash-attention understand in different ways.
POSITIONS = {
    "restarts": documents(9, 1, 15),
    "a gap": torch.cat((PLACES[:9], PLACES[:16] + 14))[None],
    "a gap in a document": torch.cat((PLACES[:4], PLACES[:6] + 9, PLACES[:15]))[None],
    "one document": PLACES[None] + 3,
    "one token each": torch.zeros(1, LENGTH, dtype=torch.int64),
    "restarts, float": documents(9, 1, 15).float(),
    "halves": PLACES[None] / 2,
}
FLASH_MODELS = [(name, FLASH) for name in ("llama", "gemma3", "gpt_oss", "granitemoehybrid", "persimmon")]


@pytest.mark.parametrize(("name", "implementation"), [("gemma3", "eager"), ("gemma3", "sdpa"), *FLASH_MODELS])
def test_positions(name, implementation):
    """flash-attention reads the positions of one row, with a cache and a mask of ones too; other attention does where
    there is no cache. Granite's and Persimmon's layers hand flash-attention none."""
    if name in ("granitemoehybrid", "persimmon") and RELEASE < (5,):
        pytest.skip("the unpatched models fail with this release")
    model, ids = make_model(name), make_ids(1, LENGTH)
    model.config._attn_implementation = implementation
    for position_ids in POSITIONS.values():
        for inputs in ({}, {"use_cache": True}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
            assert_same(model, ids, position_ids=position_ids, **inputs)
    assert_same(model, make_ids(2, LENGTH), position_ids=documents(9, 1, 15).expand(2, -1), use_cache=False)
    assert not own_reasons(model)
    mask = (PLACES < LENGTH - 4)[None].long()  # flash-attention removes padding, and then reads no positions
    assert_same(model, ids, mask.bool(), position_ids=documents(9, 1, 15), attention_mask=mask)


@pytest.mark.unpoisoned
@pytest.mark.skipif(IGNORES_IS_CAUSAL, reason="another release of transformers")
def test_compiled_without_causality():
    """A graph cannot look into the mask: padded rows are found on the device."""
    model, ids = make_model("mistral"), make_ids(3, LENGTH)
    model.config.is_causal = False
    expected = run(model, ids, attention_mask=BOTH, use_cache=False)[0]
    compiled = torch.compile(patch_model(model), backend="eager", fullgraph=True)
    got = run(compiled, ids, attention_mask=BOTH, use_cache=False)[0]
    assert_close(got[BOTH.bool()], expected[BOTH.bool()], 1e-5)


@torch.no_grad()
def test_arguments_without_names(calls):
    decoder, ids = patch_model(make_model("llama")).model, make_ids(3, LENGTH)
    expected = decoder(input_ids=ids, attention_mask=LEFT).last_hidden_state
    assert torch.equal(decoder(ids, LEFT).last_hidden_state, expected)
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


# Parts of a sequence onto a cache.
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


@pytest.mark.parametrize(("name", "reason", "given"), ONTO_CACHES)
@torch.no_grad()
def test_parts_of_a_sequence(name, reason, given, calls):
    given = {"kind": "dynamic", "mask": None, "implementation": "eager", "steps": 0, "prompt": 1} | given
    model, ends, mask = make_model(name), given["ends"], given["mask"]
    model.config.update({"is_causal": given.get("is_causal", True)})
    model.config._attn_implementation = given["implementation"]
    ids = make_ids(2, ends[-1])

    def logits():
        past = transformers.DynamicCache() if given["kind"] == "bare" else make_cache(model, given["kind"])
        return parts(model, past, ids, mask, ends)

    expected = logits()
    patch_model(model)
    with said(reason):
        got = logits()
    assert_close(got[present_of(mask)], expected[present_of(mask)], 1e-5)
    prompt = {given.get("operator", "rope_attention"): 2} if given["prompt"] else {}
    assert calls == prompt | ({"rope_attention_with_kvcache": 2 * given["steps"]} if given["steps"] else {})
    rest = len(ends) - given["prompt"] if reason else 0
    assert all(sum(part.own.values()) == rest and reason in str(part.own) for part in patch_report(model))


@torch.no_grad()
def test_dense_masks_and_caches(calls):
    """A prompt is put into the cache; onto one that holds tokens the modules' own attention runs."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    prompt = added(dense(*masks.prefix_lm(torch.tensor([9, LENGTH]), LENGTH)))
    more = torch.cat((torch.zeros_like(prompt), prompt), 3)

    def logits():
        past = make_cache(model, "dynamic")
        first = model(ids, attention_mask=prompt, past_key_values=past).logits
        yield torch.cat((first, model(ids[:, :1], past_key_values=past).logits), 1)
        past.crop(-1)
        yield model(ids, attention_mask=more, past_key_values=past).logits

    expected, got = list(logits()), logits()
    patch_model(model)
    assert_close(next(got), expected[0], 1e-5)
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2} and not own_reasons(model)
    with said("four dimensions with a cache that may hold tokens, is not served"):
        assert_close(next(got), expected[1], 1e-5)


@pytest.mark.parametrize(
    ("implementation", "window", "reason"),
    [
        ("sdpa", None, "made with the window 8, for which config"),
        ("sdpa", WINDOW, ""),
        (FLASH, 3, ""),  # which gets the windows of modules
        ("paged|eager", WINDOW, "'paged|eager' without the paged cache that it takes"),
        ("flex_attention", WINDOW, "a BlockMask"),
    ],
)
def test_obstacles_by_implementation(implementation, window, reason):
    model, given = patch_model(make_model("gemma3")), {}
    model.config._attn_implementation, model.config.sliding_window = implementation, window
    if reason == "a BlockMask":
        given["attention_mask"] = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 16, 16, device="cpu")
    found = obstacle(Pass(attentions_of(model), model.config, given), True)
    assert reason in found and bool(found) is bool(reason)


# Attention functions that are not transformers' own.
def halved(module, query, key, value, attention_mask, **kwargs):
    """An attention of a user's own: another result than any other."""
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
    "partial": ("mine", functools.partial(halved), masking_utils.sdpa_mask, r"test_comparison.halved, registered as"),
    "another name": ("mine", sage, masking_utils.sdpa_mask, "the attention function .*sage, registered as 'mine'"),
    "wrapped": ("sdpa", Wrapper(), masking_utils.sdpa_mask, "Wrapper, registered as 'sdpa'"),
    "a mask": ("mine", sdpa_attention_forward, nothing_hidden, "the mask function .*nothing_hidden, registered as 'mi"),
    "kernels of transformers' hub have names of their own": ("hub/kernel", HUB, masking_utils.sdpa_mask, ""),
}


@pytest.mark.parametrize("what", REGISTERED)
def test_functions_that_are_registered(what, calls, monkeypatch):
    """Functions that users register, also after a model is patched, run."""
    name, function, mask, reason = REGISTERED[what]
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    model.config._attn_implementation = "sdpa"
    plain = run(patch_model(model), ids)[0]
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, function)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, mask)
    model.config._attn_implementation = name
    calls.clear()
    with said(reason):
        found = run(model, ids)[0]
    assert calls == ({} if reason else {"rope_attention": 2})
    assert_close(found, run(unpatch_model(model), ids)[0] if reason else plain, 0 if reason else 1e-5)
    assert torch.allclose(found, plain, atol=0.01) is (reason == "")


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
