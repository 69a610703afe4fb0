"""The arguments of a decoder's forward are described for its attention modules, number by number."""

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import batch as batches, obstacles, patch_model
from fused_rope_attn.integrations.transformers.batch import PLAIN, Batch, describe
from fused_rope_attn.integrations.transformers.caches import tokens_seen
from fused_rope_attn.integrations.transformers.obstacles import Pass
from tests.support.hf_models import attentions_of, make_model

CAPACITY = 8
needs_is_causal = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"), reason="bidirectional attention is served from there on"
)


@pytest.fixture(scope="module")
def llama():
    return patch_model(make_model("llama"))


@pytest.fixture(scope="module")
def mistral():
    """Its layers see windows of 8 tokens."""
    return patch_model(make_model("mistral"))


def described(model, size=2, length=5, **given):
    """The Batch of a pass of (size, length) tokens, as tensors' numbers, without what the layers keep."""
    tokens = torch.zeros((size, length), dtype=torch.int64)
    return numbers_of(describe(Pass(attentions_of(model), model.config, {"input_ids": tokens} | given)))


def numbers_of(value):
    if not isinstance(value, Batch):
        return value.tolist() if isinstance(value, torch.Tensor) else value
    fields = value._replace(kept=None)._asdict()
    return {name: numbers_of(field) for name, field in fields.items() if getattr(PLAIN, name) is not field}


def dynamic(model, tokens):
    past = transformers.DynamicCache(config=model.config)
    return filled(model, past, tokens)


def static(model, tokens):
    return filled(model, transformers.StaticCache(config=model.config, max_cache_len=CAPACITY), tokens)


def filled(model, past, tokens, size=2):
    """A cache that holds so many tokens of each layer."""
    if tokens:
        x = torch.ones(size, model.config.num_key_value_heads, tokens, 16)
        for i in range(model.config.num_hidden_layers):
            past.update(x, x, i, {"cache_position": torch.arange(tokens)})
    return past


def mask(*rows):
    return torch.tensor(rows)


FULL = [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((FULL, FULL), {}),
        (([0, 0, 1, 1, 1], FULL), {"kv_starts": [2, 0]}),
        (([1, 1, 1, 0, 0], FULL), {}),  # causal attention hides the padding after the last token
        (([0, 1, 1, 1, 0], FULL), {"kv_starts": [1, 0]}),
        (([0, 0, 0, 0, 0], FULL), {"kv_starts": [5, 0]}),
        (([0, 0, 0, 0, 1], [3, 3, -3, 3, 3]), {"kv_starts": [4, 0]}),
        (([1, 0, 1, 1, 1], FULL), {"original": "an attention_mask with holes"}),
        ((FULL, [0, 1, 0, 1, 1]), {"original": "an attention_mask with holes"}),
        (([1, 1, 1, 1], [1, 1, 1, 1]), {"original": "an attention_mask without exactly one column for every key"}),
        (([*FULL, 1], [*FULL, 1]), {"original": "an attention_mask without exactly one column for every key"}),
    ],
    ids=str,
)
def test_padding(llama, given, expected):
    assert described(llama, attention_mask=mask(*given)) == expected


@pytest.mark.parametrize(
    ("size", "ids", "expected"),
    [
        (1, [[0, 1, 2, 0, 1]], {"cu_seqlens": [0, 3, 5], "max_seqlen": 3}),
        (1, [[0, 1, 0, 1, 2]], {"cu_seqlens": [0, 2, 5], "max_seqlen": 3}),
        (2, [[0, 1, 2, 0, 1]], {"cu_seqlens": [0, 3, 5, 8, 10], "max_seqlen": 3}),
        (2, [[0, 1, 2, 3, 4], [0, 0, 1, 2, 0]],
         {"cu_seqlens": [0, 5, 6, 9, 10], "max_seqlen": 5}),
        (2, [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]],
         {"cu_seqlens": [0, 5, 8, 10], "max_seqlen": 5}),
        (2, [[0, 1, 2, 3, 4]], {}),
        (2, [[7, 8, 9, 10, 11], [0, 1, 2, 3, 4]], {}),
    ],
    ids=str,
)  # fmt: skip
def test_sequences_that_positions_tell_apart(llama, size, ids, expected):
    ids = torch.tensor(ids)
    if expected:
        expected = expected | {"otherwise": {}}
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float16):
        assert described(llama, size, position_ids=ids.to(dtype)) == expected
    # A padding mask takes precedence, and so does a cache; one token cannot be two sequences.
    assert described(llama, size, position_ids=ids, attention_mask=torch.ones(size, 5)) == {}
    assert "cu_seqlens" not in described(llama, size, position_ids=ids, past_key_values=dynamic(llama, 0))
    assert described(llama, size, position_ids=ids.expand(3, size, 5)) == {}
    assert described(llama, size, 1, position_ids=ids[:, :1]) == {}


