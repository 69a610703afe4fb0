"""README.md, and the other pages at the top: the example is right, links lead somewhere, named commands exist.

Its figures are checked against their rows by the tests of ``bench``; that its snippets run, by ``test_snippets``.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import __main__ as bench
from verification import __main__ as verification

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert len(README.splitlines()) <= 220


def test_example_is_right():
    code = re.search(r"## Example\n+```python\n(.*?)```", README, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    torch.manual_seed(0)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    q, k, v, o = (names[name] for name in "qkvo")
    leaves = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    angles = torch.polar(torch.ones(512, 32, dtype=torch.float64), torch.arange(512).double()[:, None] * frequencies)

    def rotate(x):
        pairs = torch.complex(*x.chunk(2, dim=-1)) * angles
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    expected = F.scaled_dot_product_attention(
        rotate(leaves[0]), rotate(leaves[1]), leaves[2], is_causal=True, enable_gqa=True
    )
    expected.sum().backward()
    for found, true in ((o, expected), *((x.grad, leaf.grad) for x, leaf in zip((q, k, v), leaves))):
        error = (found.detach().double().cpu() - true.detach()).square().mean().sqrt()
        assert error < 0.02 * true.detach().square().mean().sqrt()


@pytest.mark.parametrize("page", ["README.md", "DESIGN.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    """Those of the site's own pages are checked when it is built."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing
    if page == "README.md":
        assert any(link.endswith(".png") for link in links) and len(links) > 4


def test_named_commands_exist(capsys):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert {"verify", "test", "bench", "docs"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    for main in (bench.main, verification.parse):
        with pytest.raises(SystemExit) as stopped:
            main(["--help"])
        assert stopped.value.code == 0
    assert "bench docs" in capsys.readouterr().out
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"\.\[([a-z-]+)\]", README))
    assert {"hf", "baselines", "bench", "docs", "test"} <= extras
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def test_named_files_exist():
    """What pages call by its path in the repository; generated and moved files would leave dead names behind."""
    guides = [page for folder in ("design", "guides", "howto") for page in (ROOT / "docs" / folder).glob("*.md")]
    for page in (*(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")), *guides):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(
            r"`((?:attention|experimental|generation|integrations|kernels|rotation|runtime)/[\w./]+)`", text
        ):
            assert (ROOT / "fused_rope_attn" / name).exists(), (page, name)
        for name in re.findall(r"`((?:examples|bench|docs|tools|tests|verification|baselines)/[\w./-]+)`", text):
            assert (ROOT / name).exists() or name.startswith("docs/_build"), (page, name)
