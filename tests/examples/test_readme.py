"""The examples of README.md run by themselves, and give what they say."""

import re

import torch

from tests.support.paths import ROOT


def test_the_example_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"## Generation\n.*?```python\n(.*?)```", text, re.DOTALL)[1]
    names = {"torch": torch, "device": "cpu"}
    exec(compile(code, "README.md", "exec"), names)
    o, v = names["o"], names["v"]
    assert torch.equal(o, v.repeat_interleave(4, dim=1))  # the new token is all that there is
    assert torch.equal(names["v_cache"][:, :, :1], v) and names["lengths"].tolist() == [1, 1]
