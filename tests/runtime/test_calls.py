"""Calls by signature: prepared once, recorded, replayed as they were, and left to themselves where they cannot be."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from triton import knobs

from fused_rope_attn.runtime import driver
from fused_rope_attn.runtime import launch as calls
from fused_rope_attn.runtime.launch import Call, Launch, Recording, Source, call_of
from fused_rope_attn.runtime.triton_compat import gl
from tests.support.driver import ARGUMENTS, GRID, RecordingDriver, ToyKernel, View, compiled_kernel, toy_map

LAYOUT = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.bfloat16)


class Toy:
    """Two launches of the toy kernel: the first writes a workspace, the second reads it and writes the results."""

    def __init__(self, monkeypatch, **options):
        self.driver = RecordingDriver(**options)
        monkeypatch.setattr(driver, "cuda_driver", lambda: self.driver)
        self.launches = [Launch(ToyKernel(compiled_kernel()), GRID[0], {"num_warps": 4}, ARGUMENTS) for _ in range(2)]
        self.source = Source(inputs()[1], [1, 1, 64, 64], LAYOUT)
        self.ran = 0
        self.extra = lambda x, y: y

    def run(self, given):
        x, y = given
        self.ran += 1
        z = torch.empty_strided((4, 2), (1, 4), dtype=torch.bfloat16)
        like = torch.empty_like(y)
        sums, counter = torch.empty(100), torch.empty((3,), dtype=torch.int32)
        y = self.extra(x, y)
        for launch, first in zip(self.launches, (x, sums)):
            launch(0, x_ptr=first, y_desc=self.source(y), no_ptr=None, z=View(counter if first is x else z))
        return z, None, like, x


def inputs():
    return torch.zeros(8), torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16)


@pytest.fixture
def toy(monkeypatch):
    return Toy(monkeypatch)


def recorded(toy):
    """A call that was recorded, at the second time."""
    call = Call(toy.run)
    for _ in range(2):
        call(inputs())
    assert call.refusal == "" and toy.ran == 2 and not toy.driver.launches
    return call


def test_the_driver_reads_what_the_launches_were_given(toy):
    call = recorded(toy)
    for _ in range(2):
        x, y = inputs()
        z, none, like, given = call((x, y))
        first, second = toy.driver.launches[-2:]
        assert none is None and z.shape == (4, 2) and z.stride() == (1, 4) and z.dtype is torch.bfloat16
        assert like.shape == y.shape and like.stride() == y.stride() and like.dtype is y.dtype and given is x
        assert first.values[0] == struct.pack("<Q", x.data_ptr())
        assert second.values[10] == struct.pack("<Q", z.data_ptr())
        for made in (first, second):
            assert made.values[1] == toy_map(y.data_ptr()) and made.misaligned == [] and made.stream == 0
            assert made.values[2:10] == [struct.pack("<i", n) for n in (3, 2, 64, 64)] + [
                struct.pack("<q", n) for n in (2 * 64 * 64, 64 * 64, 64, 1)
            ]
            assert made.values[11:14] == [struct.pack("<i", 640), struct.pack("<q", 1 << 40), struct.pack("<f", 0.25)]
            assert made.grid == GRID and made.function == 0x5EED
        # Tensors that are neither given nor returned share one allocation.
        counter, sums = (struct.unpack("<Q", value)[0] for value in (first.values[10], second.values[0]))
        assert counter - sums == 512
    assert toy.ran == 2


def test_triton_makes_the_launches_until_then(toy):
    """It compiles at the first call; at the second one its launcher takes the compiled kernel."""
    recorded(toy)
    for launch in toy.launches:
        (first,), (second,) = launch.kernel.first, launch.compiled.runs
        assert first["scale"] == 0.25 and first["y_desc"].block_shape == [1, 1, 64, 64]
        assert second[:2] == (GRID, 0) and second[6:] == ((640, 1 << 40, 1), 0.25, 64)
        assert second[3].base.shape == (3, 2, 64, 64)


def test_results_are_of_the_class_that_the_call_returns(toy):
    run = toy.run

    class Pair(NamedTuple):
        z: torch.Tensor
        nothing: None

    toy.run = lambda given: Pair(*run(given)[:2])
    assert type(recorded(toy)(inputs())) is Pair
    toy.run, toy.ran = lambda given: run(given) and None, 0
    toy.driver.launches.clear()
    assert recorded(toy)(inputs()) == () and toy.ran == 2


def test_tensors_that_are_not_given(toy):
    call = Call(lambda given: toy.run((given[0], given[2])))
    for _ in range(3):
        x, y = inputs()
        call((x, None, y))
    assert toy.ran == 2 and toy.driver.launches[0].values[0] == struct.pack("<Q", x.data_ptr())


def test_a_large_workspace_stays_in_parts(toy, monkeypatch):
    monkeypatch.setattr(calls, "MOST_WORKSPACE_BYTES", 700)
    z, none, like, _ = recorded(toy)(inputs())
    first, second = toy.driver.launches
    assert none is None and z.shape == (4, 2) and like.shape == (3, 2, 64, 64)
    assert second.values[10] == struct.pack("<Q", z.data_ptr()) and toy.ran == 2


def test_a_stream_is_written_where_it_changed(toy, monkeypatch):
    call = recorded(toy)
    for stream in (5, 5, 7):
        monkeypatch.setattr(calls.device, "current_stream", lambda where: stream)  # noqa: B023
        call(inputs())
    assert [made.stream for made in toy.driver.launches] == [5, 5, 5, 5, 7, 7]


def test_threads_do_not_mix_their_arguments(monkeypatch):
    """While the driver takes its time, other threads write: never into a block that is still being read."""
    toy = Toy(monkeypatch, seconds=0.002)
    call, each = recorded(toy), [inputs() for _ in range(8)]
    monkeypatch.setattr(calls.device, "current_stream", lambda where: ident())
    ident, results = threading.get_ident, {}
    with ThreadPoolExecutor(8) as pool:
        for i, (out, thread) in enumerate(pool.map(lambda i: (call(each[i % 8]), ident()), range(64))):
            results[out[0].data_ptr()] = each[i % 8], thread, out
    of_result = {struct.unpack("<Q", made.values[10])[0]: made for made in toy.driver.launches}
    assert len(toy.driver.launches) == 128 and len(results) == 64
    for address, ((_, y), thread, _) in results.items():
        made = of_result[address]
        assert made.values[1] == toy_map(y.data_ptr()) and made.stream == thread


def odd(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


@pytest.mark.parametrize("which", [0, 1])
def test_an_odd_address_takes_the_call_itself(toy, which):
    call = recorded(toy)
    given = list(inputs())
    given[which] = odd(given[which])
    call(given)
    assert toy.ran == 3
    call(inputs())
    assert toy.ran == 3


def test_a_profiler_sees_every_launch(toy, monkeypatch):
    """Triton's launcher calls its hooks, and therefore launches while there are any."""
    call, seen = recorded(toy), []
    for launch in toy.launches:
        launch.compiled = {launch.grid: lambda *given, stream: seen.append(given)}
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    call(inputs())
    assert toy.ran == 3 and len(seen) == 2 and not toy.driver.launches


