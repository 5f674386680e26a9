"""What vLLM's tests of its CPU kernels of these operators import, served by Wyvern."""
