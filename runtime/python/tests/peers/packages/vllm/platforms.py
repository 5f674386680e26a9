"""The tests' platform."""


class current_platform:  # noqa: N801 (vLLM's name of an object)
    @staticmethod
    def is_cpu() -> bool:
        return True
