"""Calls by signature: prepared once, recorded, replayed by the CUDA driver, and run as they are where they cannot be.

The compiled kernels and the driver are none: a launch leaves the bytes that a GPU would have read.
"""

import contextlib
import ctypes
import struct
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from triton import knobs

from fused_rope_attn.runtime import driver, launch as calls
from fused_rope_attn.runtime.launch import Call, Launch, Recording, Source, call_of
from fused_rope_attn.runtime.triton_compat import gl

BLOCK = [1, 1, 64, 64]
# A kernel with one parameter of every kind: a tensor, a descriptor, an absent tensor, a record with a tensor, a tuple,
# a number, a constant.
SIGNATURE = {
    "x_ptr": "*fp32", "y_desc": "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout()>", "no_ptr": "constexpr",
    "z": ("*bf16", "constexpr"), "strides": ("i32", "i64", "constexpr"), "scale": "fp32", "BLOCK": "constexpr",
}  # fmt: skip
METADATA = {
    "num_warps": 4, "num_ctas": 1, "shared": 4096, "global_scratch_size": 0, "profile_scratch_size": 0,
    "instrumentation_mode": "", "launch_pdl": True, "launch_cooperative_grid": False,
    "tensordesc_meta": [{"swizzle": 3, "block_size": BLOCK}],
}  # fmt: skip
# Bytes of the parameters: x, the tensor map with its shape and strides, z, two strides, scale, two of scratch.
SIZES = [8, 128, *[4] * 4, *[8] * 4, 8, 4, 8, 4, 8, 8]
ARGUMENTS = {"strides": (640, 1 << 40, 1), "scale": 0.25, "BLOCK": 64}
Y = 2  # of inputs()


class View(NamedTuple):
    ptr: torch.Tensor
    step: int = 1


class Kernel:
    """Stand in for a ``triton.jit`` function and for its compiled kernel; ``runs`` holds Triton's launches."""

    arg_names = list(SIGNATURE)
    fn = SimpleNamespace(__name__="toy_kernel")
    function = 0x5EED

    def __init__(self, **metadata):
        self.src, self.runs, self.begin = SimpleNamespace(signature=SIGNATURE), [], lambda: None
        metadata = METADATA | metadata
        self.metadata = namedtuple("KernelMetadata", metadata)(**metadata)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.begin()
            self.runs.append((arguments, options))
            return self

        return launch


def map_at(address):
    return struct.pack("<Q120x", address)


class Recorder:
    """In the place of ``driver.cuda_driver``; ``launches``: what each launch read from its block of arguments."""

    def __init__(self):
        self.code = self.code_of_encode = self.seconds = 0
        self.launches, self.encoded, self.sizes = [], [], SIZES

    def parameter_sizes(self, function):
        return self.sizes

    def encode(self, memory, dtype, rank, address, sizes, pitches, box, steps, *others):
        self.encoded.append((address.value, dtype, rank, *map(list, (sizes, pitches, box, steps)), others))
        ctypes.memmove(memory, map_at(address.value), 128)
        return self.code_of_encode

    def launch(self, config, function, parameters, extra):
        time.sleep(self.seconds)
        given, pointers = config._obj, list(parameters._obj)
        attributes = (driver.LaunchAttribute * given.num_attributes).from_address(given.attributes)
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]
        assert all(at % min(64, size) == 0 for at, size in zip(pointers, self.sizes))
        fixed = tuple(given.grid), tuple(given.block), given.shared_bytes, function.value, extra
        early = [(each.id, *each.value) for each in attributes]
        self.launches.append(SimpleNamespace(values=values, stream=given.stream, fixed=fixed, early=early))
        return self.code

    def message(self, code):
        return f"CUDA error {code}: as the driver explains it"


class Toy:
    """Two launches of the toy kernel: the first writes a workspace, the second reads it and writes the results."""

    def __init__(self, monkeypatch, arguments=ARGUMENTS, **metadata):
        self.driver = Recorder()
        monkeypatch.setattr(driver, "cuda_driver", lambda: self.driver)
        kernels = Kernel(**metadata), Kernel(launch_pdl=False, **metadata)
        self.launches = [Launch(kernel, 12, {"num_warps": 4}, arguments) for kernel in kernels]
        layout = gl.NVMMASharedLayout.get_default_for(BLOCK, gl.bfloat16)
        self.source = Source(inputs()[Y], BLOCK, layout)
        self.ran = 0
        self.extra = lambda x, y: y

    def run(self, given):
        x, _, y = given
        self.ran += 1
        z = torch.empty_strided((4, 2), (1, 4), dtype=torch.bfloat16)
        like = torch.empty_like(y)
        sums, counter = torch.empty(100), torch.empty((3,), dtype=torch.int32)
        y = self.extra(x, y)
        for launch, first in zip(self.launches, (x, sums)):
            launch(0, x_ptr=first, y_desc=self.source(y), no_ptr=None, z=View(counter if first is x else z))
        return z, None, like, x


