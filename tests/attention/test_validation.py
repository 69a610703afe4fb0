"""Every refusal of the public functions: the documented type, the argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import cu_seqlens_from_position_ids
from tests.support.internals import forget_warnings
from verification.testing import Case, make_inputs, run_op

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


ENDS = torch.tensor([0, 2, N], dtype=I32)
DENSE = heads() | tables(N, D // 2) | {"causal": True}
LATENT = {"q_nope": zeros(2, 3, 9, 32), "q_rope": zeros(2, 3, 9, 16), "k_nope": zeros(2, 3, 12, 32)}
LATENT |= {"k_rope": zeros(2, 1, 12, 16), "v": zeros(2, 3, 12, 32)} | tables(12, 8)
PACK = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 4, "max_seqlen_k": 4}
CALLS = {
    "rope_attention": DENSE,
    "rope_attention_varlen": {"q": zeros(N, HQ, D), "k": zeros(N, HKV, D), "v": zeros(N, HKV, D)} | tables(N, 8) | PACK,
    "rope_attention_mla": LATENT,
    "rope_attention_mla_varlen": {name: x if name in ("cos", "sin") else x[0].transpose(0, 1)
                                  for name, x in LATENT.items()}
    | {"cu_seqlens_q": ENDS, "cu_seqlens_k": 2 * ENDS, "max_seqlen_q": 4, "max_seqlen_k": 8},
}  # fmt: skip
WITHOUT = {"cos": None, "sin": None}

# By function: the argument at fault, what is changed, and the rest of the message. A row for each wording and for each
# limit: tests/verification/test_run.py makes every argument wrong in every way, and checks that it is named. Those of
# ``Forms`` are in tests/runtime/test_checks.py.
TYPE_ERRORS = {
    "rope_attention": [
        ("sin", {"sin": 1.0}, "must be a torch.Tensor, but is float 1.0"),
        ("k", to(F16, "k"), "must have q's dtype float32, but is float16"),
        ("causal", {"causal": 1}, "must be a bool, but is int 1"),
        *((name, {name: 1}, "must be a bool") for name in ("batch_invariant", "return_max_logit")),
        ("cos", to(F16, "q", "k", "v") | tables(N, 8, dtype=F64), "float32 or have q's dtype float16, but is float64"),
        ("sin", {"sin": zeros(N, 8, dtype=F16)}, "must have cos's dtype float32, but is float16"),
        ("rotary_dim", {"rotary_dim": 16.0}, "must be an int or None, but is float 16.0"),
        ("softmax_scale", {"softmax_scale": "1"}, "must be a float or None, but is str '1'"),
        ("softcap", {"softcap": torch.tensor(0.0)}, "must be a float, but is torch.Tensor"),
        ("window", {"window": 128}, "must be a tuple .* or None, but is int 128"),
        ("window", {"window": (0, True)}, "must hold two ints, but holds bool True"),
        ("sinks", {"sinks": zeros(HQ, dtype=I64)} | to(F16, "q", "k", "v"), "must be float32 or float16, but is int64"),
        ("strategy", {"strategy": 0}, "must be a str, 'auto', 'inline' or 'prepass', but is int 0"),
    ],
    "rope_attention_varlen": [
        ("token_tables", {"token_tables": 1}, "must be a bool, but is int 1"),
        (r"rope_attention_varlen\(\)", {"kv_lens": None}, "does not take 'kv_lens'"),
    ],
    "rope_attention_mla": [
        *((r"rope_attention_mla\(\)", {name: None}, f"does not take '{name}'")
          for name in ("sinks", "strategy", "return_max_logit")),
    ],
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
VALUE_ERRORS = {
    "rope_attention": [
        *(("k", heads(q, kv), f"has {kv} heads, but q's {q} heads must be a multiple of it")
          for q, kv in ((32, 6), (4, 8), (4, 0))),
        *(("q", heads(q, 2, n), f"at least one head and an even head dim .* 2, but has {q} heads of {n} columns")
          for q, n in ((0, 16), (4, 17), (4, 0))),
        ("q", {"q": zeros(B, HQ, N + 1, D), "causal": False},
         "at most k's 6 positions where causal is False, but has 7.*did you mean layout='bshd'"),
        ("sin", {"sin": zeros(N, 8).to("meta")}, "must be on q's device cpu, but is on meta"),
        *(("cos", tables(*n), rf"\(S, R/2\) or \(S, R\), .* 1 or B = 2, but has {re.escape(str(n))}")
          for n in ((8,), (1, 1, N, 8), (3, N, 8))),
        *(("sin", {"sin": zeros(*n)}, r"must have cos's shape \(6, 8\)") for n in ((N, D), (1, N, D // 2))),
        *(("cos", tables(*lead, N - 1, 8), "a row for each of k's 6 positions, but has 5") for lead in ((), (1,))),
        *(("cos", tables(N, n), f"between 1 and D = 16 columns, but has {n}") for n in (0, 17)),
        ("cos", tables(N, 11), "with 11 columns is full-width for D = 16, and .* even"),
        *(("rotary_dim", {"rotary_dim": n}, f"even and between 2 and D = 16, but is {n}") for n in (0, 7, 18)),
        *(("cos", {"rotary_dim": 8} | tables(N, n), f"= 8 or rotary_dim / 2 = 4 columns, but has {n}") for n in (3, 6)),
        *((name, {name: zeros(N, 8).requires_grad_()}, f"must not require a gradient: .* {name}.detach")
          for name in ("cos", "sin")),
        *(("softmax_scale", {"softmax_scale": x}, "must be finite, but is") for x in (NAN, INF, -INF)),
        ("softcap", {"softcap": -0.5}, "must be finite and positive, .* but is -0.5"),
        ("norm_eps", {"q_norm": zeros(D), "k_norm": zeros(D), "norm_eps": -1.0}, "must be at least 0 and finite"),
        *(("window", {"window": x}, rf"two elements \(left, right\), but has {len(x)}") for x in ((), (1, 2, 3))),
        ("window", {"window": (0, -2)}, r"-1 for unbounded, but is \(0, -2\)"),
        ("sinks", {"sinks": zeros()}, r"\(HQ,\) with HQ = 4, but has \(\)"),
        *(("query_ends", {"query_ends": zeros(*n, dtype=I32)}, rf"or \(1, NK\) .*NK = 6, but has {re.escape(str(n))}")
          for n in ((6,), (3, 6))),
        ("backend", {"backend": "cuda"}, "must be 'auto', 'reference', 'triton' or 'hopper', but is 'cuda'"),
        ("strategy", {"backend": "reference", "strategy": "inline"}, "selects among kernels, but backend='reference'"),
        # In the caller's axes.
        ("v", {"layout": "bshd", "q": zeros(2, 9, 4, D), "k": zeros(2, 12, 2, D), "v": zeros(2, 11, 2, D)},
         r"\(B, NK, HKV, D\) with NK = 12 of k, but has \(2, 11, 2, 16\)"),
        ("k_norm", {"q_norm": zeros(D)}, "must be given where q_norm is, or neither, but is None"),
        *((name, {name: None}, f"must be given where {other} is") for name, other in (("cos", "sin"), ("sin", "cos"))),
        *((name, WITHOUT | {name: x}, f"must be {other}, because nothing is rotated .*, but is {x}")
          for name, x, other in (("rotary_dim", 16, None), ("interleaved", True, False))),
    ],
    "rope_attention_varlen": [
        ("token_tables", WITHOUT | {"token_tables": True}, "must be False where cos and sin are None, but is True"),
        *(("cu_seqlens_q", {"cu_seqlens_q": x}, rf"\(sequences\+1,\).*{re.escape(str(tuple(x.shape)))}")
          for x in (ENDS[None], ENDS[:0])),
        ("cu_seqlens_q", {"cu_seqlens_q": ENDS.repeat_interleave(2)[::2]}, "must be contiguous, but has stride 2"),
        ("cu_seqlens_k", {"cu_seqlens_q": ENDS[:2]}, r"must have cu_seqlens_q's shape \(2,\), but has \(3,\)"),
        *((name, {name: -1}, "must be 0 or more, but is -1") for name in ("max_seqlen_q", "max_seqlen_k")),
        *((name, {name: torch.tensor(ends, dtype=I32)}, words) for name in ("cu_seqlens_q", "cu_seqlens_k")
          for ends, words in (([3, 3, 6], "must begin with 0, but begins with 3"),
                              ([0, 5, 2], "must never fall, but 2 follows 5"),
                              ([0, 2, 7], "must end at or before .*'s 6 tokens, but ends at 7"))),
        ("max_seqlen_k", {"max_seqlen_k": 3, "max_seqlen_q": 1}, "at least the longest sequence of k, 4, but is 3"),
        *(("cos", {"token_tables": True} | tables(n, 8), f"each of 6 tokens .*, but has {n}") for n in (5, 7)),
        ("k", {"token_tables": True, "q": zeros(N - 1, HQ, D), "cu_seqlens_q": 0 * ENDS}, "q's 5 tokens .*, but has 6"),
        ("cu_seqlens_k", {"token_tables": True, "cu_seqlens_k": 0 * ENDS}, "must equal cu_seqlens_q"),
    ],
    "rope_attention_mla": [
        ("k_rope", {"k_rope": zeros(2, 12, 16)}, r"must have shape \(B, 1, NK, R\), but has 3 dim"),
        *((name, {x: zeros(2, 3, 9 if x == "q_nope" else 12, 0) for x in names}, "at least one column, but has 0")
          for name, names in (("v", ["v"]), ("q_nope", ["q_nope", "k_nope"]))),
        ("q_rope", {"q_rope": zeros(2, 3, 13, 16), "q_nope": zeros(2, 3, 13, 32), "causal": False},
         "must have at most k_rope's 12 positions"),
        ("cos", tables(9, 8), "a row for each of k_rope's 12 positions"),
    ],
    "rope_attention_mla_varlen": [
        ("cu_seqlens_k", {"cu_seqlens_k": 3 * ENDS}, "end at or before k_rope's 12 tokens"),
        ("max_seqlen_k", {"max_seqlen_k": 7}, "at least the longest sequence of k_rope, 8"),
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
    for name in (function, function.replace("rope_attention", "plan")):
        with pytest.raises(error, match=message):
            getattr(package, name)(**CALLS[function] | changes)


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_that_refusals_change_are_legal(function):
    assert not getattr(package, function)(**CALLS[function]).any()


def test_numbers_of_other_types():
    numbers = {"softmax_scale": np.float32(0.5), "softcap": 50, "window": [4, 0]}
    assert not package.rope_attention(**DENSE | numbers).any()


def test_cu_seqlens_from_position_ids():
    ids, without_data = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]]), zeros(2, 6, dtype=I64, device="meta")
    for given, most, expected, longest in (
        (ids, None, [0, 3, 5, 6, 8, 9, 12], 3),
        (ids[0], None, [0, 3, 5, 6], 3),
        (ids, 8, [0, 3, 5, 6, 8, 9, 12, 12, 12], 6),
        (ids, 2, [0, 3, 5], 6),  # the rest belongs to none
        (torch.tensor([5, 6, 7, 3, 4]), None, [0, 3, 5], 3),
        (zeros(1, dtype=I32), 1, [0, 1], 1),
        (zeros(2, 0, dtype=I64), None, [0], 0),
    ):
        cu, found = cu_seqlens_from_position_ids(given, most)
        assert cu.tolist() == expected and found == longest and cu.dtype == I32
    cu, longest = cu_seqlens_from_position_ids(without_data, 4)
    assert cu.shape == (5,) and longest == 6
    for given, error, message in (
        *(((x,), TypeError, "position_ids must be") for x in (ids.float(), [0])),
        *(((x,), ValueError, r"position_ids must have shape \(N,\) or \(B, N\)") for x in (ids[None], ids[0, 0])),
        *(((ids, x), TypeError, "max_sequences must be an int or None") for x in (True, 2.0)),
        ((ids, 0), ValueError, "max_sequences must be 1 or more, but is 0"),
        ((without_data,), NotImplementedError, "max_sequences must be given for position_ids on the device meta"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            cu_seqlens_from_position_ids(*given)


# A caller who passes (B, N, H, D) with 5 tokens, 8 heads and 2 key heads appears to have these sizes.
MORE_QUERIES = Case(2, 5, 5, 8, 2, 16, dtype=torch.float32)


@pytest.mark.parametrize(("layout", "other"), [("bhsd", "bshd"), ("bshd", "bhsd")])
def test_more_queries_than_keys_are_said_once(layout, other):
    """With the caller's shapes and line, since tensors in a mistaken layout look like it."""
    forget_warnings()
    q, k, v, cos, sin, _ = make_inputs(MORE_QUERIES)
    q, k, v = (x if layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v))
    with pytest.warns(UserWarning) as heard:
        for _ in range(3):
            package.plan(q, k, v, cos, sin, True, layout=layout)
    (warning,) = heard
    assert warning.filename == __file__
    assert str(warning.message) == (
        f"q {tuple(q.shape)} has 8 positions and k {tuple(k.shape)} has 2 in layout '{layout}': queries are aligned "
        f"with the end of the keys, so that the first 6 rows see no key and give zeros; did you mean layout='{other}'?"
    )


@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("error:q .* positions and k:UserWarning")
def test_nothing_is_said_of_more_queries_that_are_meant():
    forget_warnings()
    torch._dynamo.reset()
    q, k, v, cos, sin, _ = inputs = make_inputs(MORE_QUERIES)
    package.rope_attention(q, k, v, cos, sin, True, kv_lens=torch.tensor([2, 1], dtype=torch.int32))
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = (torch.tensor([0, n], dtype=torch.int32) for n in (8, 2))
    package.rope_attention_varlen(*packed, cos, sin, *ends, 8, 2, True)
    package.rope_attention(q[:, :, :2], k, v, cos, sin, True)
    torch.compile(package.rope_attention, fullgraph=True, backend="eager")(q, k, v, cos, sin, True)
    run_op(inputs, MORE_QUERIES, backend="reference")  # how verification and the benchmark's gate call
