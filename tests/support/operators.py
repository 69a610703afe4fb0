"""Small calls with every mask and of every function, for the tests of operators, autograd, autocast and compilers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rope_attn import rope_attention, rope_attention_mla, rope_attention_varlen
from tests.support.marks import interpreted
from verification.testing import Case, LatentCase, make_inputs, make_latent_inputs

# Masks for two batch entries of two query heads.
MASKS = {
    "window": (3, 0),
    "softcap": 20.0,
    "sinks": torch.tensor([0.5, -0.5]),
    "kv_starts": torch.tensor([0, 2], dtype=torch.int32),
    "kv_lens": torch.tensor([9, 5], dtype=torch.int32),
}
SMALL = Case(2, 2, 1, 7, 9, 16, dtype=torch.float32)
# The names of small calls, and a mark that repeats a test for them.
SMALL_CALLS = ("plain", "bshd", "masks", "norms and intervals", "packed", "token tables", "latent")
small_calls = pytest.mark.parametrize("name", SMALL_CALLS)


def small_call(name, **options):
    """Return a function of the tensors that have a gradient, and those tensors by name. The function returns o, lse
    and, of masked and of packed calls, max_logit."""
    inputs, function = make_inputs(SMALL), rope_attention
    tensors, given = dict(zip("qkv", inputs)), {"cos": inputs.cos, "sin": inputs.sin, "causal": True}
    if name == "bshd":
        tensors, given["layout"] = {x: y.transpose(1, 2) for x, y in tensors.items()}, name
    elif name == "masks":
        given |= MASKS | {"return_max_logit": True}
        tensors["sinks"] = given.pop("sinks")
    elif name == "norms and intervals":
        tensors |= {"q_norm": torch.linspace(0.5, 1.5, 16), "k_norm": torch.linspace(1.5, 0.5, 16)}
        starts = torch.tensor([[0, 2, 9, 0, 1, 3, 0, 4, 6]], dtype=torch.int32)
        given |= {"query_starts": starts, "query_ends": starts + 4, "norm_eps": 1e-3, "norm_offset": 1.0}
    elif name in ("packed", "token tables"):
        function, owns, keys = rope_attention_varlen, name == "token tables", 7 if name == "token tables" else 9
        tensors = {x: y[0, :, : 7 if x == "q" else keys].transpose(0, 1) for x, y in tensors.items()}
        ends = torch.tensor([[0, 3, 7], [0, 3, 7] if owns else [0, 4, 9]], dtype=torch.int32)
        given |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 4, "max_seqlen_k": 5 - owns}
        given |= {"token_tables": owns, "return_max_logit": True} | {x: given[x][:keys] for x in ("cos", "sin")}
    elif name == "latent":
        function, latent = rope_attention_mla, make_latent_inputs(LatentCase(2, 3, 3, 9, 12, 16, dtype=torch.float32))
        tensors, given = dict(zip(latent._fields[:5], latent)), given | {"cos": latent.cos, "sin": latent.sin}
    options = given | {"return_lse": True} | options
    return lambda *some: function(**dict(zip(tensors, some)), **options), tensors


def public_calls(q, k, v, cos, sin):
    """Return a call of every function of attention by its name, (positional, keywords), with 7 queries of two heads."""
    ends = torch.tensor([0, 7], dtype=torch.int32, device=q.device)
    latent, lengths = (q, q, v.repeat(1, 2, 1, 1), k, v.repeat(1, 2, 1, 1)), (ends, ends, 7, 7)
    return {
        "rope_attention": ((q, k, v, cos, sin), {}),
        "rope_attention_varlen": ((*(x[0, :, :7].transpose(0, 1) for x in (q, k, v)), cos, sin, *lengths), {}),
        "rope_attention_mla": ((*latent, cos, sin), {}),
        "rope_attention_mla_varlen": ((*(x[0].transpose(0, 1) for x in latent), cos, sin, *lengths), {}),
        "rope_attention_with_kvcache": ((q, k, v, cos, sin), {"cache_seqlens": ends[1:].repeat(2)}),
    }


def differentiated(run, tensors):
    """Return what ``run`` returns, and the gradients of the tensors for gradients of o and of lse. That of lse is NaN
    for rows that see nothing, which must give none."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
    outputs = run(*leaves)
    gradients = torch.autograd.grad(outputs[:2], leaves, upstream_of(*outputs[:2]))
    return [*(x.detach() for x in outputs), *gradients]


def upstream_of(o, lse):
    """Return gradients of o and lse."""
    do = torch.linspace(-1, 2, o.numel(), dtype=o.dtype, device=o.device).view(o.shape)
    return do, torch.where(lse.detach() == -torch.inf, torch.nan, 0.5)


def assert_close(xs, ys, tolerance=1e-5):
    """Tensor by tensor, relative and absolute."""
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def kernel_or_reference(*names):
    """Repeat a test for these backends; the kernels need the interpreter."""
    marks = {"triton": interpreted, "reference": ()}
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=marks[name]) for name in names])


class Record(TorchDispatchMode):
    """Notes every operator that reaches the dispatcher, with its arguments in ``calls``, by name in ``operators``."""

    def __init__(self):
        super().__init__()
        self.operators, self.calls = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(str(function))
        self.calls.append((function, args))
        return function(*args, **(kwargs or {}))
