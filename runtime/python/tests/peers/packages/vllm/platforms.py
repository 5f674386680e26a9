"""The tests' platform: the device that they run on, which vLLM would take for a CPU or a CUDA GPU."""

import torch


class current_platform:  # noqa: N801 (vLLM's name of an object)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"

    @classmethod
    def is_cpu(cls) -> bool:
        return cls.device_type == "cpu"

    @classmethod
    def is_cuda_alike(cls) -> bool:
        return cls.device_type == "cuda"

    @staticmethod
    def is_xpu() -> bool:
        return False
