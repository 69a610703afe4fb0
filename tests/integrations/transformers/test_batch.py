"""The arguments of a decoder's forward are described for its attention modules: what logits do not show, such as
bounds, and how often the host waits. test_comparison.py compares the logits.
"""

import pytest
import torch

from fused_rope_attn.integrations.transformers import batch as batches, obstacles, patch_model
from fused_rope_attn.integrations.transformers.batch import BATCH, PLAIN, Batch, describe
from fused_rope_attn.integrations.transformers.families import RELEASE
from fused_rope_attn.integrations.transformers.obstacles import Pass
from fused_rope_attn.integrations.transformers.patch import Preparation
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import make_cache, noted

CAPACITY = 8
needs_is_causal = pytest.mark.skipif(RELEASE < (5, 6), reason="bidirectional attention is served from there on")


@pytest.fixture(scope="module")
def llama():
    return patch_model(make_model("llama"))


def described(model, size=2, length=5, **given):
    """The Batch of a pass of (size, length) tokens, as tensors' numbers, without what the layers keep."""
    tokens = torch.zeros((size, length), dtype=torch.int64)
    return numbers_of(describe(Pass(attentions_of(model), model.config, {"input_ids": tokens} | given)))


def numbers_of(value):
    if not isinstance(value, Batch):
        return value.tolist() if isinstance(value, torch.Tensor) else value
    fields = value._replace(kept=None)._asdict()
    return {name: numbers_of(field) for name, field in fields.items() if getattr(PLAIN, name) is not field}


def filled(model, past, tokens):
    if tokens:
        x = torch.ones(2, model.config.num_key_value_heads, tokens, 16)
        for i in range(model.config.num_hidden_layers):
            past.update(x, x, i, {"cache_position": torch.arange(tokens)})
    return past


def dynamic(model, tokens):
    return filled(model, make_cache(model, "dynamic"), tokens)


def static(model, tokens):
    return filled(model, make_cache(model, "static", CAPACITY), tokens)


def mask(*rows):
    return torch.tensor(rows)


WRONG = {"original": "an attention_mask without exactly one column for every key"}
BIDIRECTIONAL = {"causal": False, "inclusive_window": True}


def test_padding(llama):
    """Causal attention hides the padding after the tokens: that is not described. Without causality the tokens of every
    row are a sequence, and the padding between two rows another."""
    assert described(llama, attention_mask=mask([1, 1, 1, 0, 0], [3, 3, -3, 3, 3])) == {}
    assert described(llama, attention_mask=mask([0, 1, 1, 0, 0], [0, 0, 0, 0, 0])) == {"kv_starts": [1, 5]}
    for columns in (4, 6):
        assert described(llama, attention_mask=torch.ones(2, columns)) == WRONG
    if RELEASE >= (5, 6):
        sequences = {"cu_seqlens": [0, 1, 3, 5, 10, 10], "max_seqlen": 10} | BIDIRECTIONAL
        assert described(llama, attention_mask=mask([0, 1, 1, 0, 0], [1] * 5), is_causal=False) == sequences
        assert described(llama, attention_mask=mask([1] * 5, [1] * 5), is_causal=False) == BIDIRECTIONAL


@pytest.mark.parametrize("ids", [[[0, 1, 2, 3, 4], [0, 0, 1, 2, 0]], [[0] * 300, list(range(300))]], ids=["5", "300"])
def test_sequences_that_positions_tell_apart(llama, ids, monkeypatch):
    """Python keeps no single object of the number 300."""
    ids = torch.tensor(ids)
    size, length = ids.shape
    expected = [0, 5, 6, 9, 10] if length == 5 else [*range(301), 600]
    packed = {"cu_seqlens": expected, "max_seqlen": length, "otherwise": {}}
    for dtype in (torch.int64, torch.float16):
        assert described(llama, size, length, position_ids=ids.to(dtype)) == packed
    assert described(llama, size, length, position_ids=ids[-1:] * 0 + torch.arange(7, 7 + length)) == {}
    # A padding mask takes precedence, and so does a cache; one token cannot be two sequences.
    assert described(llama, size, length, position_ids=ids, attention_mask=torch.ones(size, length)) == {}
    assert "cu_seqlens" not in described(llama, size, length, position_ids=ids, past_key_values=dynamic(llama, 0))
    assert described(llama, size, length, position_ids=ids.expand(3, size, length)) == {}
    monkeypatch.setattr(batches, "bounds_of_sequences", None)  # the host does not wait for the device's answer
    assert described(llama, size, 1, position_ids=ids[:, :1]) == {}


def test_sequences_in_a_graph(llama, monkeypatch):
    """The host cannot count them there: bounds for as many as there are tokens, of all rows."""
    monkeypatch.setattr(obstacles, "is_blind", lambda x: True)
    batch = described(llama, 3, position_ids=mask([0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]))
    assert batch["cu_seqlens"] == [0, 2, 5, 10, 11, 12, 13, 14, *[15] * 8]
    assert 5 <= batch["max_seqlen"] <= 15