def test_two_tokens_may_be_two_sequences(llama, monkeypatch):
    expected = {"cu_seqlens": [0, 1, 2], "max_seqlen": 1, "otherwise": {}}
    assert described(llama, 1, 2, position_ids=torch.tensor([[0, 0]])) == expected
    # One token cannot: the host does not wait for the device's answer.
    monkeypatch.setattr(batches, "bounds_of_sequences", None)
    assert described(llama, 1, 1, position_ids=torch.tensor([[0]])) == {}


def test_numbers_that_are_not_small(llama):
    """Python keeps no single object of each, so that `is` in place of `==` fails."""
    assert described(llama, 1, 300, attention_mask=torch.ones(1, 300)) == {}
    assert described(llama, 300, 2, position_ids=torch.arange(2)[None]) == {}


def test_a_decoder_with_one_attention_module():
    model = patch_model(make_model("mistral", num_hidden_layers=1))
    assert described(model, attention_mask=mask([0, 1, 1, 1, 1], FULL)) == {"kv_starts": [1, 0]}
    for held in (3, CAPACITY):
        past = static(model, held)
        assert described(model, 2, 2, past_key_values=past)["kv_lens"] == [held + 2] * 2


def packed(ends, longest, **given):
    ends = torch.as_tensor(ends)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, (ends, ends, longest, longest))) | given


def test_cu_seqlens_that_are_given(llama):
    expected = {"cu_seqlens": [0, 1, 4, 5], "max_seqlen": 3}
    assert described(llama, 1, **packed([0, 1, 4, 5], 3)) == expected
    assert described(llama, 1, **packed([[0, 1, 4, 5]], 3)) == expected
    # A bound that is too large is cut to the keys that exist.
    expected |= {"max_seqlen": 5}
    assert described(llama, 1, **packed([0, 1, 4, 5], 70)) == expected
    assert described(llama, 1, **packed([0, 1, 4, 5], 3) | {"max_length_k": None}) == {}
    # Into an empty cache, and not after the keys of a full one.
    past = dynamic(llama, 0)
    assert described(llama, 1, **packed([0, 1, 4, 5], 70), past_key_values=past) == expected | {"rows": 0}
    past = dynamic(llama, 3)
    assert described(llama, 1, **packed([0, 1, 4, 5], 3), past_key_values=past) == {
        "original": "cu_seq_lens with a cache that holds tokens"
    }
    assert "cu_seq_lens with" in described(llama, 1, **packed([0, 5], 5), past_key_values=static(llama, 3))["original"]
    # A bound beyond an even number of tokens.
    assert described(llama, 1, 4, **packed([0, 1, 4], 70))["max_seqlen"] == 4


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_of_one_sequence_each_are_not_packed(llama, size):
    assert described(llama, size, position_ids=torch.arange(5)[None]) == {}


def test_sequences_in_a_graph(llama, monkeypatch):
    """Nobody can count them there: there is room for as many as there are tokens, of all rows."""
    monkeypatch.setattr(obstacles, "is_blind", lambda x: True)
    ids = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
    batch = described(llama, 3, position_ids=ids)
    assert batch["cu_seqlens"] == [0, 2, 5, 10, 11, 12, 13, 14, *[15] * 8]
    assert 5 <= batch["max_seqlen"] <= 15


def test_positions_beside_cu_seqlens(llama):
    given = packed([0, 2, 5], 3)
    expected = {"cu_seqlens": [0, 2, 5], "max_seqlen": 3}
    for ids in ([[0, 1, 0, 1, 2]], [[7, 8, 3, 4, 5]], [[0, 2, 0, 1, 3]], [[[0] * 5]] * 3):
        assert described(llama, 1, **given, position_ids=torch.tensor(ids)) == expected
    one = {"cu_seqlens": [0, 1], "max_seqlen": 1}
    assert described(llama, 1, 1, **packed([0, 1], 1), position_ids=torch.tensor([[4]])) == one
    none = {"cu_seqlens": [0, 0]}
    assert described(llama, 1, 0, **packed([0, 0], 0), position_ids=torch.zeros(1, 0, dtype=torch.int64)) == none


