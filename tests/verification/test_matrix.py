"""The verification's cases: every feature, and the shapes of the performance table."""

import torch

from verification.matrix import ATTENTION, CHECKS, SIZES


def test_the_matrix_names_every_feature_once():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {check.size for check in CHECKS} == set(SIZES)
    cases = ATTENTION
    features: dict[str, set] = {
        "causal": {True, False}, "interleaved": {True, False}, "table_batch": {True, False},
        "full_width": {True, False}, "tables": {"rope", "yarn", "random"},
        "layout": {"bnhd", "bhnd", "odd", "expanded"},
        "table_dtype": {torch.float32, torch.float16, torch.bfloat16},
    }  # fmt: skip
    for field, values in features.items():
        assert {getattr(case, field) for case in cases} == values, field
    assert any(case.rotary < case.head_dim for case in cases)
    assert any(case.heads_q > case.heads_kv > 1 for case in cases) and any(case.heads_kv == 1 for case in cases)
    assert any(case.len_q > case.len_k for case in cases) and any(0 < case.len_q < case.len_k for case in cases)
    assert any(check.deterministic for check in cases)
    huge = [check for check in cases if check.size == "huge"]
    for check in huge:
        heads = 130 if check.memory == ("far", "far", "far", "bnhd") else check.heads_q
        assert check.batch * check.len_q * heads * check.head_dim > 2**31


def test_large_shapes_are_those_of_the_performance_table():
    shapes = {(c.batch, c.heads_q, c.heads_kv, c.len_q, c.head_dim) for c in ATTENTION if c.size == "large"}
    assert shapes >= {
        (4, 8, 8, 512, 64), (4, 8, 8, 1024, 64), (2, 32, 32, 2048, 128), (2, 32, 32, 4096, 128),
        (2, 64, 64, 1024, 128), (2, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (1, 8, 8, 65536, 128),
        (1, 4, 4, 131072, 128),
    }  # fmt: skip