def inputs():
    return torch.zeros(8), None, torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16)


@pytest.fixture
def toy(monkeypatch):
    return Toy(monkeypatch)


def recorded(toy):
    """A call that was recorded, at the second time."""
    call = Call(toy.run)
    for _ in range(2):
        call(inputs())
    assert call.refusal == "" and toy.ran == 2 and not toy.driver.launches
    for launch in toy.launches:  # Triton compiles at the first time; at the second its launcher takes the kernel
        (_, compiled), (launched, options) = launch.kernel.runs
        assert compiled["scale"] == 0.25 and compiled["y_desc"].block_shape == BLOCK
        assert options == {"stream": 0} and launched[4:] == ((640, 1 << 40, 1), 0.25, 64)
        assert launched[1].base.shape == (3, 2, 64, 64)
    return call


def test_the_driver_reads_what_the_launches_were_given(toy):
    call, addresses = recorded(toy), []
    for _ in range(2):
        given = x, _, y = inputs()
        z, none, like, x_again = call(given)
        first, second = toy.driver.launches[-2:]
        assert none is None and z.shape == (4, 2) and z.stride() == (1, 4) and z.dtype is torch.bfloat16
        assert like.shape == y.shape and like.stride() == y.stride() and like.dtype is y.dtype and x_again is x
        assert first.values[0] == struct.pack("<Q", x.data_ptr())
        assert second.values[10] == struct.pack("<Q", z.data_ptr())
        sizes = struct.pack("<4i", 3, 2, 64, 64) + struct.pack("<4q", 2 * 64 * 64, 64 * 64, 64, 1)
        others = struct.pack("<iq", 640, 1 << 40) + struct.pack("<f", 0.25) + bytes(16)
        for made in (first, second):
            assert made.values[1] == map_at(y.data_ptr()) and made.stream == 0
            assert b"".join(made.values[2:10]) == sizes and b"".join(made.values[11:]) == others
            assert made.fixed == ((12, 1, 1), (128, 1, 1), 4096, 0x5EED, None)
        programmatic_serialization = 6
        assert first.early == [(programmatic_serialization, 1, *[0] * 15)] and second.early == []
        # Tensors that are neither given nor returned share one allocation.
        counter, sums = (struct.unpack("<Q", value)[0] for value in (first.values[10], second.values[0]))
        assert counter - sums == 512
        addresses += [y.data_ptr()] * 2  # each kernel has a map of its own
        call(given)  # which encodes none again
    assert toy.ran == 2 and [each[0] for each in toy.driver.encoded] == addresses
    # Sizes in the order of the API, innermost first; distances of rows in bytes, without the innermost.
    bfloat16, promote_to_128_bytes, pitches = 9, 2, [128, 128 * 64, 128 * 64 * 2, 0]
    encoded = bfloat16, 4, [64, 64, 2, 3], pitches, BLOCK[::-1], [1] * 4, (0, 3, promote_to_128_bytes, 0)
    assert toy.driver.encoded[0][1:] == encoded


def test_results_are_of_the_class_that_the_call_returns(toy):
    run, Pair = toy.run, namedtuple("Pair", ("z", "nothing"))
    toy.run = lambda given: Pair(*run(given)[:2])
    assert type(recorded(toy)(inputs())) is Pair
    toy.run = lambda given: run(given) and None
    call = Call(toy.run)
    assert [call(inputs()) for _ in range(3)] == [None, None, ()]


def test_a_large_workspace_stays_in_parts(toy, monkeypatch):
    monkeypatch.setattr(calls, "MOST_WORKSPACE_BYTES", 700)
    z, none, like, _ = recorded(toy)(inputs())
    assert none is None and z.shape == (4, 2) and like.shape == (3, 2, 64, 64)
    assert toy.driver.launches[1].values[10] == struct.pack("<Q", z.data_ptr()) and toy.ran == 2


