"""The compiler of wyvern's CPU kernels: a library that the package ``wyvern`` finds beside itself."""
