"""Launches by the CUDA driver: the bytes that it reads, who launches a kernel, and what several threads do at once."""

import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from triton import knobs

from fused_rope_attn.runtime import direct_launch, driver
from fused_rope_attn.runtime.direct_launch import DirectLaunch
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.parameters import Unsupported
from tests.support.driver import (
    ARGUMENTS,
    ENCODING,
    GRID,
    NAME,
    PARAMETERS,
    SIGNATURE,
    RecordingDriver,
    ToyKernel,
    compiled_kernel,
    ptx,
    toy_map,
    toy_tensors,
)

PROGRAMMATIC_SERIALIZATION, COOPERATIVE, CLUSTER_DIMENSION, CLUSTER_SCHEDULING = 6, 2, 4, 5


@pytest.fixture
def recorder(monkeypatch):
    return install(monkeypatch, RecordingDriver())


def install(monkeypatch, found):
    monkeypatch.setattr(driver, "load", lambda: found)
    monkeypatch.setattr(direct_launch, "encode_tensor_map", toy_map)
    return found


def expected_values(tensors):
    """The bytes of PARAMETERS in a launch with these tensors."""
    x, (y, _), z = tensors["x_ptr"], tensors["y_desc"], tensors["z_ptr"]
    return [
        struct.pack("<Q", x.data_ptr()), toy_map(y.data_ptr()), *(struct.pack("<i", n) for n in (3, 2, 64, 64)),
        *(struct.pack("<q", n) for n in (2 * 64 * 64, 64 * 64, 64, 1)), struct.pack("<Q", z.data_ptr()),
        struct.pack("<i", 640), struct.pack("<q", 1 << 40), struct.pack("<f", 0.25), bytes(8), bytes(8),
    ]  # fmt: skip


def test_the_driver_reads_what_the_kernel_takes(recorder):
    """Two launches, each with its own stream and tensors; everything else stays as it was prepared."""
    tensors, others = toy_tensors(), toy_tensors()
    launch = DirectLaunch(compiled_kernel(), GRID, tensors, ARGUMENTS)
    assert launch((1 << 63) + 5, tensors) == 0
    assert launch(7, others) == 0
    first, second = recorder.launches
    assert first.values == expected_values(tensors) and second.values == expected_values(others)
    assert first.values != second.values and first.stream == (1 << 63) + 5 and second.stream == 7
    for made in (first, second):
        assert made.grid == GRID and made.block == (128, 1, 1) and made.shared == 4096
        assert made.function == 0x5EED and made.extra is None and made.misaligned == []
        assert made.attributes == [(PROGRAMMATIC_SERIALIZATION, 1, *[0] * 15)]


def test_what_a_launch_asks_for(recorder):
    tensors = toy_tensors()
    metadata = {"launch_pdl": False, "launch_cooperative_grid": True, "num_ctas": 2}
    DirectLaunch(compiled_kernel(**metadata), GRID, tensors, ARGUMENTS)(0, tensors)
    (made,) = recorder.launches
    assert made.grid == (24, 1, 1)
    assert [each[:4] for each in made.attributes] == [
        (COOPERATIVE, 1, 0, 0), (CLUSTER_DIMENSION, 2, 1, 1), (CLUSTER_SCHEDULING, 1, 0, 0)
    ]  # fmt: skip
    DirectLaunch(compiled_kernel(launch_pdl=False), GRID, tensors, ARGUMENTS)(0, tensors)
    assert recorder.launches[1].attributes == []


def test_a_tensor_map_is_encoded_once_for_an_address(recorder, monkeypatch):
    encoded = []
    monkeypatch.setattr(direct_launch, "encode_tensor_map", lambda a, **_: encoded.append(a) or toy_map(a))
    tensors, others = toy_tensors(), toy_tensors()
    launch = DirectLaunch(compiled_kernel(), GRID, tensors, ARGUMENTS)
    for each in (tensors, others, tensors, others):
        launch(0, each)
    assert encoded == [each["y_desc"][0].data_ptr() for each in (tensors, others)]
    assert [made.values[1] for made in recorder.launches[2:]] == [toy_map(address) for address in encoded]