def test_a_stream_is_written_where_it_changed(toy, monkeypatch):
    call = recorded(toy)
    for stream in (5, 5, (1 << 63) + 7):
        monkeypatch.setattr(calls.device, "current_stream", lambda where: stream)  # noqa: B023
        call(inputs())
    assert [made.stream for made in toy.driver.launches] == [*[5] * 4, *[(1 << 63) + 7] * 2]


def test_threads_do_not_mix_their_arguments(toy, monkeypatch):
    """While the driver takes its time, other threads write: never into a block that is still being read."""
    toy.driver.seconds = 0.002
    call, each = recorded(toy), [inputs() for _ in range(8)]
    ident, results = threading.get_ident, {}
    monkeypatch.setattr(calls.device, "current_stream", lambda where: ident())
    with ThreadPoolExecutor(8) as pool:
        for i, (out, thread) in enumerate(pool.map(lambda i: (call(each[i % 8]), ident()), range(64))):
            results[out[0].data_ptr()] = each[i % 8], thread, out
    of_result = {struct.unpack("<Q", made.values[10])[0]: made for made in toy.driver.launches}
    assert len(toy.driver.launches) == 128 and len(results) == 64
    for address, (given, thread, _) in results.items():
        made = of_result[address]
        assert made.values[1] == map_at(given[Y].data_ptr()) and made.stream == thread


