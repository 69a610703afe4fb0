"""A clock for runs of the benchmark on a machine without a GPU."""

import time

import torch

from bench.timing import Measurement


class WallClock:
    """The methods of ``bench.timing.GpuClock`` by wall time. The times mean nothing, and graphs are plain calls."""

    device = torch.device("cpu")
    measurement = Measurement

    def synchronize(self):
        pass

    def sample(self, fn, calls):
        samples = []
        for _ in range(calls):
            begin = time.perf_counter()
            fn()
            samples.append(1e3 * (time.perf_counter() - begin))
        return samples

    def calls_for(self, fn, round_ms):
        return 2

    def capture(self, make):
        return make()

    def peak_mib(self, fn):
        fn()
        return 1.5

    def host_sample(self, fn, calls):
        return [sum(self.sample(fn, 3)) / 3]

    def release(self):
        pass