def packed(ends, longest, **given):
    ends = torch.as_tensor(ends)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, (ends, ends, longest, longest))) | given


HELD = {"original": "cu_seq_lens with a cache that holds tokens"}


@pytest.mark.parametrize(
    ("size", "given", "past", "expected"),
    [
        ((1, 5), packed([[0, 1, 4, 5]], 3), None, {"cu_seqlens": [0, 1, 4, 5], "max_seqlen": 3}),
        # A bound that is too large is cut to the keys that exist.
        ((1, 5), packed([0, 1, 4, 5], 70), None, {"cu_seqlens": [0, 1, 4, 5], "max_seqlen": 5}),
        ((1, 5), packed([0, 1, 4, 5], 3) | {"max_length_k": None}, None, {}),
        # Into an empty cache, and not after the keys of a full one.
        ((1, 5), packed([0, 2, 5], 3), (dynamic, 0), {"cu_seqlens": [0, 2, 5], "max_seqlen": 3, "rows": 0}),
        ((1, 5), packed([0, 2, 5], 3), (dynamic, 3), HELD),
        ((1, 5), packed([0, 5], 5), (static, 3), HELD),
        # Positions do not matter then.
        ((1, 1), packed([0, 1], 1, position_ids=mask([4])), None, {"cu_seqlens": [0, 1], "max_seqlen": 1}),
        ((1, 0), packed([0, 0], 0, position_ids=torch.zeros(1, 0)), None, {"cu_seqlens": [0, 0]}),
        # Tokens after the pass and before it, for kernels that write the caches themselves.
        ((2, 5), {}, (dynamic, 0), {"rows": 0}),
        ((2, 5), {}, (static, 0), {}),
        ((2, 2), {}, (dynamic, 3), {"kv_lens": [5, 5], "cached": [3, 3], "rows": 3}),
        ((2, 2), {}, (static, 3), {"kv_lens": [5, 5], "cached": [3, 3]}),
        ((2, 1), {"cache_position": torch.arange(7, 8)}, (static, 7), {"kv_lens": [8, 8], "cached": [7, 7]}),
    ],
)  # fmt: skip
def test_cu_seqlens_and_caches(llama, size, given, past, expected):
    if past is not None:
        given = given | {"past_key_values": past[0](llama, past[1])}
    assert described(llama, *size, **given) == expected


@needs_is_causal
def test_bidirectional_attention_and_caches(llama):
    """The rows of a static cache exist, also where they hold no token, and an unpatched model sees them."""
    emptied = static(llama, 3)
    emptied.reset()
    for past in (dynamic(llama, 3), static(llama, 3), emptied, static(llama, 0)):
        reason = described(llama, 2, 1, past_key_values=past, is_causal=False)["original"]
        assert reason.startswith("bidirectional attention with a cache")
    assert described(llama, past_key_values=dynamic(llama, 0), is_causal=False) == BIDIRECTIONAL | {"rows": 0}


@needs_is_causal
def test_positions_of_bidirectional_attention(llama, monkeypatch):
    """They tell sequences apart under flash-attention alone, and only in a batch of a single row."""
    ids = mask([0, 1, 0, 1, 2])
    monkeypatch.setattr(llama.config, "_attn_implementation", "flash_attention_2")
    sequences = {"cu_seqlens": [0, 2, 5], "max_seqlen": 3, "otherwise": {"causal": False}}
    assert described(llama, 1, position_ids=ids, is_causal=False) == sequences | {"causal": False}
    assert described(llama, 2, position_ids=ids, is_causal=False) == {"causal": False}
    # Releases disagree about sequences that do not begin with 0, or leave tokens out.
    assert "first position is not 0" in described(llama, 1, position_ids=ids + 3)["original"]
    assert described(llama, 1, position_ids=torch.arange(5)[None] + 3) == {}


def test_what_the_host_does_not_know(llama, monkeypatch):
    """A static cache that is reset is asked on the device. One that is offloaded moves layers between devices, so only
    its own update writes it. Graphs are replayed with other numbers, so they keep neither tables nor lengths."""
    past = static(llama, 3)
    past.reset()
    expected = {"kv_lens": [5, 5], "cached": [0, 0]}
    assert described(llama, past_key_values=past, cache_position=torch.arange(5)) == expected
    past = dynamic(llama, 3)
    past.offloading = True
    assert described(llama, 2, 1, past_key_values=past) == {"kv_lens": [4, 4]}
    monkeypatch.setattr(batches, "is_capturing", lambda device: True)
    assert describe(Pass(attentions_of(llama), llama.config, {"input_ids": torch.zeros(2, 5)})).kept is None
    assert described(llama, 2, 1, past_key_values=dynamic(llama, 3)) == {"kv_lens": [4, 4]}