@needs_is_causal
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((FULL, FULL), {}),
        (([0, 1, 1, 0, 0], FULL), {"cu_seqlens": [0, 1, 3, 5, 10, 10]}),
        ((FULL, [1, 1, 1, 1, 0]), {"cu_seqlens": [0, 0, 5, 5, 9, 10]}),
        (([0, 0, 0, 0, 0], [0, 0, 0, 1, -1]), {"cu_seqlens": [0, 5, 5, 8, 10, 10]}),
        (([1, 0, 1, 1, 1], FULL), {"original": "an attention_mask with holes"}),
        (([1, 1, 1, 0, 1], FULL), {"original": "an attention_mask with holes"}),
    ],
    ids=str,
)
def test_padding_of_bidirectional_attention(llama, given, expected):
    """The tokens of every row are a sequence, and the padding between two rows another."""
    if "cu_seqlens" in expected:
        expected |= {"max_seqlen": 10}
    if "original" not in expected:
        expected |= {"causal": False, "inclusive_window": True}
    assert described(llama, attention_mask=mask(*given), is_causal=False) == expected


@needs_is_causal
def test_bidirectional_attention_and_caches(llama):
    for past in (dynamic(llama, 3), static(llama, 3)):
        reason = described(llama, 2, 1, past_key_values=past, is_causal=False)["original"]
        assert reason.startswith("bidirectional attention with a cache")
    # The rows of a static cache exist, also where they hold no token, and an unpatched model sees them.
    emptied = static(llama, 3)
    emptied.reset()
    for past in (emptied, static(llama, 0)):
        assert "original" in described(llama, past_key_values=past, is_causal=False)
    expected = {"causal": False, "inclusive_window": True, "rows": 0}
    assert described(llama, past_key_values=dynamic(llama, 0), is_causal=False) == expected


@needs_is_causal
def test_positions_of_bidirectional_attention(llama, monkeypatch):
    """They tell sequences apart under flash-attention alone, and only in a batch of a single row."""
    ids = torch.tensor([[0, 1, 0, 1, 2]])
    assert described(llama, 1, position_ids=ids, is_causal=False) == {"causal": False, "inclusive_window": True}
    monkeypatch.setattr(llama.config, "_attn_implementation", "flash_attention_2")
    sequences = {"cu_seqlens": [0, 2, 5], "max_seqlen": 3, "otherwise": {"causal": False}}
    assert described(llama, 1, position_ids=ids, is_causal=False) == sequences | {"causal": False}
    assert described(llama, 2, position_ids=ids, is_causal=False) == {"causal": False}
    # Releases disagree about sequences that do not begin with 0, or leave tokens out.
    assert "first position is not 0" in described(llama, 1, position_ids=ids + 3)["original"]
    assert described(llama, 1, position_ids=torch.arange(5)[None] + 3) == {}


@pytest.mark.parametrize("length", [1, 2])
def test_steps_behind_a_cache(llama, length):
    """Tokens after the pass and before it, for kernels that write the caches themselves."""
    held = {"kv_lens": [3 + length] * 2, "cached": [3, 3]}
    assert described(llama, 2, length, past_key_values=dynamic(llama, 3)) == held | {"rows": 3}
    assert described(llama, 2, length, past_key_values=static(llama, 3)) == held
    assert described(llama, past_key_values=dynamic(llama, 0)) == {"rows": 0}
    assert described(llama, past_key_values=static(llama, 0)) == {}
    told = torch.arange(4, 4 + length)
    lengths = described(llama, 2, length, past_key_values=static(llama, 3), cache_position=told)
    assert lengths == {"kv_lens": [4 + length] * 2, "cached": [4, 4]}


def test_graphs_keep_nothing_on_the_host(llama, monkeypatch):
    """Neither the layers' tables nor the number of tokens: a graph is replayed with other ones."""
    monkeypatch.setattr(batches, "is_capturing", lambda device: True)
    assert describe(Pass(attentions_of(llama), llama.config, {"input_ids": torch.zeros(2, 5)})).kept is None
    assert described(llama, 2, 1, past_key_values=dynamic(llama, 3)) == {"kv_lens": [4, 4]}


def test_caches_that_nobody_else_may_write(llama):
    """Those that are offloaded: their ``update`` moves layers between devices."""
    past = dynamic(llama, 3)
    past.offloading = True
    assert described(llama, 2, 1, past_key_values=past) == {"kv_lens": [4, 4]}


def test_a_static_cache_that_is_reset_is_asked_on_the_device(llama):
    past = static(llama, 3)
    past.reset()
    assert described(llama, past_key_values=past, cache_position=torch.arange(5)) == {
        "kv_lens": [5, 5],
        "cached": [0, 0],
    }


def test_a_full_static_cache_is_an_error(llama):
    told = torch.arange(CAPACITY - 1, CAPACITY)
    assert described(llama, 2, 1, past_key_values=static(llama, 7), cache_position=told)["kv_lens"] == [8, 8]
    with pytest.raises(RuntimeError, match=f"a static cache of {CAPACITY} tokens is full"):
        described(llama, 2, 2, past_key_values=static(llama, 7), cache_position=torch.arange(7, 9))


