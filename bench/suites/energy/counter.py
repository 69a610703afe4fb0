"""Energy, clock and power limit of a GPU, as NVIDIA's management library (NVML) gives them."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Counter(Protocol):
    """What ``clock.LoadClock`` asks of a card."""

    def millijoules(self) -> int:
        """What the card has used since its driver was loaded. It moves in steps, some tens of milliseconds apart."""

    def megahertz(self) -> int:
        """The clock of the multiprocessors now."""

    def limit_watts(self) -> float | None:
        """The power limit in force, or None where the card does not say."""


class Nvml:
    """The counter of one CUDA device. The whole card is counted, with its memory, and with whoever else uses it.

    RuntimeError, with what was missing, where NVML, the card or its energy counter cannot be reached.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError:
            raise RuntimeError("energy is read through NVML: pip install nvidia-ml-py") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            # By its identity: NVML's numbers know nothing of CUDA_VISIBLE_DEVICES.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._card: Any = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self.millijoules()
        except pynvml.NVMLError as error:
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(f"{name} must have an energy counter that NVML reads, but NVML says: {error}") from error

    def millijoules(self) -> int:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)

    def megahertz(self) -> int:
        return self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM)

    def limit_watts(self) -> float | None:
        try:
            return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card) / 1e3
        except self._nvml.NVMLError:
            return None