def odd(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


CHANGES = {"a profiler": (knobs.runtime, "launch_enter_hook", lambda metadata: None),
           "another GPU": (calls.device, "is_current", lambda where: False)}  # fmt: skip


@pytest.mark.parametrize("why", [*CHANGES, "code", "code_of_encode"])
def test_where_the_driver_cannot_the_call_itself_runs(toy, monkeypatch, why):
    """Triton's launcher calls a profiler's hooks. An allocation from PyTorch's cache makes no context current."""
    call = recorded(toy)
    with monkeypatch.context() as changed:
        changed.setattr(*CHANGES.get(why, (toy.driver, why, driver.INVALID_CONTEXT)))
        call(inputs())
        assert toy.ran == 3 and [len(launch.kernel.runs) for launch in toy.launches] == [3, 3]
        assert len(toy.driver.launches) == (why == "code")
    call(inputs())
    assert toy.ran == 3


@pytest.mark.parametrize("says", ["Failed to create tensor map descriptor: invalid device context", "out of memory"])
def test_triton_in_a_thread_without_a_context(toy, monkeypatch, says):
    """It raises where the driver refuses; other errors of its stay what they are."""
    make_context, call = mock.Mock(), Call(toy.run)
    monkeypatch.setattr(calls.device, "make_context_current", make_context)
    call(inputs())
    toy.launches[0].kernel.begin = mock.Mock(side_effect=[RuntimeError(f"Triton Error [CUDA]: {says}"), None])
    with pytest.raises(RuntimeError, match=says) if says == "out of memory" else contextlib.nullcontext():
        call(inputs())
    assert make_context.call_count == (says != "out of memory")


def test_an_error_of_the_driver_names_the_kernels_and_ends_the_launches(toy):
    call = recorded(toy)
    toy.driver.code = 700
    with pytest.raises(RuntimeError, match="toy_kernel, toy_kernel could not be launched: CUDA error 700"):
        call(inputs())
    assert len(toy.driver.launches) == 1


def test_tensor_maps(toy, monkeypatch):
    monkeypatch.setattr(driver, "_MAX_MAPS", 2)
    descriptor = toy.source(inputs()[Y])
    tensor_map = driver.TensorMap("y_desc", descriptor, METADATA["tensordesc_meta"][0])
    for address in (64, 128, 192):
        assert tensor_map.at(address) == map_at(address)
    assert list(tensor_map.maps) == [192]
    for dtype, number in ((torch.float16, 6), (torch.float32, 7)):
        descriptor.base = torch.zeros(1, dtype=dtype)
        driver.TensorMap("y_desc", descriptor, METADATA["tensordesc_meta"][0]).at(64)
        assert toy.driver.encoded[-1][1] == number
    toy.driver.code_of_encode = 1
    with pytest.raises(RuntimeError, match="no tensor map of y_desc could be made: CUDA error 1"):
        tensor_map.at(256)


def another_operator(x, y):
    x.add_(1)
    return y


OTHER, INTEGERS = inputs()[Y], torch.zeros(1, dtype=torch.int32)
# (refusal, the change of the toy that causes it): changes of compiled kernels, of arguments and of the driver.
REFUSED = [
    ("it runs aten.add_", {"extra": another_operator}),
    ("from elsewhere", {"extra": lambda x, y: OTHER}),
    ("nothing was launched", {"launches": []}),
    ("an address is odd", {"given": (odd(torch.zeros(8)), None, OTHER)}),
    ("given twice", {"given": (OTHER, None, OTHER)}),
    ("scratch memory", {"metadata": {"global_scratch_size": 128}}),
    ("instrumented", {"metadata": {"instrumentation_mode": "gsan"}}),
    ("clusters", {"metadata": {"num_ctas": 2}}),
    ("no tensor map", {"metadata": {"tensordesc_meta": []}}),
    ("no tensor map", {"source": lambda y: SimpleNamespace(base=INTEGERS)}),
    ("of type bf16", {"signature": SIGNATURE | {"scale": "bf16"}}),
    ("does not fit", {"metadata": {"arguments": ARGUMENTS | {"scale": 1e300}}}),
    ("does not find parameters", {"sizes": [*SIZES, 8]}),
    ("does not find parameters", {"sizes": [*SIZES[:-5], 8, *SIZES[-4:]]}),
    ("no CUDA driver", {"driver": None}),
    ("release of Triton", {"is_known": False}),
]


@pytest.mark.parametrize(("refusal", "changed"), REFUSED)
def test_what_is_no_replay_is_refused(monkeypatch, refusal, changed):
    """It is tried a few times, and then no more."""
    changed = dict(changed)
    toy = Toy(monkeypatch, **changed.pop("metadata", {}))
    given, toy.driver.sizes = changed.pop("given", inputs()), changed.pop("sizes", SIZES)
    monkeypatch.setattr(driver, "LAUNCHER_IS_KNOWN", changed.pop("is_known", True))
    for launch in toy.launches:
        launch.kernel.src.signature = changed.get("signature", SIGNATURE)
    for name, value in changed.items():
        setattr(toy, name, value)
    call = Call(toy.run)
    for _ in range(8):
        call(given)
    assert refusal in call.refusal and toy.ran == 8


def test_a_recording_ends_with_its_call(toy):
    recording = Recording()
    with pytest.raises(ZeroDivisionError), recording:
        toy.run(inputs())
        raise ZeroDivisionError
    toy.run(inputs())
    assert len(recording.launches) == 2 and len(recording.made) == 4


def test_a_signature_has_one_call(monkeypatch):
    monkeypatch.setattr(calls, "_known", {})
    prepare = mock.Mock()
    x, config = torch.zeros(4, 6), object()
    tensors = ((x, None), (x, x), (x.t(), None), (x.half(), None), (x[:, :4], None), (odd(x), None))
    signatures = [("problem", given) for given in tensors]
    signatures += [("another", (x, None)), ("problem", (x, None), config), ("problem", (x, None), object())]
    every = [call_of(prepare, *signature) for signature in signatures]
    assert len(set(map(id, every))) == len(every) == prepare.call_count
    assert [call_of(prepare, *signature) for signature in signatures] == every and prepare.call_count == len(every)
    assert call_of(prepare, "problem", (x.clone(), None)) is every[0]
    assert call_of(mock.Mock(), "problem", (x, None)) is not every[0]
    monkeypatch.setattr(calls, "_MAX_CALLS", len(every) + 1)
    call_of(prepare, "a third", (x, None))  # forgets all others
    assert call_of(prepare, "problem", (x, None)) is not every[0]


def library(*functions):
    def explain(code, found):
        found._obj.value = b"it is broken"

    def info(function, index, offset, size):
        size._obj.value = (*SIZES, 0)[index.value]
        return index.value == len(SIZES)

    return SimpleNamespace(cuGetErrorString=explain, cuFuncGetParamInfo=info, **dict.fromkeys(functions))


NEW, OLDER = library("cuLaunchKernelEx", "cuTensorMapEncodeTiled"), library("cuTensorMapEncodeTiled")


@pytest.mark.parametrize("found", [NEW, OLDER, OSError("no such library"), None])
def test_the_driver_is_libcuda(monkeypatch, found):
    """None without the library, with one that is older than a function, and for AMD."""
    load = mock.Mock(side_effect=[found or NEW])
    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    monkeypatch.setattr(driver.torch.version, "hip", None if found else "6")
    made = driver.cuda_driver.__wrapped__()
    assert (made is None) == (found is not NEW)
    if made:
        load.assert_called_once_with("libcuda.so.1")
        assert made.message(9) == "CUDA error 9: it is broken" and made.parameter_sizes(None) == SIZES
