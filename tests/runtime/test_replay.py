"""Replayed calls: the driver reads what the call itself would have given it, and what cannot be replayed is not."""

import struct

import pytest
import torch
from triton import knobs

from fused_rope_attn.runtime import direct_launch, driver, replay
from fused_rope_attn.runtime.launch import Launch, PreparedCalls, Source
from fused_rope_attn.runtime.replay import Recording, Replayed
from fused_rope_attn.runtime.triton_compat import gl
from tests.support.driver import ARGUMENTS, GRID, RecordingDriver, ToyKernel, compiled_kernel, toy_map

LAYOUT = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.bfloat16)


class Call:
    """Two launches of the toy kernel: the first writes scratch memory, the second reads it and writes the results."""

    def __init__(self, monkeypatch, **options):
        self.driver = RecordingDriver(**options)
        monkeypatch.setattr(driver, "load", lambda: self.driver)
        monkeypatch.setattr(direct_launch, "encode_tensor_map", toy_map)
        self.launches = [Launch(ToyKernel(compiled_kernel()), GRID[0], {"num_warps": 4}, ARGUMENTS) for _ in range(2)]
        self.source = Source(inputs()[1], 64, 64, True, LAYOUT)
        self.ran = 0
        self.extra = lambda x, y: y

    def run(self, x, y):
        self.ran += 1
        z = torch.empty_strided((4, 2), (1, 4), dtype=torch.bfloat16)
        like = torch.empty_like(y)
        sums, counter = torch.empty(100), torch.empty((3,), dtype=torch.int32)
        y = self.extra(x, y)
        for launch, first in zip(self.launches, (x, sums)):
            launch(0, x_ptr=first, y_desc=self.source(y), no_ptr=None, z_ptr=counter if first is x else z)
        return z, None, like

    def __call__(self, replayed, x, y):
        return replayed((x, y), lambda: self.run(x, y))


def inputs():
    return torch.zeros(8), torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16)


@pytest.fixture
def call(monkeypatch):
    return Call(monkeypatch)


def recorded(call):
    """A call that was recorded, at the second time."""
    replayed = Replayed()
    for _ in range(2):
        call(replayed, *inputs())
    assert replayed.refusal == "" and call.ran == 2
    call.driver.launches.clear()
    return replayed


def test_the_driver_reads_what_the_call_would_have_given_it(call):
    replayed = recorded(call)
    for _ in range(2):
        x, y = inputs()
        z, none, like = call(replayed, x, y)
        first, second = call.driver.launches[-2:]
        assert none is None and z.shape == (4, 2) and z.stride() == (1, 4) and z.dtype is torch.bfloat16
        assert like.shape == y.shape and like.stride() == y.stride() and like.dtype is y.dtype
        assert first.values[0] == struct.pack("<Q", x.data_ptr())
        assert second.values[10] == struct.pack("<Q", z.data_ptr())
        for made in (first, second):
            assert made.values[1] == toy_map(y.data_ptr()) and made.misaligned == [] and made.stream == 0
        # What is neither given nor returned shares one allocation.
        counter, sums = (struct.unpack("<Q", value)[0] for value in (first.values[10], second.values[0]))
        assert counter - sums == 512
    assert call.ran == 2
    # Everything else is that of the launches themselves.
    call.run(*inputs())
    for replayed_launch, launch in zip(call.driver.launches[-4:-2], call.driver.launches[-2:]):
        assert replayed_launch.values[2:10] == launch.values[2:10]
        assert replayed_launch.values[11:] == launch.values[11:]
        assert (replayed_launch.grid, replayed_launch.block, replayed_launch.shared, replayed_launch.attributes) == (
            launch.grid, launch.block, launch.shared, launch.attributes
        )  # fmt: skip


def test_much_scratch_memory_stays_in_parts(call, monkeypatch):
    monkeypatch.setattr(replay, "MOST_SCRATCH_BYTES", 700)
    replayed = recorded(call)
    z, none, like = call(replayed, *inputs())
    first, second = call.driver.launches
    assert none is None and z.shape == (4, 2) and like.shape == (3, 2, 64, 64)
    assert second.values[10] == struct.pack("<Q", z.data_ptr()) and call.ran == 2


