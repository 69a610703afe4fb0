"""Every refusal: the documented type, and a message that names the argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch

from fused_rope_attn.attention.validation import check_position_ids
from tests.support.internals import check_call

B, HQ, HKV, N, D = 2, 4, 2, 6, 16


def arguments(**changes):
    """A valid call, changed. q (2, 4, 6, 16) float32, k and v (2, 2, 6, 16), tables (6, 8)."""
    valid = {
        "q": torch.zeros(B, HQ, N, D),
        "k": torch.zeros(B, HKV, N, D),
        "v": torch.zeros(B, HKV, N, D),
        "cos": torch.zeros(N, D // 2),
        "sin": torch.zeros(N, D // 2),
        "causal": True,
        "softmax_scale": None,
        "rotary_dim": None,
        "interleaved": False,
        "window": None,
        "softcap": 0.0,
        "sinks": None,
        "kv_starts": None,
        "kv_lens": None,
        "return_lse": False,
        "deterministic": False,
        "backend": "auto",
        "strategy": "auto",
    }
    assert set(changes) <= set(valid)
    return valid | changes


def both(**shape_or_dtype):
    """cos and sin alike."""
    table = torch.zeros(shape_or_dtype.get("shape", (N, D // 2)), dtype=shape_or_dtype.get("dtype", torch.float32))
    return {"cos": table, "sin": table.clone()}


def heads(q=HQ, kv=HKV, head_dim=D):
    return {
        "q": torch.zeros(B, q, N, head_dim),
        "k": torch.zeros(B, kv, N, head_dim),
        "v": torch.zeros(B, kv, N, head_dim),
    }


def halves(*names):
    return {name: arguments()[name].half() for name in names}


meta = torch.device("meta")
i32 = torch.int32
TYPE_ERRORS = [
    *((name, {name: None}, "Tensor.*NoneType") for name in ("q", "k", "v", "cos", "sin")),
    ("q", {"q": [[1.0]]}, "Tensor.*list"),
    ("cos", {"cos": np.zeros((6, 8), dtype=np.float32)}, "Tensor.*ndarray"),
    *((name, {name: 1}, "bool.*int 1") for name in ("causal", "interleaved", "return_lse", "deterministic")),
    ("causal", {"causal": None}, "bool.*NoneType"),
    ("causal", {"causal": torch.tensor(True)}, "bool.*Tensor"),
    ("q", {name: arguments()[name].int() for name in ("q", "k", "v")}, "float16, bfloat16 or float32.*int32"),
    ("q", {name: arguments()[name].to(torch.complex64) for name in ("q", "k", "v")}, "complex64"),
    ("k", halves("k"), "float32.*float16"),
    ("v", halves("v"), "float32.*float16"),
    ("k", halves("q"), "float16.*float32"),
    ("cos", both(dtype=torch.float16), "float32.*float16"),
    ("cos", halves("q", "k", "v") | both(dtype=torch.bfloat16), "float32 or .*float16.*bfloat16"),
    ("cos", both(dtype=torch.float64), "float32.*float64"),
    ("cos", both(dtype=torch.int64), "float32.*int64"),
    ("sin", {"sin": torch.zeros(N, D // 2, dtype=torch.float16)}, "float32.*float16"),
    ("rotary_dim", {"rotary_dim": 16.0}, "int.*float 16.0"),
    ("rotary_dim", {"rotary_dim": True}, "int.*bool"),
    ("rotary_dim", {"rotary_dim": "16"}, "int.*str '16'"),
    ("softmax_scale", {"softmax_scale": "1"}, "float.*str"),
    ("softmax_scale", {"softmax_scale": True}, "float.*bool"),
    ("softmax_scale", {"softmax_scale": torch.tensor(1.0)}, "float.*Tensor"),
    ("softmax_scale", {"softmax_scale": 1j}, "float.*complex"),
    ("softcap", {"softcap": None}, "float.*NoneType"),
    ("softcap", {"softcap": "30"}, "float.*str"),
    ("softcap", {"softcap": False}, "float.*bool"),
    ("softcap", {"softcap": torch.tensor(0.0)}, "float.*Tensor"),
    ("window", {"window": 128}, "tuple.*int 128"),
    ("window", {"window": (128.0, 0)}, "two ints.*float 128.0"),
    ("window", {"window": (4, None)}, "two ints.*NoneType"),
    ("window", {"window": (True, 0)}, "two ints.*bool"),
    ("sinks", {"sinks": [0.0] * HQ}, "Tensor.*list"),
    ("sinks", {"sinks": torch.zeros(HQ, dtype=torch.float16)}, "float32.*float16"),
    ("sinks", {"sinks": torch.zeros(HQ, dtype=torch.int64)}, "float32.*int64"),
    *((name, {name: [0, 0]}, "Tensor.*list") for name in ("kv_starts", "kv_lens")),
    *((name, {name: torch.zeros(B, dtype=torch.int64)}, "int32.*int64") for name in ("kv_starts", "kv_lens")),
    ("kv_lens", {"kv_lens": torch.zeros(B)}, "int32.*float32"),
    ("backend", {"backend": None}, "str.*NoneType"),
    ("strategy", {"strategy": 0}, "str.*int 0"),
]

VALUE_ERRORS = [
    *((name, {name: arguments()[name][0]}, "3 dimensions") for name in ("q", "k", "v")),
    *((name, {name: arguments()[name][..., None]}, "5 dimensions") for name in ("q", "k", "v")),
    ("k", {"k": torch.zeros(1, HKV, N, D)}, "B = 2 of q.*" + re.escape("(1, 2, 6, 16)")),
    ("v", {"v": torch.zeros(1, HKV, N, D)}, "shape"),
    ("k", {"k": torch.zeros(B, HKV, N, 8)}, "D = 16 of q.*" + re.escape("(2, 2, 6, 8)")),
    *(("k", {x: torch.zeros(size, HKV, N, D) for x in "kv"}, rf"B = 2 of q.*\({size}, ") for size in (1, 3)),
    *(("k", {x: torch.zeros(B, HKV, N, size) for x in "kv"}, rf"D = 16 of q.*, {size}\)") for size in (8, 24)),
    ("v", {"v": torch.zeros(B, HKV, N, 8)}, "D = 16 of q.*" + re.escape("(2, 2, 6, 8)")),
    ("v", {"v": torch.zeros(B, HKV, N + 1, D)}, "NK = 6 of k.*" + re.escape("(2, 2, 7, 16)")),
    ("v", {"v": torch.zeros(B, HQ, N, D)}, "HKV = 2 of k.*" + re.escape("(2, 4, 6, 16)")),
    ("k", heads(32, 6), "has 6 heads, but q's 32 heads must be a multiple of it"),
    ("k", heads(4, 8), "has 8 heads, but q's 4 heads"),
    ("k", heads(4, 0), "has 0 heads"),
    ("q", heads(0, 2), "at least one head"),
    ("q", heads(head_dim=17) | both(shape=(N, 8)), "even head dim.*17"),
    ("q", heads(head_dim=0) | both(shape=(N, 0)), "head dim.*0"),
    ("q", {"q": torch.zeros(B, HQ, N + 1, D), "causal": False}, "at most k's 6 positions.*7"),
    *((name, {name: arguments()[name].to(meta)}, "device cpu.*meta") for name in ("k", "v", "cos", "sin")),
    ("sinks", {"sinks": torch.zeros(HQ, device=meta)}, "device cpu.*meta"),
    *((n, {n: torch.zeros(B, dtype=i32, device=meta)}, "device cpu.*meta") for n in ("kv_starts", "kv_lens")),
    ("cos", both(shape=(8,)), re.escape("(8,)")),
    ("cos", both(shape=(1, 1, N, 8)), re.escape("(1, 1, 6, 8)")),
    ("cos", both(shape=(3, N, 8)), "B = 2.*" + re.escape("(3, 6, 8)")),
    ("sin", {"sin": torch.zeros(N, D)}, re.escape("(6, 8)") + ".*" + re.escape("(6, 16)")),
    ("sin", {"sin": torch.zeros(1, N, D // 2)}, re.escape("(1, 6, 8)")),
    ("cos", both(shape=(N - 1, 8)), "6 positions.*5 rows"),
    ("cos", both(shape=(1, N - 1, 8)), "6 positions.*5 rows"),
    ("cos", both(shape=(N, 17)), "between 1 and D = 16.*17"),
    ("cos", both(shape=(N, 32)), "between 1 and D = 16.*32"),
    ("cos", both(shape=(N, 0)), "between 1 and D = 16.*0"),
    ("cos", both(shape=(N, 11)), "11 columns.*even"),
    ("rotary_dim", {"rotary_dim": 0}, "between 2 and D = 16.*0"),
    ("rotary_dim", {"rotary_dim": -2}, "between 2 and D = 16.*-2"),
    ("rotary_dim", {"rotary_dim": 7}, "even.*7"),
    ("rotary_dim", {"rotary_dim": 18}, "D = 16.*18"),
    ("cos", {"rotary_dim": 8} | both(shape=(N, 6)), "rotary_dim = 8.*4 columns.*6"),
    ("cos", {"rotary_dim": 8} | both(shape=(N, 3)), "rotary_dim = 8.*4 columns.*3"),
    ("cos", {"rotary_dim": 4}, "rotary_dim = 4.*8"),
    ("cos", {"cos": torch.zeros(N, D // 2, requires_grad=True)}, "gradient"),
    ("sin", {"sin": torch.zeros(N, D // 2, requires_grad=True)}, "gradient"),
    *(("softmax_scale", {"softmax_scale": x}, "finite") for x in (float("nan"), float("inf"), -float("inf"))),
    *(("softcap", {"softcap": x}, "finite and positive") for x in (float("nan"), float("inf"), -1.0, -0.5)),
    ("window", {"window": (1, 2, 3)}, "two elements.*3"),
    ("window", {"window": ()}, "two elements.*0"),
    ("window", {"window": (-2, 0)}, "-1 for unbounded.*-2"),
    ("sinks", {"sinks": torch.zeros(HKV)}, re.escape("(HQ,) with HQ = 4") + ".*" + re.escape("(2,)")),
    *(("sinks", {"sinks": torch.zeros(shape)}, re.escape(str(shape))) for shape in ((), (HQ + 1,), (1, HQ), (HQ, 1))),
    *(
        (name, {name: torch.zeros(shape, dtype=i32)}, re.escape("(B,) with B = 2"))
        for name in ("kv_starts", "kv_lens")
        for shape in ((), (1,), (3,), (2, 1))
    ),
    ("backend", {"backend": "cuda"}, "'auto', 'reference', 'triton' or 'hopper'.*'cuda'"),
    ("strategy", {"strategy": "fused"}, "'auto', 'inline' or 'prepass'.*'fused'"),
]


def refusals(rows):
    return [pytest.param(*row, id=f"{i}-{row[0]}") for i, row in enumerate(rows)]


@pytest.mark.parametrize(("name", "changes", "pattern"), refusals(TYPE_ERRORS))
def test_type_errors(name, changes, pattern):
    with pytest.raises(TypeError, match=rf"^{name} .*{pattern}"):
        check_call(**arguments(**changes))


@pytest.mark.parametrize(("name", "changes", "pattern"), refusals(VALUE_ERRORS))
def test_value_errors(name, changes, pattern):
    with pytest.raises(ValueError, match=rf"^{name} .*{pattern}"):
        check_call(**arguments(**changes))


@pytest.mark.parametrize(("name", "changes", "pattern"), refusals(TYPE_ERRORS + VALUE_ERRORS))
def test_the_public_functions_refuse_the_same(name, changes, pattern):
    import fused_rope_attn

    given = arguments(**changes)
    tensors = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    for function in (fused_rope_attn.rope_attention, fused_rope_attn.plan):
        with pytest.raises((TypeError, ValueError), match=rf"^{name} .*{pattern}"):
            function(**given)
    for key, value in tensors.items():
        assert value.device == meta or torch.equal(given[key], value), f"{key} was modified"


def table(width, *lead):
    return both(shape=(*lead, N, width))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16),  # half-width
        (table(16), 16),  # full-width
        (table(8, 1), 16),
        (table(8, B), 16),
        (table(16, B), 16),
        (both(shape=(N + 5, 8)), 16),
        (table(1), 2),
        (table(4), 8),  # W <= D/2: half-width
        (table(10), 10),  # D/2 < W < D: full-width
        (table(1) | {"rotary_dim": 2}, 2),
        (table(2) | {"rotary_dim": 2}, 2),
        (table(4) | {"rotary_dim": 8}, 8),
        (table(4) | {"rotary_dim": 4}, 4),  # full-width for R <= D/2: only when told so
        (table(16) | {"rotary_dim": 16}, 16),
        (table(8) | {"rotary_dim": 8}, 8),
        (table(10) | {"rotary_dim": 10}, 10),
        (heads(head_dim=24) | table(5), 10),
    ],
    ids=str,
)
def test_the_rotary_dim_comes_from_the_tables(changes, expected):
    assert check_call(**arguments(**changes)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        halves("q", "k", "v"),
        halves("q", "k", "v") | both(dtype=torch.float16),
        {name: arguments()[name].double() for name in ("q", "k", "v", "cos", "sin")},
        {name: arguments()[name].double() for name in ("q", "k", "v")},
        {"q": torch.zeros(B, HQ, 1, D)},
        {"causal": False},
        {"q": torch.zeros(B, HQ, N + 3, D)},  # causal: rows before position 0 see nothing
        {"q": torch.zeros(B, HQ, 0, D), "causal": False},
        {"q": torch.zeros(B, HQ, N + 1, D), "causal": False, "kv_lens": torch.full((B,), N, dtype=i32)},
        {"k": torch.zeros(B, HKV, 0, D), "v": torch.zeros(B, HKV, 0, D)} | both(shape=(0, 8)),
        {name: arguments()[name][:0] for name in ("q", "k", "v")},
        {name: arguments()[name][:0] for name in ("q", "k", "v")} | both(shape=(0, N, 8)),
        {"q": torch.zeros(B, N, HQ, D).transpose(1, 2)},
        {"q": torch.zeros(1, 1, 1, D).expand(B, HQ, N, D)},
        {"q": torch.zeros(B, HQ, N, D, requires_grad=True)},
        *({"softmax_scale": x} for x in (0, 0.0, -1.5, 1, np.float32(0.5), np.float64(2.0))),
        *({"softcap": x} for x in (0, 0.5, 30.0, 50)),
        *({"window": x} for x in ((0, 0), (-1, -1), [4, 0])),
        {"sinks": torch.zeros(HQ)},
        halves("q", "k", "v") | {"sinks": torch.zeros(HQ, dtype=torch.float16, requires_grad=True)},
        {"kv_starts": torch.zeros(B, dtype=i32), "kv_lens": torch.zeros(B, dtype=i32)},
        {"backend": "hopper", "strategy": "prepass", "deterministic": True, "return_lse": True, "interleaved": True},
    ],
)
def test_valid_calls_pass(changes):
    assert check_call(**arguments(**changes)) == 16


@pytest.mark.parametrize("lead", [(), (1,), (300,)])
@pytest.mark.parametrize(("width", "rotary_dim"), [(256, None), (512, None), (512, 512), (300, 300), (150, 300)])
def test_large_calls_pass(lead, width, rotary_dim):
    """Sizes are compared as numbers: none of these is an object that Python keeps only once."""
    q, kv = (torch.empty(300, n, 900, 512, device=meta) for n in (600, 300))
    table = torch.empty(*lead, 900, width, device=meta)
    options = {name: torch.empty(300, dtype=i32, device=meta) for name in ("kv_starts", "kv_lens")}
    options |= {"sinks": torch.empty(600, device=meta), "rotary_dim": rotary_dim, "causal": False}
    given = arguments(q=q, k=kv, v=kv, cos=table, sin=table, **options)
    assert check_call(**given) == (rotary_dim or 512)
    ends = torch.empty(900, dtype=i32, device=meta)
    assert check_call(**given | {"kv_lens": None}, rows=900) == (rotary_dim or 512)
    packed = {name: x[0].transpose(0, 1) for name, x in (("q", q), ("k", kv), ("v", kv))}
    packed |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends[:], "kv_starts": None, "kv_lens": None}
    if lead != (300,):
        assert check_call("thd", longest=(900, 900), **given | packed) == (rotary_dim or 512)


def test_messages_of_large_calls():
    q, k, v = (torch.empty(300, heads, 900, 512, device=meta) for heads in (600, 7, 7))
    table = torch.empty(900, 256, device=meta)
    with pytest.raises(ValueError, match="^k has 7 heads, but q's 600 heads must be a multiple of it"):
        check_call(**arguments(q=q, k=k, v=v, cos=table, sin=table))


def test_the_smallest_calls_pass():
    """One sequence of no token, one position id, two columns."""
    x, ends = torch.zeros(0, 1, 2), torch.zeros(1, dtype=i32)
    tables = both(shape=(0, 1))
    packed = arguments(q=x, k=x, v=x, **tables) | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    assert check_call("thd", longest=(0, 0), **packed) == 2
    check_position_ids(torch.zeros(1, dtype=torch.int32), 1)
    small = {name: torch.zeros(1, 1, 1, 2) for name in ("q", "k", "v")} | both(shape=(1, 1))
    assert check_call(**arguments(**small)) == 2
    # Packed sequences have their positions from max_seqlen_k; more queries than keys belong to several sequences.
    longer = {"q": torch.zeros(B, HQ, N + 1, D), "causal": False}
    assert check_call(**arguments(**longer, **both(shape=(3, 8))), rows=3) == 16


@pytest.mark.unpoisoned
def test_traces_with_dynamic_shapes():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def run(q, k, v, cos, sin, lens):
        rotary_dim = check_call(
            q=q,
            k=k,
            v=v,
            cos=cos,
            sin=sin,
            causal=True,
            softmax_scale=0.5,
            window=(3, 0),
            softcap=2.0,
            kv_lens=lens,
            return_lse=True,
        )
        return q * rotary_dim

    for n in (5, 7, 12):
        q, k = torch.ones(B, HQ, n, D), torch.ones(B, HKV, n, D)
        cos = torch.ones(n + 2, D // 2)
        assert bool((run(q, k, k.clone(), cos, cos.clone(), torch.full((B,), n, dtype=i32)) == 16).all())
    assert counter.frame_count == 1


def test_nothing_is_allocated_on_the_happy_path():
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoOperator(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"validation ran {function}")

    given = arguments(
        sinks=torch.zeros(HQ), kv_starts=torch.zeros(B, dtype=i32), kv_lens=torch.zeros(B, dtype=i32), window=(2, 0)
    )
    with NoOperator():
        check_call(**given)