def test_another_gpu_takes_the_call_itself(toy, monkeypatch):
    call = recorded(toy)
    monkeypatch.setattr(calls.device, "is_current", lambda where: False)
    call(inputs())
    assert toy.ran == 3


@pytest.fixture
def contexts(monkeypatch):
    """A list with an entry for each time that the context was made current."""
    made = []
    monkeypatch.setattr(calls.device, "make_context_current", lambda: made.append(True))
    return made


@pytest.mark.parametrize("of", ["code", "code_of_encode"])
def test_a_thread_without_a_context_takes_the_call_itself(toy, of):
    """An allocation from PyTorch's cache makes none current, and neither does a launch or a tensor map."""
    call = recorded(toy)
    setattr(toy.driver, of, driver.INVALID_CONTEXT)
    call(inputs())
    assert toy.ran == 3


@pytest.mark.parametrize("says", ["Failed to create tensor map descriptor: invalid device context", "out of memory"])
def test_triton_in_a_thread_without_a_context(toy, contexts, says):
    """It raises where the driver refuses; other errors of its stay what they are."""
    call = Call(toy.run)
    call(inputs())

    def fail_once(*given, **launch):
        if not contexts:
            raise RuntimeError(f"Triton Error [CUDA]: {says}")

    for launch in toy.launches:
        launch.compiled.run = fail_once
    if says == "out of memory":
        with pytest.raises(RuntimeError, match="out of memory"):
            call(inputs())
    else:
        call(inputs())
        assert contexts == [True]