def test_a_stream_is_written_where_it_changed(call, monkeypatch):
    replayed = recorded(call)
    for stream in (5, 5, 7):
        monkeypatch.setattr(replay.device, "current_stream", lambda where: stream)  # noqa: B023
        call(replayed, *inputs())
    assert [made.stream for made in call.driver.launches] == [5, 5, 5, 5, 7, 7]


def odd(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


@pytest.mark.parametrize("which", [0, 1])
def test_an_odd_address_takes_the_call_itself(call, which):
    replayed = recorded(call)
    given = list(inputs())
    given[which] = odd(given[which])
    call(replayed, *given)
    assert call.ran == 3
    call(replayed, *inputs())
    assert call.ran == 3


def test_a_profiler_sees_the_call_itself(call, monkeypatch):
    replayed = recorded(call)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    monkeypatch.setattr(Launch, "launch_by_triton", lambda *given: None)
    call(replayed, *inputs())
    assert call.ran == 3 and not call.driver.launches


def test_another_gpu_takes_the_call_itself(call, monkeypatch):
    replayed = recorded(call)
    monkeypatch.setattr(replay.device, "is_current", lambda where: False)
    call(replayed, *inputs())
    assert call.ran == 3


def test_what_was_forgotten_is_recorded_anew(call):
    replayed = recorded(call)
    PreparedCalls.forget_all()
    for ran in (3, 4, 4):
        call(replayed, *inputs())
        assert call.ran == ran


def test_a_thread_without_a_context(call, monkeypatch):
    replayed = recorded(call)
    monkeypatch.setattr(replay.device, "current_gpu", lambda: 3)
    call.driver.code = driver.INVALID_CONTEXT
    call(replayed, *inputs())
    assert call.driver.current == [3] and len(call.driver.launches) == 3 and call.ran == 2


def test_a_thread_that_cannot_encode_a_tensor_map_takes_the_call_itself(call, monkeypatch):
    replayed = recorded(call)
    monkeypatch.setattr(replay.device, "current_gpu", lambda: 0)
    for launch in call.launches:
        launch.direct.described[0].maps.clear()
        launch.direct.described[0]._encode = fail_once()
    call(replayed, *inputs())
    assert call.ran == 3


def fail_once():
    failures = [RuntimeError("Failed to create tensor map descriptor: invalid device context")]

    def encode(address):
        if failures:
            raise failures.pop()
        return toy_map(address)

    return encode


def test_an_error_of_the_driver_names_the_kernels(call):
    replayed = recorded(call)
    call.driver.code = 700
    with pytest.raises(RuntimeError, match="toy_kernel, toy_kernel could not be launched: CUDA error 700"):
        call(replayed, *inputs())


def another_operator(x, y):
    x.add_(1)
    return y


REFUSED = {
    "another operator": ({"extra": another_operator}, inputs, "it runs aten.add_"),
    "a copy": ({"extra": lambda x, y: y.clone()}, inputs, "it runs aten.clone"),
    "a tensor from elsewhere": ({"extra": lambda x, y: OTHER}, inputs, "from elsewhere"),
    "an odd address": ({}, lambda: (odd(torch.zeros(8)), inputs()[1]), "an address is odd"),
    "nothing launched": ({"launches": []}, inputs, "nothing was launched"),
}
OTHER = inputs()[1]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_replay_is_refused(call, case):
    """It is tried a few times, and then no more."""
    changed, make, refusal = REFUSED[case]
    for name, value in changed.items():
        setattr(call, name, value)
    replayed = Replayed()
    for _ in range(8):
        call(replayed, *make())
    assert refusal in replayed.refusal and call.ran == 8


def test_a_tensor_that_is_given_twice_is_refused(call):
    replayed, run = Replayed(), call.run
    (_, y) = inputs()
    for _ in range(3):
        replayed((y, y), lambda: run(y, y))
    assert "given twice" in replayed.refusal


def test_launches_by_triton_are_refused(call, monkeypatch):
    monkeypatch.setattr(driver, "load", lambda: None)
    replayed = Replayed()
    for _ in range(3):
        call(replayed, *inputs())
    assert "no CUDA driver" in replayed.refusal and call.ran == 3


def test_a_recording_ends_with_its_call(call):
    """Also where that fails: launches of other calls are none of its own."""
    recording = Recording()
    with pytest.raises(ZeroDivisionError), recording:
        call.run(*inputs())
        raise ZeroDivisionError
    call.run(*inputs())
    assert len(recording.launches) == 2 and len(recording.made) == 4
