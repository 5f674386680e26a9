"""Of FlashInfer's kernels by name, those with states in bfloat16."""
