"""Launches by the CUDA driver: what it reads, and which kernels stay with Triton's launcher."""

import struct

import pytest
import torch

from fused_rope_attn.runtime import driver
from fused_rope_attn.runtime.driver import Block, Kernel, TensorMap, Unsupported
from tests.support.driver import (
    ARGUMENTS,
    ENCODING,
    GRID,
    SIGNATURE,
    SIZES,
    RecordingDriver,
    View,
    compiled_kernel,
    toy_map,
    toy_tensors,
)

PROGRAMMATIC_SERIALIZATION = 6


@pytest.fixture
def recorder(monkeypatch):
    return install(monkeypatch, RecordingDriver())


def install(monkeypatch, found):
    monkeypatch.setattr(driver, "cuda_driver", lambda: found)
    return found


def expected_values(tensors):
    """The bytes of SIZES in a launch with these tensors."""
    x, y, z = tensors["x_ptr"], tensors["y_desc"].base, tensors["z"].ptr
    return [
        struct.pack("<Q", x.data_ptr()),
        toy_map(y.data_ptr()),
        *(struct.pack("<i", n) for n in (3, 2, 64, 64)),
        *(struct.pack("<q", n) for n in (2 * 64 * 64, 64 * 64, 64, 1)),
        struct.pack("<Q", z.data_ptr()),
        struct.pack("<i", 640),
        struct.pack("<q", 1 << 40),
        struct.pack("<f", 0.25),
        bytes(8),
        bytes(8),
    ]


def kernel_of(compiled=None, grid=GRID, **arguments):
    return Kernel(compiled or compiled_kernel(), grid, {**toy_tensors(), **ARGUMENTS, **arguments})


def block_of(*kernels, maps=1):
    """Return a block of kernels with the tensors of the first one, which are x and z."""
    places = [p for p in kernels[0].parameters if isinstance(p, int)]
    return Block(kernels, {p: i for i, p in enumerate(places)}, maps)


def values_of(kernel, tensors):
    """(addresses, maps) of toy tensors, as ``Block.write`` takes them for one launch."""
    x, y, z = tensors["x_ptr"], tensors["y_desc"].base, tensors["z"].ptr
    (tensor_map,) = (p for p in kernel.parameters if isinstance(p, TensorMap))
    return x.data_ptr(), z.data_ptr(), tensor_map.at(y.data_ptr())


def test_the_driver_reads_what_the_kernel_takes(recorder):
    """Two launches, each with its own stream and tensors; everything else stays as it was prepared."""
    kernel = kernel_of()
    block = block_of(kernel)
    every = toy_tensors(), toy_tensors()
    for stream, tensors in zip(((1 << 63) + 5, 7), every):
        block.write(*values_of(kernel, tensors))
        assert block.launch(recorder.launch, stream) == 0
    first, second = recorder.launches
    assert first.values == expected_values(every[0]) and second.values == expected_values(every[1])
    assert first.values != second.values and first.stream == (1 << 63) + 5 and second.stream == 7
    for made in (first, second):
        assert made.grid == GRID and made.block == (128, 1, 1) and made.shared == 4096
        assert made.function == 0x5EED and made.extra is None and made.misaligned == []
        assert made.attributes == [(PROGRAMMATIC_SERIALIZATION, 1, *[0] * 15)]


def test_a_launch_without_an_early_start(recorder):
    kernel = kernel_of(compiled_kernel(launch_pdl=False))
    block = block_of(kernel)
    block.write(*values_of(kernel, toy_tensors()))
    block.launch(recorder.launch, 0)
    assert recorder.launches[0].attributes == []


def test_two_kernels_share_addresses_and_maps(recorder):
    """The second kernel takes the tensors of the first in another order, and a map of its own."""
    tensors = toy_tensors()
    others = {"x_ptr": tensors["z"].ptr, "z": View(tensors["x_ptr"])}
    kernels = kernel_of(**tensors), kernel_of(**others)
    x, z, first_map = values_of(kernels[0], tensors)
    block = block_of(*kernels, maps=2)
    block.write(x, z, first_map, toy_map(1024))
    assert block.launch(recorder.launch, 3) == 0
    first, second = recorder.launches
    assert first.values == expected_values(tensors)
    assert (second.values[0], second.values[1], second.values[10]) == (
        struct.pack("<Q", z),
        toy_map(1024),
        struct.pack("<Q", x),
    )


def test_the_first_error_ends_the_launches(recorder):
    kernel = kernel_of()
    block = block_of(kernel, kernel, maps=2)
    x, z, first_map = values_of(kernel, toy_tensors())
    block.write(x, z, first_map, first_map)
    recorder.code = 700
    assert block.launch(recorder.launch, 0) == 700 and len(recorder.launches) == 1