def test_threads_do_not_mix_their_arguments(monkeypatch):
    """While the driver takes its time, other threads write: never into a block that is still being read."""
    recorder = install(monkeypatch, RecordingDriver(seconds=0.002))
    each = [toy_tensors() for _ in range(8)]
    launch = DirectLaunch(compiled_kernel(), GRID, each[0], ARGUMENTS)
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(lambda i: launch(i % 8, each[i % 8]), range(64)))
    assert len(recorder.launches) == 64
    for made in recorder.launches:
        assert made.values == expected_values(each[made.stream])


REFUSED = {
    "scratch memory": {"global_scratch_size": 128},
    "instrumented": {"instrumentation_mode": "gsan"},
    "not for CUDA": {"target": type("target", (), {"backend": "hip"})},
    "larger cluster": {"num_ctas": 16},
    "more shared memory": {"shared": 229 << 10},
    "not loaded": {"function": None},
    "without its PTX": {"asm": {}},
    "no entry": {"text": ptx().replace(NAME, "another_kernel")},
    "threads": {"text": ptx(threads=256)},
    "of 8 words": {"text": ptx().replace(".u32", ".v8"), "match": "not understood|declares"},
    "one parameter more": {"text": ptx([*PARAMETERS, (8, 8)]), "match": "declares"},
    "one parameter less": {"text": ptx(PARAMETERS[:-1]), "match": "declares"},
    "wider number": {"text": ptx([*PARAMETERS[:-5], (8, 8), *PARAMETERS[-4:]]), "match": "declares"},
    "map aligned to 128": {"text": ptx([(8, 8), (128, 128), *PARAMETERS[2:]]), "match": "declares"},
    "no plain tensor map": {"tensordesc_meta": [ENCODING | {"fp4_padded": True}]},
    "no tensor map at all": {"tensordesc_meta": [], "match": "no plain tensor map"},
    "type": {"signature": SIGNATURE | {"scale": "bf16"}},
    "does not fit": {"arguments": ARGUMENTS | {"scale": 1e300}},
    "grid is empty": {"grid": (0, 1, 1)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_expected_is_refused(recorder, case):
    changed = dict(REFUSED[case])
    match, grid = changed.pop("match", case), changed.pop("grid", GRID)
    arguments = changed.pop("arguments", ARGUMENTS)
    with pytest.raises(Unsupported, match=match):
        DirectLaunch(compiled_kernel(**changed), grid, toy_tensors(), arguments)


def test_a_map_that_is_not_found_is_refused(recorder, monkeypatch):
    monkeypatch.setattr(direct_launch, "encode_tensor_map", lambda address, **_: bytes(128))
    with pytest.raises(Unsupported, match="tensor map was not found"):
        DirectLaunch(compiled_kernel(), GRID, toy_tensors(), ARGUMENTS)


def launched_once(compiled=None):
    kernel = ToyKernel(compiled_kernel() if compiled is None else compiled)
    launch = Launch(kernel, GRID[0], {"num_warps": 4}, ARGUMENTS)
    tensors = toy_tensors()
    launch(3, **tensors)
    (first,) = kernel.first
    assert first["x_ptr"] is tensors["x_ptr"] and first["scale"] == 0.25
    assert first["y_desc"].base is tensors["y_desc"][0] and first["y_desc"].block_shape == [1, 1, 64, 64]
    return kernel, launch, tensors


def test_the_first_launch_is_tritons_and_the_next_the_drivers(recorder):
    kernel, launch, tensors = launched_once()
    assert launch.refusal == "" and not recorder.launches
    launch(3, **tensors)
    launch(4, **tensors)
    assert [made.stream for made in recorder.launches] == [3, 4]
    assert len(kernel.first) == 1 and not kernel.compiled.runs


def test_a_refused_kernel_stays_with_triton(recorder):
    kernel, launch, tensors = launched_once(compiled_kernel(profile_scratch_size=16))
    launch(5, **tensors)
    assert "scratch" in launch.refusal and not recorder.launches
    (run,) = kernel.compiled.runs
    assert run[:6] == (*GRID, 5, 0x5EED, (4, 1, 4096)) and run[9] is tensors["x_ptr"] and run[13] == (640, 1 << 40, 1)


def test_without_a_driver_triton_launches(monkeypatch):
    install(monkeypatch, None)
    kernel, launch, tensors = launched_once()
    launch(5, **tensors)
    assert "no CUDA driver" in launch.refusal and len(kernel.compiled.runs) == 1


def test_a_profiler_sees_every_launch(recorder, monkeypatch):
    """Hooks of Triton's are called by its own launcher, which therefore launches while there are any."""
    _, launch, tensors = launched_once()
    seen = []
    monkeypatch.setattr(Launch, "launch_by_triton", lambda *_: seen.append("Triton"))
    hooks = knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        launch(3, **tensors)
    finally:
        hooks.remove(print)
    launch(3, **tensors)
    assert seen == ["Triton"] and len(recorder.launches) == 1


def test_errors_of_the_driver_name_the_kernel(monkeypatch):
    install(monkeypatch, RecordingDriver(code=700))
    _, launch, tensors = launched_once()
    with pytest.raises(RuntimeError, match=f"{NAME} could not be launched: CUDA error 700, as the driver"):
        launch(3, **tensors)


def test_a_thread_without_a_context_gets_one(monkeypatch):
    """An allocation from PyTorch's cache makes none current, and neither does a launch."""
    recorded = RecordingDriver(code=driver.INVALID_CONTEXT)
    install(monkeypatch, recorded)
    monkeypatch.setattr("fused_rope_attn.runtime.device.current_gpu", lambda: 5)
    kernel, launch, tensors = launched_once()
    launch(3, **tensors)
    assert recorded.current == [5] and len(recorded.launches) == 2 and not kernel.compiled.runs


@pytest.mark.parametrize("says", ["Failed to create tensor map descriptor: invalid device context", "out of memory"])
def test_a_tensor_map_that_a_thread_without_a_context_cannot_encode(monkeypatch, says):
    """Triton raises where the driver refuses; other errors of its stay what they are."""
    recorded = RecordingDriver()
    install(monkeypatch, recorded)
    monkeypatch.setattr("fused_rope_attn.runtime.device.current_gpu", lambda: 0)
    _, launch, tensors = launched_once()

    def encode(address, **encoding):
        if not recorded.current:
            raise RuntimeError(f"Triton Error [CUDA]: {says}")
        return toy_map(address, **encoding)

    launch.direct.described[0].maps.clear()
    launch.direct.described[0]._encode = encode
    if says == "out of memory":
        with pytest.raises(RuntimeError, match="out of memory"):
            launch(3, **tensors)
    else:
        launch(3, **tensors)
        assert recorded.current == [0] and len(recorded.launches) == 1


class Library:
    """A libcuda with the functions that the driver needs, or without the launch."""

    def __init__(self, *missing):
        self.missing = missing

    def __getattr__(self, name):
        if name in self.missing:
            raise AttributeError(name)
        text = {"cuGetErrorName": b"CUDA_ERROR_OF_ITS_OWN", "cuGetErrorString": b"it is broken"}.get(name)
        return lambda code, found: setattr(found._obj, "value", text)


@pytest.fixture
def fresh_load():
    driver.load.cache_clear()
    yield
    driver.load.cache_clear()


@pytest.mark.parametrize("library", (Library(), Library("cuLaunchKernelEx"), None))
def test_the_driver_is_libcuda(monkeypatch, fresh_load, library):
    """None without the library, and with one that is older than the launch."""

    def load(name):
        assert name == "libcuda.so.1"
        if library is None:
            raise OSError("no such library")
        return library

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    monkeypatch.setattr(driver.torch.version, "hip", None)
    found = driver.load()
    if library is None or library.missing:
        assert found is None
    else:
        assert found.message(9) == "CUDA error 9, CUDA_ERROR_OF_ITS_OWN: it is broken"


def test_a_context_is_made_current(monkeypatch, fresh_load):
    """The GPU's primary one; an error on the way names the GPU."""
    called = []

    class Contexts(Library):
        def __getattr__(self, name):
            def function(*arguments):
                called.append(name)
                return 2 if name in self.missing else 0

            return function if name.startswith(("cuDev", "cuCtx")) else super().__getattr__(name)

    monkeypatch.setattr(driver.torch.version, "hip", None)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Contexts())
    driver.make_current(3)
    assert called == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    driver.load.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Contexts("cuCtxSetCurrent"))
    with pytest.raises(RuntimeError, match="GPU 3 .*: CUDA error 2"):
        driver.make_current(3)
    driver.load.cache_clear()
    monkeypatch.setattr(driver.torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match="GPU 3 .*: there is no CUDA driver"):
        driver.make_current(3)


def test_there_is_no_cuda_driver_for_amd(monkeypatch, fresh_load):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(driver.torch.version, "hip", "6.4")
    assert driver.load() is None
