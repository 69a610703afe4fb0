"""Facts of the machine and the tree in every row."""

import json

from bench.environment import RESULTS, ROOT, commit, environment


def test_environment_is_complete():
    facts = environment()
    assert {"gpu", "driver", "torch", "cuda", "cudnn", "triton", "packages", "commit", "date"} == set(facts)
    json.dumps(facts)


def test_commit_comes_from_the_environment_where_it_is_said_there(monkeypatch, tmp_path):
    """Also in a repository: a tree copied to another machine may bring an older one along."""
    monkeypatch.setenv("FUSED_ROPE_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
    monkeypatch.delenv("FUSED_ROPE_COMMIT")
    assert commit() != "0123abcd"
    monkeypatch.setattr("bench.environment.ROOT", tmp_path)
    assert commit() == "unknown"


def test_results_folder_is_inside_the_repository():
    assert RESULTS.is_relative_to(ROOT)
