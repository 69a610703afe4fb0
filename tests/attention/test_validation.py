"""Every refusal of the public functions: the documented type, the argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import cu_seqlens_from_position_ids
from tests.support.internals import check_call
from tests.support.operators import Record

B, HQ, HKV, N, D = 2, 4, 2, 6, 16
F16, F32, F64, I32, I64 = torch.float16, torch.float32, torch.float64, torch.int32, torch.int64


def zeros(*shape, dtype=F32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def tables(*shape, dtype=F32):
    return {"cos": zeros(*shape, dtype=dtype), "sin": zeros(*shape, dtype=dtype)}


def heads(q=HQ, kv=HKV, columns=D):
    return {"q": zeros(B, q, N, columns)} | {name: zeros(B, kv, N, columns) for name in "kv"}


def to(dtype, *names):
    return {name: DENSE[name].to(dtype) for name in names}


def leaf(*shape):
    return zeros(*shape).requires_grad_()


ENDS = torch.tensor([0, 2, N], dtype=I32)
DENSE = heads() | tables(N, D // 2) | {"causal": True}
LATENT = {"q_nope": zeros(2, 3, 9, 32), "q_rope": zeros(2, 3, 9, 16), "k_nope": zeros(2, 3, 12, 32)}
LATENT |= {"k_rope": zeros(2, 1, 12, 16), "v": zeros(2, 3, 12, 32)} | tables(12, 8)
PACK = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 4, "max_seqlen_k": 4}
CALLS = {
    "rope_attention": DENSE,
    "bshd": dict.fromkeys("kv", zeros(2, 12, 2, D)) | {"q": zeros(2, 9, 4, D), "layout": "bshd"} | tables(12, 8),
    "rope_attention_varlen": {"q": zeros(N, HQ, D), "k": zeros(N, HKV, D), "v": zeros(N, HKV, D)} | tables(N, 8) | PACK,
    "rope_attention_mla": LATENT,
    "rope_attention_mla_varlen": {name: x if name in ("cos", "sin") else x[0].transpose(0, 1)
                                  for name, x in LATENT.items()}
    | {"cu_seqlens_q": ENDS, "cu_seqlens_k": 2 * ENDS, "max_seqlen_q": 4, "max_seqlen_k": 8},
}  # fmt: skip
FUNCTIONS = {"bshd": "rope_attention"}

# By function: the argument at fault, what is changed, and the rest of the message.
TYPE_ERRORS = {
    "rope_attention": [
        *((name, {name: None}, "Tensor.*NoneType") for name in ("q", "k", "v", "cos", "sin")),
        ("q", {"q": [[1.0]]}, "Tensor.*list"),
        ("cos", {"cos": np.zeros((6, 8), dtype=np.float32)}, "Tensor.*numpy.ndarray"),
        *((name, {name: 1}, "bool.*int 1") for name in ("causal", "interleaved", "return_lse", "deterministic",
                                                        "batch_invariant", "return_max_logit")),
        ("causal", {"causal": torch.tensor(True)}, "bool.*Tensor"),
        ("q", to(torch.int32, "q", "k", "v"), "float16, bfloat16 or float32.*int32"),
        ("q", to(torch.complex64, "q", "k", "v"), "complex64"),
        *((name, to(F16, name), "q's dtype float32, but is float16") for name in "kv"),
        ("cos", tables(N, 8, dtype=F16), "float32.*float16"),
        ("cos", to(F16, "q", "k", "v") | tables(N, 8, dtype=torch.bfloat16), "float32 or .*float16.*bfloat16"),
        ("cos", tables(N, 8, dtype=F64), "float32.*float64"),
        ("sin", {"sin": zeros(N, 8, dtype=F16)}, "cos's dtype float32.*float16"),
        ("rotary_dim", {"rotary_dim": 16.0}, "int or None.*float 16.0"),
        ("rotary_dim", {"rotary_dim": True}, "int.*bool"),
        *((name, {name: x}, "float.*" + what) for name in ("softmax_scale", "softcap", "norm_eps", "norm_offset")
          for x, what in (("1", "str '1'"), (False, "bool"), (torch.tensor(0.0), "Tensor"))
          if not name.startswith("norm")),
        ("softcap", {"softcap": None}, "float.*NoneType"),
        ("window", {"window": 128}, "tuple.*int 128"),
        ("window", {"window": (128.0, 0)}, "two ints.*float 128.0"),
        ("window", {"window": (True, 0)}, "two ints.*bool"),
        ("sinks", {"sinks": [0.0] * HQ}, "Tensor.*list"),
        ("sinks", {"sinks": zeros(HQ, dtype=F16)}, "float32.*float16"),
        *((name, {name: [0, 0]}, "Tensor.*list") for name in ("kv_starts", "kv_lens", "query_starts", "query_ends")),
        *((name, {name: zeros(B, dtype=I64)}, "int32.*int64") for name in ("kv_starts", "kv_lens")),
        *((name, {name: zeros(B, N, dtype=dtype)}, "must be int32, but is") for name in ("query_starts", "query_ends")
          for dtype in (F32, I64)),
        *((name, {name: 0}, "str.*int 0") for name in ("backend", "strategy", "layout")),
        ("q_norm", {"q_norm": zeros(D, dtype=F16), "k_norm": zeros(D)}, "float32.*float16"),
        *((name, {name: zeros(B, HKV, N, D).to_sparse()}, "must be a dense tensor, .*sparse_coo") for name in "kv"),
        ("q", {"q": DENSE["q"].to_sparse()}, "must be a dense tensor, but has the layout sparse_coo"),
    ],
    "bshd": [("layout", {"layout": None}, "must be a str, 'bhsd' or 'bshd', but is NoneType")],
    "rope_attention_varlen": [
        ("k", {"k": None}, "Tensor.*NoneType"),
        ("cu_seqlens_q", {"cu_seqlens_q": [0, 6]}, "Tensor.*list"),
        *((name, {name: ENDS.long()}, "int32.*int64") for name in ("cu_seqlens_q", "cu_seqlens_k")),
        ("max_seqlen_q", {"max_seqlen_q": 4.0}, "int.*float 4.0"),
        ("max_seqlen_q", {"max_seqlen_q": True}, "int.*bool True"),
        ("max_seqlen_k", {"max_seqlen_k": None}, "int.*NoneType"),
        ("token_tables", {"token_tables": 1}, "must be a bool, but is int 1"),
        ("softmax_scale", {"softmax_scale": "1"}, "float.*str"),
        *((r"rope_attention_varlen\(\)", {name: None}, f"does not take '{name}'")
          for name in ("kv_lens", "query_ends")),
    ],
    "rope_attention_mla": [
        ("q_nope", {"q_nope": None}, "must be a torch.Tensor, but is NoneType"),
        ("v", {"v": LATENT["v"].half()}, "must have q_rope's dtype float32, but is float16"),
        ("q_rope", {"q_rope": LATENT["q_rope"].int()}, "must be float16, bfloat16 or float32, but is int32"),
        ("kv_lens", {"kv_lens": torch.tensor([3, 4])}, "must be int32"),
        *((r"rope_attention_mla\(\)", {name: None}, f"does not take '{name}'")
          for name in ("sinks", "strategy", "return_max_logit")),
    ],
}  # fmt: skip
OTHER_DEVICE = {name: DENSE[name].to("meta") for name in ("k", "v", "cos", "sin")} | {"sinks": zeros(HQ, device="meta")}
OTHER_DEVICE |= {name: zeros(B, dtype=I32, device="meta") for name in ("kv_starts", "kv_lens")}
NAN, INF = float("nan"), float("inf")
VALUE_ERRORS = {
    "rope_attention": [
        *((name, {name: DENSE[name][0]}, "3 dimensions") for name in "qkv"),
        *((name, {name: DENSE[name][..., None]}, "5 dimensions") for name in "qkv"),
        *(("k", {x: zeros(n, HKV, N, D) for x in "kv"}, rf"B = 2 of q.*\({n}, 2, 6, 16\)") for n in (1, 3)),
        *(("k", {x: zeros(B, HKV, N, n) for x in "kv"}, rf"D = 16 of q.*, {n}\)") for n in (8, 24)),
        ("v", {"v": zeros(1, HKV, N, D)}, "B = 2 of q"),
        ("v", {"v": zeros(B, HKV, N, 8)}, r"D = 16 of q.*\(2, 2, 6, 8\)"),
        ("v", {"v": zeros(B, HKV, N + 1, D)}, r"NK = 6 of k.*\(2, 2, 7, 16\)"),
        ("v", {"v": zeros(B, HQ, N, D)}, r"HKV = 2 of k.*\(2, 4, 6, 16\)"),
        ("k", heads(32, 6), "has 6 heads, but q's 32 heads must be a multiple of it"),
        ("k", heads(4, 8), "has 8 heads, but q's 4 heads"),
        ("k", heads(4, 0), "has 0 heads"),
        ("q", heads(0, 2), "at least one head"),
        ("q", heads(columns=17), "even head dim.*17"),
        ("q", heads(columns=0) | tables(N, 0), "head dim.*0"),
        ("q", {"q": zeros(B, HQ, N + 1, D), "causal": False},
         "at most k's 6 positions where causal is False, but has 7.*did you mean layout='bshd'"),
        *((name, {name: x}, "q's device cpu.*meta") for name, x in OTHER_DEVICE.items()),
        *(("cos", tables(*shape), re.escape(str(shape))) for shape in ((8,), (1, 1, N, 8), (3, N, 8))),
        ("sin", {"sin": zeros(N, D)}, r"\(6, 8\).*\(6, 16\)"),
        ("sin", {"sin": zeros(1, N, 8)}, r"\(1, 6, 8\)"),
        *(("cos", tables(*lead, N - 1, 8), "6 positions.*5 rows") for lead in ((), (1,))),
        *(("cos", tables(N, n), f"between 1 and D = 16 columns, but has {n}") for n in (0, 17, 32)),
        ("cos", tables(N, 11), "11 columns.*even"),
        *(("rotary_dim", {"rotary_dim": n}, f"even and between 2 and D = 16, but is {n}") for n in (0, -2, 7, 18)),
        *(("cos", {"rotary_dim": 8} | tables(N, n), f"rotary_dim = 8.*4 columns.*{n}") for n in (3, 6)),
        *((name, {name: leaf(N, 8)}, "must not require a gradient") for name in ("cos", "sin")),
        *(("softmax_scale", {"softmax_scale": x}, "finite") for x in (NAN, INF, -INF)),
        *(("softcap", {"softcap": x}, "finite and positive") for x in (NAN, INF, -0.5)),
        *(("window", {"window": x}, f"two elements.*{len(x)}") for x in ((), (1, 2, 3))),
        ("window", {"window": (-2, 0)}, "-1 for unbounded.*-2"),
        *(("sinks", {"sinks": zeros(*n)}, rf"\(HQ,\) with HQ = 4, but has {re.escape(str(n))}")
          for n in ((), (HKV,), (HQ + 1,), (1, HQ))),
        *((name, {name: zeros(*shape, dtype=I32)}, r"\(B,\) with B = 2") for name in ("kv_starts", "kv_lens")
          for shape in ((), (1,), (3,), (2, 1))),
        *((name, {name: zeros(*n, dtype=I32)}, rf"\(1, NK\) with B = 2, NK = 6, but has {re.escape(str(n))}")
          for name in ("query_starts", "query_ends") for n in ((6,), (2, 5), (1, 7), (3, 6))),
        ("query_ends", {"query_ends": zeros(B, N, dtype=I32, device="meta")}, "q's device cpu.*meta"),
        ("backend", {"backend": "cuda"}, "'auto', 'reference', 'triton' or 'hopper'.*'cuda'"),
        ("strategy", {"strategy": "fused"}, "'auto', 'inline' or 'prepass'.*'fused'"),
        ("strategy", {"backend": "reference", "strategy": "inline"}, "reference"),
        ("layout", {"layout": "sbhd"}, "must be 'bhsd' or 'bshd', but is 'sbhd'"),
        ("k_norm", {"q_norm": zeros(D)}, "must be given where q_norm is"),
        ("q_norm", {"q_norm": zeros(8), "k_norm": zeros(D)}, r"must have shape \(D,\)"),
        ("norm_eps", {"q_norm": zeros(D), "k_norm": zeros(D), "norm_eps": -1.0}, "at least 0"),
    ],
    "bshd": [  # in the caller's axes
        ("q", {"q": zeros(2, 9, 64)}, r"must have shape \(B, NQ, HQ, D\), but has 3 dimensions: \(2, 9, 64\)"),
        ("k", {"k": zeros(2, 12, 2, 16, 1)}, r"\(B, NK, HKV, D\), but has 5 dimensions: \(2, 12, 2, 16, 1\)"),
        ("v", {"v": zeros(2, 11, 2, D)}, r"\(B, NK, HKV, D\) with NK = 12 of k, but has \(2, 11, 2, 16\)"),
        ("k", {name: zeros(2, 12, 3, D) for name in "kv"}, "has 3 heads, but q's 4 heads must be a multiple"),
        ("q", {"q": zeros(2, 9, 4, 15), "k": zeros(2, 12, 2, 15), "v": zeros(2, 12, 2, 15)}, "4 heads of 15 columns"),
        ("cos", tables(11, 8), "a row for each of k's 12 positions, but has 11"),
    ],
    "rope_attention_varlen": [
        ("q", {"q": zeros(1, N, HQ, D)}, "T_q, HQ, D.*4 dimensions"),
        ("v", {"v": zeros(N, D)}, "T_k, HKV, D.*2 dimensions"),
        *((name, {name: ENDS.to("meta")}, "device cpu.*meta") for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *(("cu_seqlens_q", {"cu_seqlens_q": x}, rf"\(sequences\+1,\).*{re.escape(str(tuple(x.shape)))}")
          for x in (ENDS[None], ENDS[:0], ENDS[0])),
        ("cu_seqlens_q", {"cu_seqlens_q": ENDS.repeat_interleave(2)[::2]}, "contiguous.*2"),
        ("cu_seqlens_k", {"cu_seqlens_q": ENDS[:2]}, r"\(2,\).*\(3,\)"),
        *((name, {name: -1}, "0 or more.*-1") for name in ("max_seqlen_q", "max_seqlen_k")),
        ("max_seqlen_k", {"max_seqlen_k": 3}, "at least the longest sequence of k, 4, but is 3"),
        ("cos", tables(3, 8), "4 positions.*3 rows"),
        ("q_norm", {"q_norm": zeros(8), "k_norm": zeros(D)}, r"must have shape \(D,\)"),
        *(("cos", {"token_tables": True} | tables(n, 8), f"each of 6 tokens .*, but has {n}") for n in (5, 7)),
        ("k", {"token_tables": True, "q": zeros(N - 1, HQ, D), "cu_seqlens_q": 0 * ENDS}, "q's 5 tokens .*, but has 6"),
        ("cu_seqlens_k", {"token_tables": True, "cu_seqlens_k": 0 * ENDS}, "must equal cu_seqlens_q"),
    ],
    "rope_attention_mla": [
        ("k_rope", {"k_rope": zeros(2, 12, 16)}, r"must have shape \(B, 1, NK, R\), but has 3 dim"),
        ("k_rope", {"k_rope": zeros(2, 3, 12, 16)}, r"\(B, 1, NK, R\), but has \(2, 3, 12, 16\)"),
        ("k_nope", {"k_nope": zeros(2, 2, 12, 32)}, "must have shape .* with H = 3 of q_rope, but has"),
        ("k_nope", {"k_nope": zeros(2, 3, 12, 31)}, "must have shape .* with DN = 32 of q_nope"),
        ("v", {"v": zeros(2, 3, 11, 32)}, "must have shape .* with NK = 12 of k_rope"),
        ("v", {"v": zeros(2, 3, 12, 0)}, "at least one column, but has 0"),
        ("k_rope", {"q_rope": zeros(2, 3, 9, 15)}, "must have shape .* with R = 15 of q_rope"),
        ("sin", {"cos": zeros(12, 5)}, "must have cos's shape"),
        ("cos", tables(9, 8), "a row for each of k_rope's 12 positions"),
        ("q_rope", {"q_rope": zeros(2, 3, 13, 16), "q_nope": zeros(2, 3, 13, 32), "causal": False},
         "must have at most k_rope's 12 positions"),
        ("window", {"window": (1,)}, "must have two elements"),
    ],
    "rope_attention_mla_varlen": [
        ("k_rope", {"k_rope": zeros(1, 12, 1, 16)}, r"must have shape \(T_k, 1, R\), but has 4"),
        ("cu_seqlens_q", {"cu_seqlens_q": ENDS + 1}, "must begin with 0"),
        ("cu_seqlens_k", {"cu_seqlens_k": 3 * ENDS}, "end at or before k_rope's 12 tokens"),
        ("max_seqlen_k", {"max_seqlen_k": 7}, "at least the longest sequence of k_rope, 8"),
        ("cos", {"max_seqlen_k": 13}, "must have a row for each of k_rope's 13 positions"),
    ],
}  # fmt: skip
REFUSALS = [
    pytest.param(function, changes, error, rf"^{name}[ =].*{message}", id=f"{function}-{i}-{name}")
    for error, table in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS))
    for function, rows in table.items()
    for i, (name, changes, message) in enumerate(rows)
]


@pytest.mark.parametrize(("function", "changes", "error", "message"), REFUSALS)
def test_refusals(function, changes, error, message):
    """By the function and by its plan."""
    given, name = CALLS[function] | changes, FUNCTIONS.get(function, function)
    for call in (getattr(package, name), getattr(package, name.replace("rope_attention", "plan"))):
        with pytest.raises(error, match=message):
            call(**given)


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_that_refusals_change_are_legal(function):
    name = FUNCTIONS.get(function, function)
    assert not getattr(package, name)(**CALLS[function]).any()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16),  # half-width
        (tables(1, N, 8), 16),
        (tables(B, N, 16), 16),  # full-width
        (tables(N + 5, 8), 16),
        (tables(N, 1), 2),
        (tables(N, 4), 8),  # W <= D/2: half-width
        (tables(N, 10), 10),  # D/2 < W < D: full-width
        (tables(N, 1) | {"rotary_dim": 2}, 2),
        (tables(N, 2) | {"rotary_dim": 2}, 2),
        (tables(N, 4) | {"rotary_dim": 4}, 4),  # full-width for R <= D/2: only when told so
        (tables(N, 16) | {"rotary_dim": 16}, 16),
        (heads(columns=24) | tables(N, 5), 10),
        # The smallest sizes, and numbers of other types.
        (heads(1, 1, 2) | tables(N, 1), 2),
        (heads(kv=HQ) | tables(N, 8) | {"softmax_scale": np.float32(0.5), "softcap": 50, "window": [4, 0]}, 16),
        ({name: DENSE[name].double() for name in ("q", "k", "v", "cos", "sin")} | {"softmax_scale": 0}, 16),
        ({"q": zeros(B, HQ, N + 1, D), "causal": False, "kv_lens": torch.full((B,), N, dtype=I32)}, 16),
    ],
    ids=lambda x: str(x)[:40],
)
def test_the_rotary_dim_comes_from_the_tables(changes, expected):
    assert check_call(**DENSE | changes) == expected


@pytest.mark.parametrize("lead", [(), (1,), (300,)])
@pytest.mark.parametrize(("width", "rotary_dim"), [(256, None), (512, 512), (150, 300)])
def test_large_calls_pass(lead, width, rotary_dim):
    """Sizes are compared as numbers: none of these is an object that Python keeps only once."""
    q, kv = (zeros(300, n, 900, 512, device="meta") for n in (600, 300))
    given = dict.fromkeys(("cos", "sin"), zeros(*lead, 900, width, device="meta"))
    given |= {"q": q, "k": kv, "v": kv, "sinks": zeros(600, device="meta"), "rotary_dim": rotary_dim}
    starts = zeros(300, dtype=I32, device="meta")
    assert check_call(**given, kv_starts=starts, kv_lens=starts) == (rotary_dim or 512)
    ends = zeros(900, dtype=I32, device="meta")
    packed = {name: given[name][0].transpose(0, 1) for name in "qkv"} | {"cu_seqlens_q": ends, "cu_seqlens_k": ends[:]}
    if lead != (300,):
        assert check_call("thd", longest=(900, 900), **given | packed) == (rotary_dim or 512)
    with pytest.raises(ValueError, match="^k has 7 heads, but q's 600 heads must be a multiple of it"):
        check_call(**given | dict.fromkeys("kv", zeros(300, 7, 900, 512, device="meta")))


def test_one_sequence_of_no_token_is_legal():
    x, ends = zeros(0, 1, 2), zeros(1, dtype=I32)
    given = dict.fromkeys("qkv", x) | tables(0, 1) | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    assert check_call("thd", longest=(0, 0), **given) == 2


def test_no_operator_runs():
    with Record() as record:
        check_call(**DENSE, sinks=zeros(HQ), kv_starts=zeros(B, dtype=I32), window=(2, 0))
    assert all("zeros" in name for name in record.operators)


def test_cu_seqlens_from_position_ids():
    ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]])
    for given, options, expected, longest in (
        (ids, {}, [0, 3, 5, 6, 8, 9, 12], 3),
        (ids[0], {}, [0, 3, 5, 6], 3),
        (ids, {"max_sequences": 8}, [0, 3, 5, 6, 8, 9, 12, 12, 12], 6),
        (ids, {"max_sequences": 2}, [0, 3, 5], 6),  # the rest belongs to none
        (torch.tensor([5, 6, 7, 3, 4]), {}, [0, 3, 5], 3),
        (torch.zeros(1, dtype=I32), {"max_sequences": 1}, [0, 1], 1),
        (torch.zeros(2, 0, dtype=I64), {}, [0], 0),
    ):
        cu, found = cu_seqlens_from_position_ids(given, **options)
        assert cu.tolist() == expected and found == longest and cu.dtype == I32
    for wrong, error in ((ids.float(), TypeError), (ids[None], ValueError), (ids[0, 0], ValueError), ([0], TypeError)):
        with pytest.raises(error, match="^position_ids "):
            cu_seqlens_from_position_ids(wrong)
    for wrong, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="^max_sequences "):
            cu_seqlens_from_position_ids(ids, max_sequences=wrong)
    without_data = torch.zeros(2, 6, dtype=I64, device="meta")
    with pytest.raises(NotImplementedError, match="max_sequences must be given for position_ids on the device meta"):
        cu_seqlens_from_position_ids(without_data)
    cu, longest = cu_seqlens_from_position_ids(without_data, 4)
    assert cu.shape == (5,) and longest == 6
