"""A GPU that is arithmetic: a queue of work in its own time, an energy counter, and replacements of CUDA's objects."""

import types

import torch


class Machine:
    """Time passes by sleeping and by waiting for the device. ``watts`` while the device works, ``idle_watts`` else; the
    counter shows the energy up to the last multiple of ``step`` seconds. ``gaps``: seconds that the device waited
    between two pieces of work. ``streams``: how many streams are entered."""

    def __init__(self, call_ms=0.1, watts=650.0, idle_watts=100.0, step=0.02):
        self.now, self.end, self.gaps, self.call_ms = 0.0, 0.0, [], call_ms
        self.watts, self.idle_watts, self.step = watts, idle_watts, step
        self.streams = 0
        self._busy, self._counted = 0.0, 0  # seconds of the calls that ended before the last look at the counter
        self._work, self._outputs = [], []  # (begin, end) and outputs of all calls queued so far

    def work(self, out=None):
        """One call, which fills ``out`` with ones. Returns ``out``."""
        begin = max(self.now, self.end)
        self.gaps.append(begin - self.end)
        self.end = begin + self.call_ms * 1e-3
        self._work.append((begin, self.end))
        self._outputs.append(out)
        return out if out is None else out.fill_(1.0)

    def synchronize(self, device=None):
        self.now = max(self.now, self.end)

    def sleep(self, seconds):
        self.now += seconds

    # The counter of ``bench.load``.

    def millijoules(self):
        at = self.step * int(self.now / self.step + 1e-9)
        while self._counted < len(self._work) and self._work[self._counted][1] <= at:
            begin, end = self._work[self._counted]
            self._busy, self._counted = self._busy + end - begin, self._counted + 1
        busy = self._busy
        if self._counted < len(self._work):
            busy += max(0.0, at - self._work[self._counted][0])
        return round(1e3 * (self.watts * busy + self.idle_watts * (at - busy)))

    def install(self, monkeypatch, *modules):
        """Events, streams and graphs of ``torch.cuda``, and the ``time`` of these modules, become this machine's."""
        machine = self

        class Event:
            def __init__(self, enable_timing=False):
                self.timed = enable_timing

            def record(self):
                self.at = max(machine.now, machine.end)

            def query(self):
                return machine.now >= self.at

            def elapsed_time(self, end):
                assert self.timed and end.timed
                return 1e3 * (end.at - self.at)

        class Stream:
            def __init__(self, *device):
                pass

            def __enter__(self):
                machine.streams += 1

            def __exit__(self, *error):
                machine.streams -= 1

        class Graph:
            """Replays what is called between begin and end."""

            def capture_begin(self):
                self.before = len(machine._work)

            def capture_end(self):
                self.outputs = machine._outputs[self.before :]

            def replay(self):
                for out in self.outputs:
                    machine.work(out)

        clock = types.SimpleNamespace(perf_counter=lambda: machine.now, sleep=machine.sleep)
        clock.perf_counter_ns = lambda: 1e9 * machine.now
        for module in modules:
            monkeypatch.setattr(module, "time", clock)
        for name, stand_in in (("Event", Event), ("Stream", Stream), ("CUDAGraph", Graph)):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
