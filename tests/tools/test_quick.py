"""``make quick`` runs the tests of the changed files."""

from tools import quick


def test_tests_are_those_of_the_subject_and_of_what_imports_it():
    found = quick.tests_of(["fused_rope_attn/attention/validation.py", "README.md", "tests/attention/test_planning.py"])
    assert found[0] == "tests/attention/test_planning.py" and "tests/attention/test_validation.py" in found
    assert "tests/docs/test_pages.py" in found and found[-1] == "tests/test_imports.py"
    assert not any(test.endswith("_gpu.py") or test.startswith("tests/bench/") for test in found)
    assert "tests/kernels/test_masks.py" in quick.tests_of(["fused_rope_attn/kernels/masks.py"])
    assert quick.tests_of(["fused_rope_attn/__init__.py"]) == ["tests/test_imports.py"]
