"""Not asked of kernels that do not come from it."""


def is_cute_dsl_arch_supported(major: int, minor: int) -> bool:
    return True
