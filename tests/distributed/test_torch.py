"""PyTorch's features: compile, checkpoint, autocast, meshes, gradients that only some ranks have."""

import pytest
import torch

from tests.support import cp_features as features
from tests.support.marks import interpreted

MEMBERS = (0, 1, 2)
FEATURES = ["checkpoint", "layout", "mesh", "two calls in flight", "compile", "compile varlen"]


def same(found):
    for expected, other in found:
        for name, x in expected.items():
            torch.testing.assert_close(other[name], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(ranks, feature):
    same(ranks.results(features.plain_and, MEMBERS, feature, ranks=MEMBERS))


def test_both_methods_agree(ranks):
    same(ranks.results(features.plain_and, (0, 1), "all_to_all", ranks=(0, 1)))


@pytest.mark.parametrize("options", [{}, {"window": (4, 0)}, {"sharding": "contiguous"}], ids=str)
def test_sections_of_heads_are_all_heads(ranks, options):
    members = (0, 1) if options else MEMBERS
    same(ranks.results(features.in_sections, members, options, 1, ranks=members))


@interpreted
def test_kernels_agree_with_the_reference(ranks):
    same(ranks.results(features.plain_and, (0, 1), "interpreter", ranks=(0, 1)))


def test_autocast(ranks):
    assert ranks.results(features.autocast, MEMBERS, ranks=MEMBERS) == [(torch.bfloat16, torch.float32)] * 3


def test_gradients_that_one_rank_has_not(ranks):
    same(ranks.results(features.only_some_use_it, MEMBERS, ranks=MEMBERS))


@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
def test_lse_that_one_rank_uses(ranks, method):
    same(ranks.results(features.only_some_use_lse, (0, 1), method, ranks=(0, 1)))


def test_only_values_need_gradients(ranks):
    for found in ranks.results(features.only_values_need_gradients, MEMBERS, ranks=MEMBERS):
        assert found["dv"].isfinite().all() and found["dv"].abs().sum() > 0


def test_double_backward_is_refused(ranks):
    for message in ranks.results(features.double_backward, MEMBERS, ranks=MEMBERS):
        assert "double backward" in message


def test_forward_mode_is_refused_on_every_rank(ranks):
    for message in ranks.results(features.forward_mode, MEMBERS, ranks=MEMBERS):
        assert "rope_attention_cp: forward-mode differentiation" in message


@pytest.mark.parametrize("total", [23, 13, 8, 0])
def test_rows_that_do_not_exist_hold_anything(ranks, total):
    for found in ranks.results(features.poisoned, MEMBERS, total, ranks=MEMBERS):
        for name, x in found.items():
            assert x.isfinite().all(), name


def test_repeats_have_the_same_bits(ranks):
    assert ranks.results(features.repeats, (0, 1, 2, 3)) == [[True] * 4] * 4


def test_plans(ranks):
    def plan(*arguments):
        return ranks.results(features.planned, (0, 1), *arguments, ranks=(1,))[0]

    method, reason = plan(8, 65536, {})
    assert method == "all_gather" and "TFLOP" in reason
    assert plan(1, 1024, {}) == ("all_gather", "k's 1 heads are no multiple of 2 ranks")
    # All ranks' work is the last rank's where a causal sequence is cut in two.
    assert plan(8, 65536, {"sharding": "contiguous"})[0] == "all_to_all"
    assert plan(8, 1024, {"method": "all_to_all"}) == ("all_to_all", "asked for")