def test_a_tensor_map_is_encoded_once_for_an_address(recorder):
    """Sizes in the order of the API, innermost first; distances of rows in bytes, without the innermost."""
    kernel, every = kernel_of(), (toy_tensors(), toy_tensors())
    for tensors in (*every, *every):
        values_of(kernel, tensors)
    assert [each[0] for each in recorder.encoded] == [tensors["y_desc"].base.data_ptr() for tensors in every]
    bfloat16, promote_to_128_bytes = 9, 2
    assert recorder.encoded[0][1:] == (
        bfloat16,
        4,
        [64, 64, 2, 3],
        [128, 128 * 64, 128 * 64 * 2, 0],
        [64, 64, 1, 1],
        [1] * 4,
        (0, ENCODING["swizzle"], promote_to_128_bytes, 0),
    )


def test_a_map_that_the_driver_refuses(recorder):
    recorder.code_of_encode = 1
    with pytest.raises(RuntimeError, match="no tensor map of y_desc could be made: CUDA error 1"):
        values_of(kernel_of(), toy_tensors())


def test_few_maps_are_kept(recorder, monkeypatch):
    monkeypatch.setattr(driver, "_MAX_MAPS", 2)
    (tensor_map,) = (p for p in kernel_of().parameters if isinstance(p, TensorMap))
    for address in (64, 128, 192):
        assert tensor_map.at(address) == toy_map(address)
    assert list(tensor_map.maps) == [192]


def of_integers():
    descriptor = toy_tensors()["y_desc"]
    descriptor.base = torch.zeros(1, dtype=torch.int32)
    return descriptor


REFUSED = {
    "scratch memory": {"profile_scratch_size": 128},
    "instrumented": {"instrumentation_mode": "gsan"},
    "clusters": {"num_ctas": 2},
    "clusters, all blocks at once": {"launch_cooperative_grid": True, "match": "clusters"},
    "no tensor map": {"tensordesc_meta": []},
    "a map of integers": {"arguments": {"y_desc": of_integers()}, "match": "no tensor map"},
    "of type bf16": {"signature": SIGNATURE | {"scale": "bf16"}},
    "does not fit": {"arguments": {"scale": 1e300}},
    "does not find parameters": {"sizes": [*SIZES, 8]},
    "one parameter less": {"sizes": SIZES[:-1], "match": "does not find parameters"},
    "a wider number": {"sizes": [*SIZES[:-5], 8, *SIZES[-4:]], "match": "does not find parameters"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_expected_is_refused(recorder, case):
    changed = dict(REFUSED[case])
    match, grid = changed.pop("match", case), changed.pop("grid", GRID)
    arguments, recorder.sizes = changed.pop("arguments", {}), changed.pop("sizes", SIZES)
    with pytest.raises(Unsupported, match=match):
        kernel_of(compiled_kernel(**changed), grid, **arguments)


def test_other_releases_of_triton_are_refused(recorder, monkeypatch):
    monkeypatch.setattr(driver, "LAUNCHER_IS_KNOWN", False)
    with pytest.raises(Unsupported, match="release of Triton"):
        kernel_of()


def test_without_a_driver_triton_launches(monkeypatch):
    install(monkeypatch, None)
    with pytest.raises(Unsupported, match="no CUDA driver"):
        kernel_of()


class Library:
    """A libcuda that tells of kernels with parameters of these sizes, or that lacks a function."""

    def __init__(self, *missing, sizes=()):
        self.missing, self.sizes = missing, sizes

    def __getattr__(self, name):
        if name in self.missing or not name.startswith("cu"):
            raise AttributeError(name)
        return {"cuGetErrorString": self._error, "cuFuncGetParamInfo": self._info}.get(name, lambda *given: 0)

    def _error(self, code, found):
        found._obj.value = b"it is broken"

    def _info(self, function, index, offset, size):
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0


@pytest.fixture
def fresh_load():
    driver.cuda_driver.cache_clear()
    yield
    driver.cuda_driver.cache_clear()


OLDER = Library("cuLaunchKernelEx"), Library("cuFuncGetParamInfo"), Library("cuTensorMapEncodeTiled")


@pytest.mark.parametrize("library", (Library(sizes=SIZES), *OLDER, None))
def test_the_driver_is_libcuda(monkeypatch, fresh_load, library):
    """None without the library, and with one that is older than a function."""

    def load(name):
        assert name == "libcuda.so.1"
        if library is None:
            raise OSError("no such library")
        return library

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    monkeypatch.setattr(driver.torch.version, "hip", None)
    found = driver.cuda_driver()
    if library is None or library.missing:
        assert found is None
    else:
        assert found.message(9) == "CUDA error 9: it is broken"
        assert found.parameter_sizes(None) == SIZES


def test_there_is_no_cuda_driver_for_amd(monkeypatch, fresh_load):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(driver.torch.version, "hip", "6.4")
    assert driver.cuda_driver() is None