def test_a_full_static_cache_is_an_error(llama):
    with pytest.raises(RuntimeError, match=f"a static cache of {CAPACITY} tokens is full"):
        described(llama, 2, 2, past_key_values=static(llama, 7), cache_position=torch.arange(7, 9))


@pytest.mark.parametrize("layers", [1, 2])
def test_sliding_layers(layers):
    """Full ones no longer count: lengths are then more than there are, and no fewer than the keys."""
    mistral = patch_model(make_model("mistral", num_hidden_layers=layers))
    assert described(mistral, 2, 1, past_key_values=static(mistral, 3))["kv_lens"] == [4, 4]
    past = static(mistral, CAPACITY)
    assert described(mistral, 2, 2, past_key_values=past) == {"kv_lens": [CAPACITY + 2] * 2}
    past = static(mistral, 3)
    if hasattr(past.layers[0], "cumulative_length_int"):  # else this release counts on the host alone
        for layer in past.layers:
            layer.cumulative_length.fill_(5)  # as a graph does that was made at three tokens and is replayed
        assert described(mistral, 2, 1, past_key_values=past)["kv_lens"] == [6, 6]


def test_the_first_attention_module_says_what_its_cache_has_seen():
    """In Gemma 3 a sliding layer, which counts on the host, where those that follow count on the device."""
    model = patch_model(make_model("gemma3"))
    for columns, expected in ((4, False), (5, True)):
        batch = described(model, 2, 1, past_key_values=static(model, 3), attention_mask=torch.ones(2, columns))
        assert (batch == WRONG) is expected


@pytest.mark.parametrize(("row", "starts"), [([0, 0, 1, 1], [2, 0]), ([1, 1, 1, 1], None)], ids=str)
def test_a_mask_is_looked_at_once(llama, monkeypatch, row, starts):
    """Generation extends a mask without holes without holes: its steps do not wait for the device."""
    looks = noted(monkeypatch, torch.Tensor, "tolist")

    def look(past, rows, length=1):
        """(The host's looks at a tensor of the device, the padding)."""
        looks.clear()
        given = {"input_ids": torch.zeros(2, length), "attention_mask": rows, "past_key_values": past}
        found = describe(Pass(attentions_of(llama), llama.config, given)).kv_starts
        return len(looks), None if found is None else found.tolist()

    past, rows = dynamic(llama, 3), mask(row, [1, 1, 1, 1])
    assert look(past, rows) == (1, starts)
    # Longer by one, not longer by one, by one again, and by two, which may be padding.
    for more, seen in ((1, 0), (0, 1), (1, 0), (2, 1)):
        rows = torch.cat((rows, rows[:, :more] | 1), 1)
        filled(llama, past, more)
        assert look(past, rows) == (seen, starts)
    # Longer by one for two tokens in the place of one: what is new may be padding too.
    assert look(past, torch.cat((rows, rows[:, -1:]), 1), length=2) == (1, starts)
    # A mask that ends in padding is looked at again, and one of another cache.
    past, rows = dynamic(llama, 3), mask([1, 1, 1, 0], [0, 1, 1, 1])
    assert look(past, rows) == (1, [0, 1])
    grown = torch.cat((rows, rows[:, -1:]), 1)
    for longer in (filled(llama, past, 1), dynamic(llama, 4)):
        assert look(longer, grown) == (1, [0, 1])


# Inputs of a step that `generate` takes from a patched model: its own, with the Batch where masks were made.
ONES = torch.ones(2, 5, dtype=torch.int64)
MADE = torch.zeros(2, 1, 5, 8)  # what a mask of four dimensions is made of, it no longer says


@pytest.mark.parametrize(
    ("given", "made", "more", "described"),
    [
        (ONES, MADE, {}, True),
        (None, MADE, {}, True),
        (ONES, ONES, {}, False),
        (None, None, {}, False),
        (MADE, MADE[:1], {}, False),
        ({"full_attention": MADE}, {"full_attention": MADE}, {}, False),
        (ONES[0, 0], MADE, {}, False),
        # Types of tokens are for who makes the masks.
        (ONES, MADE, {"token_type_ids": ONES}, False),
        (ONES, MADE, {"token_type_ids": None}, True),
        (ONES, MADE, {"past_key_values": None}, False),
    ],
    ids=range(10),
)
def test_masks_that_say_what_they_are_made_of(llama, given, made, more, described):
    inputs = {"input_ids": make_ids(2, 5), "attention_mask": made, "past_key_values": static(llama, 0)} | more

    def prepared(model):
        got = Preparation(model, lambda **kwargs: inputs)(attention_mask=given)
        assert all(got[name] is value for name, value in inputs.items())
        return BATCH in got

    # A model in another one, a model with two decoders, or without one.
    several, others = torch.nn.ModuleList([llama]), [patch_model(make_model("llama")), torch.nn.Linear(2, 2)]
    assert prepared(llama) is prepared(several) is described
    assert not prepared(several.append(others[0])) and not prepared(torch.nn.ModuleList(others[1:]))
