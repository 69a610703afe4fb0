"""The faster search of Triton's interpreter changes nothing else."""

import inspect

import pytest
import triton.language as tl

from fused_rope_attn.runtime.device import is_interpreted


def builtins(package):
    return {name: member for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)}


@pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")
def test_every_builtin_is_replaced_and_comes_back():
    from triton.runtime import interpreter

    from verification.interpreter import PACKAGES

    assert interpreter._patch_builtin.__module__ == "verification.interpreter"
    before = [builtins(package) for package in PACKAGES]
    assert all(before) and {"load", "dot"} <= before[0].keys()
    scope = interpreter._LangPatchScope()
    for package in PACKAGES:
        interpreter._patch_builtin(package, interpreter.interpreter_builder, scope)
    assert not any(builtins(package) for package in PACKAGES)
    scope.restore()
    assert [builtins(package) for package in PACKAGES] == before
