"""Energy and clock of a GPU, from NVIDIA's management library, which comes with the driver."""

import ctypes

import torch

CLOCK_SM = 1


class NvmlError(Exception):
    """An error of NVML, or the reason why NVML cannot be used."""


class Meter:
    """Reads the energy counter and the SM clock of torch's current GPU.

    Raises NvmlError if there is no NVML, or if it does not know the GPU.
    """

    def __init__(self):
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError(f"NVML cannot be loaded: {error}") from error
        self._nvml.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")
        # The GPU is found by its UUID, since NVML and CUDA number GPUs differently.
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        self._gpu = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(self._gpu))

    def joules(self):
        """The energy that the board has taken since the driver was loaded. The counter moves only at its updates."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._gpu, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def sm_mhz(self):
        """The clock of the SMs."""
        mhz = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._gpu, CLOCK_SM, ctypes.byref(mhz))
        return mhz.value

    def _call(self, function, *arguments):
        status = getattr(self._nvml, function)(*arguments)
        if status != 0:
            raise NvmlError(f"{function}: {self._nvml.nvmlErrorString(status).decode()}")