def test_an_error_of_the_driver_names_the_kernels(toy):
    call = recorded(toy)
    toy.driver.code = 700
    with pytest.raises(RuntimeError, match="toy_kernel, toy_kernel could not be launched: CUDA error 700"):
        call(inputs())


def another_operator(x, y):
    x.add_(1)
    return y


OTHER = inputs()[1]
REFUSED = {
    "another operator": ({"extra": another_operator}, inputs, "it runs aten.add_"),
    "a copy": ({"extra": lambda x, y: y.clone()}, inputs, "it runs aten.clone"),
    "a tensor from elsewhere": ({"extra": lambda x, y: OTHER}, inputs, "from elsewhere"),
    "an odd address": ({}, lambda: (odd(torch.zeros(8)), inputs()[1]), "an address is odd"),
    "nothing launched": ({"launches": []}, inputs, "nothing was launched"),
    "a tensor that is given twice": ({}, lambda: (OTHER, OTHER), "given twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_replay_is_refused(toy, case):
    """It is tried a few times, and then no more."""
    changed, make, refusal = REFUSED[case]
    for name, value in changed.items():
        setattr(toy, name, value)
    call = Call(toy.run)
    for _ in range(8):
        call(make())
    assert refusal in call.refusal and toy.ran == 8


def test_without_a_driver_nothing_is_replayed(toy, monkeypatch):
    monkeypatch.setattr(driver, "cuda_driver", lambda: None)
    call = Call(toy.run)
    for _ in range(3):
        call(inputs())
    assert "no CUDA driver" in call.refusal and toy.ran == 3


def test_a_recording_ends_with_its_call(toy):
    """Also where that fails: launches of other calls are none of its own."""
    recording = Recording()
    with pytest.raises(ZeroDivisionError), recording:
        toy.run(inputs())
        raise ZeroDivisionError
    toy.run(inputs())
    assert len(recording.launches) == 2 and len(recording.made) == 4


def test_a_signature_has_one_call(monkeypatch):
    """Shapes, strides, dtypes, alignment, what is given, the problem and the configuration are its parts."""
    monkeypatch.setattr(calls, "_known", {})
    prepared = []

    def prepare(*given):
        prepared.append(given)
        return lambda tensors: None

    def known(problem, tensors, *config):
        return call_of(prepare, problem, tensors, *config)

    x, config = torch.zeros(4, 6), object()
    signatures = [
        ("problem", (x, None)),
        ("another", (x, None)),
        ("problem", (x, x)),
        ("problem", (x.t(), None)),
        ("problem", (x.half(), None)),
        ("problem", (x[:, :4], None)),
        ("problem", (odd(x), None)),
        ("problem", (x, None), config),
        ("problem", (x, None), object()),
    ]
    every = [known(*signature) for signature in signatures]
    assert len(set(map(id, every))) == len(every) == len(prepared)
    assert [known(*signature) for signature in signatures] == every and len(prepared) == len(every)
    assert known("problem", (x.clone(), None)) is every[0]
    assert call_of(lambda *given: prepare(*given), "problem", (x, None)) is not every[0]
    monkeypatch.setattr(calls, "_MAX_CALLS", len(every) + 1)
    assert known("a third", (x, None)) not in every and known("problem", (x, None)) is not every[0]
    calls.forget()
    assert calls._known == {}
