"""The slot of null sequences."""

NULL_BLOCK_ID = 0