def test_sliding_layers_that_are_full(mistral):
    """They no longer count: lengths are then more than there are, and no fewer than the keys."""
    assert described(mistral, 2, 1, past_key_values=static(mistral, 3))["kv_lens"] == [4, 4]
    past = static(mistral, CAPACITY)
    lengths = described(mistral, 2, 2, past_key_values=past)
    assert lengths == {"kv_lens": [CAPACITY + 2] * 2}


def test_sliding_layers_count_on_the_device_for_graphs(mistral):
    past = static(mistral, 3)
    if not hasattr(past.layers[0], "cumulative_length_int"):
        pytest.skip("layers of this transformers count on the host alone")
    for layer in past.layers:
        layer.cumulative_length.fill_(5)  # as a graph does that was made at three tokens and is replayed
    assert described(mistral, 2, 1, past_key_values=past)["kv_lens"] == [6, 6]


def test_the_first_attention_module_says_what_its_cache_has_seen():
    """In Gemma 3 a sliding layer, which counts on the host, where those that follow count on the device."""
    model = patch_model(make_model("gemma3"))
    past = static(model, 3)
    wrong = described(model, 2, 1, past_key_values=past, attention_mask=torch.ones(2, 5))
    assert wrong == {"original": "an attention_mask without exactly one column for every key"}
    assert "original" not in described(model, 2, 1, past_key_values=past, attention_mask=torch.ones(2, 4))


def test_tokens_that_a_cache_has_seen(llama):
    assert [tokens_seen(dynamic(llama, n), 0) for n in (0, 3)] == [0, 3]
    assert tokens_seen(transformers.DynamicCache(), 1) == 0
    assert tokens_seen(dynamic(llama, 3), 1) == 3 and tokens_seen(dynamic(llama, 3), 2) == 0
    assert tokens_seen(static(llama, 0), 0) == 0


class Looks:
    """Count the host's looks at a tensor of the device."""

    def __init__(self, monkeypatch):
        self.count, own = 0, torch.Tensor.tolist

        def tolist(x):
            self.count += 1
            return own(x)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def describe(self, model, past, rows, length=1):
        before = self.count
        given = {"input_ids": torch.zeros(2, length), "attention_mask": rows, "past_key_values": past}
        starts = describe(Pass(attentions_of(model), model.config, given)).kv_starts
        looks = self.count - before
        return looks, None if starts is None else starts.tolist()


@pytest.mark.parametrize(("row", "starts"), [([0, 0, 1, 1], [2, 0]), ([1, 1, 1, 1], None)], ids=str)
def test_a_mask_is_looked_at_once(llama, monkeypatch, row, starts):
    """Generation extends a mask without holes without holes: its steps do not wait for the device."""
    past, looks = dynamic(llama, 3), Looks(monkeypatch)
    rows = mask(row, [1, 1, 1, 1])
    assert looks.describe(llama, past, rows) == (1, starts)
    grown = torch.cat((rows, rows[:, -1:]), 1)
    filled(llama, past, 1)
    assert looks.describe(llama, past, grown) == (0, starts)
    assert looks.describe(llama, past, grown) == (1, starts)  # not longer by one
    filled(llama, past, 1)
    grown = torch.cat((grown, rows[:, -1:]), 1)
    assert looks.describe(llama, past, grown) == (0, starts)
    # Longer by two, and longer by one for two tokens in the place of one: what is new may be padding.
    filled(llama, past, 2)
    grown = torch.cat((grown, rows[:, -2:]), 1)
    assert looks.describe(llama, past, grown) == (1, starts)
    assert looks.describe(llama, past, torch.cat((grown, rows[:, -1:]), 1), length=2) == (1, starts)


def test_a_mask_that_ends_in_padding_is_looked_at_again(llama, monkeypatch):
    past, looks = dynamic(llama, 3), Looks(monkeypatch)
    rows = mask([1, 1, 1, 0], [0, 1, 1, 1])
    assert looks.describe(llama, past, rows) == (1, [0, 1])
    filled(llama, past, 1)
    grown = torch.cat((rows, rows[:, -1:]), 1)
    assert looks.describe(llama, past, grown) == (1, [0, 1])
    assert looks.describe(llama, dynamic(llama, 4), grown) == (1, [0, 1])


def test_every_pass_keeps_tables_of_its_own(llama):
    kept = [describe(Pass(attentions_of(llama), llama.config, {"input_ids": torch.zeros(1, 2)})).kept for _ in range(2)]
    assert kept[0] is not kept[1] and kept[0].tables == {} and not hasattr(kept[0], "__dict__")
    assert PLAIN == Batch()
