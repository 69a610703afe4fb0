"""torch.export with a batch and a length that change: exported, saved, loaded, and run at other sizes."""

import io

import pytest
import torch
from torch.export import Dim


def for_each(first, *others):
    """Repeat a test for these functions, the first with every kind of dimension."""
    rows = [(first, kind) for kind in ("named", "AUTO", "DYNAMIC")] + [(function, "named") for function in others]
    return pytest.mark.parametrize(
        ("function", "kind"), [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in rows]
    )


def dimension(kind, name, least=2):
    """Return an axis's entry of ``dynamic_shapes``. The least size of a name is 2, because torch.export makes a size of
    1 a constant, and that of ``cu_seqlens`` 3, because two of them are one sequence."""
    if kind != "named":
        return getattr(Dim, kind)
    if torch.__version__.startswith("2.11."):
        pytest.skip(
            "torch 2.11 has a fault: it cannot prove min(n, 2n) = n, and refuses a named dimension (2.13 serves it)"
        )
    return Dim(name, min=least, max=64)


class Module(torch.nn.Module):
    """A function as a module, because torch.export takes nothing else."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def exported(module, args, dynamic_shapes, **kwargs):
    """Return the module that a program becomes after it was saved and loaded."""
    program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def check_export(function, make, axes):
    """Export a function of ``make(batch, length)``, with its ``dynamic_shapes``, and compare with it at other sizes."""
    program = exported(Module(function), make(3, 9), (axes,))
    for size in ((3, 9), (2, 7), (5, 40)):
        args = make(*size)
        torch.testing.assert_close(program(*args), function(*args))
