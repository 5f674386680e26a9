"""The problems that are measured, as data.

Symbols: B sequences of T tokens (or `lengths`, a packed batch), H key heads, HV value heads,
K = V = D.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

# The mean of the gates, natural logarithms of a token's decay. Times of some kernels depend on it.
GATE_MEANS = {
    "gdn": {"strong": -0.25, "weak": -0.001},
    "kda": {"strong": -2.5, "weak": -0.005},
}


@dataclass(frozen=True)
class Row:
    """One problem. `must` and `reach` are milliseconds on an H200, where there is such a target."""

    op: str  # gdn, delta_rule or kda
    H: int
    HV: int
    B: int
    T: int
    D: int = 128
    lengths: tuple[int, ...] = ()
    gate: str = "strong"  # of GATE_MEANS; delta_rule has none
    bounded: bool = False  # kda: bound -5, gate, sigmoid and norms in the kernel
    dtype: str = "bf16"
    part: str = "forward"  # or "both": forward and backward; or "backward"
    must: float | None = None
    reach: float | None = None

    @property
    def N(self) -> int:
        return len(self.lengths) or self.B

    @property
    def tokens(self) -> int:
        return self.B * self.T

    @property
    def name(self) -> str:
        tokens = f"{self.B}x{self.T}"
        if self.lengths:
            equal = len(set(self.lengths)) == 1
            most = f"{min(self.lengths)}to{max(self.lengths)}"
            tokens = f"{self.N}x{self.lengths[0]}" if equal else f"{self.N}x{most}"
            tokens += "-packed"
        pieces = [
            self.op,
            f"{self.H}of{self.HV}",
            tokens,
            f"D{self.D}" if self.D != 128 else "",
            self.dtype if self.dtype != "bf16" else "",
            "bounded" if self.bounded else "",
            self.gate if self.op != "delta_rule" else "",
            self.part if self.part != "forward" else "",
        ]
        return "-".join(piece for piece in pieces if piece)

    @property
    def kernels(self) -> tuple:
        """Rows where this is equal share the kernels of most libraries, which compile by shape."""
        return (
            self.part,
            self.op,
            self.bounded,
            self.dtype,
            self.D,
            self.H,
            self.HV,
            bool(self.lengths),
        )

    def describe(self) -> dict:
        fields = dataclasses.asdict(self)
        return {"row": self.name, "N": self.N, "tokens": self.tokens, **fields,
                "lengths": list(self.lengths)}  # fmt: skip


def packed(op: str, H: int, HV: int, lengths: list[int], **rest) -> Row:
    return Row(op, H, HV, 1, sum(lengths), lengths=tuple(lengths), **rest)


def both_gates(row: Row, weak: tuple[float, float] | None = None) -> list[Row]:
    """The row with strong gates and with weak ones, whose targets are the same unless given."""
    must, reach = weak or (row.must, row.reach)
    return [row, dataclasses.replace(row, gate="weak", must=must, reach=reach)]


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """Ragged lengths from the shortest to the longest, in no order."""
    step = 7919  # a prime, so that all residues are met
    return [shortest + (n * step) % (longest - shortest + 1) for n in range(count)]


RAGGED = [1300, 547, 2048, 963, 271, 3063]


def _bounded(H: int, B: int, T: int, must: float, reach: float, **rest) -> Row:
    return Row("kda", H, H, B, T, bounded=True, must=must, reach=reach, **rest)


# Forward passes that have a target.
TARGETS = [
    Row("gdn", 16, 64, 1, 8192, must=0.30, reach=0.15),
    Row("gdn", 16, 64, 1, 32768, must=1.15, reach=0.57),
    packed("gdn", 16, 64, [4096] * 8, must=0.60, reach=0.48),
    packed("gdn", 8, 32, [4096] * 8, must=0.30, reach=0.24),
    Row("gdn", 8, 32, 1, 8192, must=0.21, reach=0.10),
    Row("gdn", 2, 8, 1, 32768, must=0.18, reach=0.11),
    Row("gdn", 2, 8, 1, 8192, must=0.088, reach=0.045),
    Row("gdn", 16, 32, 1, 2048, reach=0.03),
    Row("gdn", 64, 64, 4, 4096, must=0.30, reach=0.29),
    Row("gdn", 64, 64, 1, 8192, must=0.27, reach=0.16),
    Row("gdn", 16, 32, 1, 32768, must=0.62, reach=0.30),
    Row("gdn", 8, 8, 1, 65536, gate="weak", must=0.32, reach=0.20),
    packed("gdn", 4, 8, [64] * 64 + [32768], gate="weak", must=0.40, reach=0.25),
    Row("gdn", 8, 8, 16, 2048, D=256, must=0.55, reach=0.28),
    Row("gdn", 8, 8, 16, 16384, D=256, must=4.0, reach=2.0),
    Row("delta_rule", 16, 16, 1, 8192, must=0.12, reach=0.09),
    Row("delta_rule", 64, 64, 4, 4096, must=0.50, reach=0.29),
    Row("delta_rule", 64, 64, 1, 8192, must=0.27, reach=0.18),
    *both_gates(_bounded(96, 1, 8192, 0.67, 0.34)),
    *both_gates(_bounded(64, 1, 8192, 0.475, 0.35)),
    *both_gates(_bounded(64, 4, 4096, 0.90, 0.48)),
    *both_gates(packed("kda", 64, 64, RAGGED, bounded=True, must=0.50, reach=0.25)),
    *both_gates(packed("kda", 32, 32, [4096] * 8, bounded=True, must=0.90, reach=0.48)),
    *both_gates(packed("kda", 16, 16, [2048] * 8, bounded=True, must=0.24, reach=0.13)),
    *both_gates(_bounded(64, 1, 512, 0.05, 0.025)),
    *both_gates(_bounded(12, 1, 2048, 0.041, 0.018), weak=(0.045, 0.035)),
    *both_gates(_bounded(8, 1, 32768, 0.29, 0.15), weak=(0.30, 0.15)),
    *both_gates(Row("kda", 64, 64, 1, 8192, must=0.315, reach=0.25)),
    Row("kda", 20, 20, 1, 12000, must=0.148, reach=0.10),
    Row("kda", 16, 32, 1, 8192, must=0.16),
    Row("kda", 4, 4, 1, 32768, bounded=True, must=0.157),
    Row("kda", 8, 8, 1, 8192, D=256, bounded=True, must=0.30, reach=0.20),
]

# Further forward passes: head sizes, heads, lengths, packs, gates and dtypes that no target names.
SWEEP = [
    Row("gdn", 32, 32, 1, 8192, D=64),
    Row("gdn", 4, 16, 1, 16384, D=64),
    Row("gdn", 128, 128, 1, 2048, D=64),
    Row("gdn", 16, 16, 1, 8192, D=256),
    Row("gdn", 4, 4, 1, 65536, D=256, gate="weak"),
    Row("gdn", 1, 1, 1, 8192),
    Row("gdn", 1, 4, 1, 131072, gate="weak"),
    Row("gdn", 128, 128, 1, 2048),
    Row("gdn", 16, 32, 1, 64),
    Row("gdn", 16, 32, 1, 512),
    Row("gdn", 16, 32, 1, 131072),
    Row("gdn", 16, 64, 1, 8192, gate="weak"),
    Row("gdn", 24, 48, 3, 5000),
    Row("gdn", 16, 32, 1, 8192, dtype="fp16"),
    packed("gdn", 16, 32, RAGGED),
    packed("gdn", 16, 32, spread(256, 1, 500)),
    Row("delta_rule", 4, 4, 1, 32768, dtype="fp16"),
    packed("delta_rule", 16, 16, spread(32, 16, 2000)),
    *both_gates(Row("kda", 32, 32, 1, 8192, bounded=True)),
    Row("kda", 1, 1, 1, 131072, bounded=True, gate="weak"),
    Row("kda", 128, 128, 1, 2048, bounded=True),
    Row("kda", 32, 32, 1, 64, bounded=True),
    Row("kda", 32, 32, 1, 4096, D=64, bounded=True),
    Row("kda", 32, 32, 1, 4096, dtype="fp16", bounded=True),
    packed("kda", 32, 32, spread(64, 1, 1000), bounded=True),
    packed("kda", 8, 8, [64] * 64 + [16384], bounded=True, gate="weak"),
    Row("kda", 8, 8, 1, 65536, gate="weak"),
    # Slow decay beside targets that are of fast decay alone.
    Row("kda", 20, 20, 1, 12000, gate="weak"),
    Row("kda", 16, 32, 1, 8192, gate="weak"),
    Row("kda", 4, 4, 1, 32768, bounded=True, gate="weak"),
    Row("kda", 8, 8, 1, 8192, D=256, bounded=True, gate="weak"),
]

# Where no peer's time is known, the target is a ratio to it, and there is no `must`.
TRAINING = [
    Row("gdn", 64, 64, 4, 4096, part="both", must=1.85, reach=1.4),
    Row("gdn", 64, 64, 1, 8192, part="both", must=1.1, reach=0.8),
    Row("gdn", 16, 64, 1, 8192, part="both", reach=0.85),
    Row("gdn", 24, 48, 3, 5000, part="both", must=2.4, reach=1.5),
    Row("gdn", 2, 8, 1, 32768, part="both", reach=0.7),
    Row("gdn", 16, 32, 1, 32768, part="backward", must=1.95, reach=1.6),
    Row("gdn", 8, 8, 16, 16384, D=256, part="both", must=20, reach=15),
    Row("gdn", 8, 8, 16, 2048, D=256, part="both", must=2.5, reach=1.9),
    Row("delta_rule", 64, 64, 4, 4096, part="both", must=1.85, reach=1.4),
    Row("delta_rule", 64, 64, 1, 8192, part="both", must=1.1, reach=0.8),
    Row("kda", 64, 64, 1, 8192, part="both", must=2.25, reach=1.9),
    Row("kda", 64, 64, 4, 4096, part="both", must=4.75, reach=3.6),
    Row("kda", 32, 32, 1, 8192, gate="weak", part="both", must=2.0, reach=1.1),
    Row("kda", 64, 64, 1, 8192, bounded=True, part="both", must=2.3, reach=1.9),
]

# Further training steps: GVA 2 and 4, ragged packs, slow decay, lengths that no chunk divides, one chunk.
MORE_TRAINING = [
    *both_gates(Row("gdn", 16, 32, 1, 4096, part="both")),
    Row("gdn", 16, 32, 3, 5001, part="both"),
    Row("gdn", 16, 32, 64, 64, part="both"),
    Row("gdn", 16, 32, 1, 64, part="both"),
    Row("gdn", 16, 64, 2, 2048, gate="weak", part="both"),
    packed("gdn", 16, 32, RAGGED, part="both"),
    packed("gdn", 16, 32, spread(64, 1, 500), gate="weak", part="both"),
    Row("gdn", 2, 8, 1, 32768, gate="weak", part="both"),
    Row("gdn", 4, 4, 1, 65536, gate="weak", part="both"),
    Row("delta_rule", 16, 16, 1, 8192, part="both"),
    Row("gdn", 8, 8, 4, 3000, D=256, part="both"),
]

# A few of each kind that a CPU computes in moments.
SMALL = [
    Row("gdn", 1, 2, 1, 96, D=32),
    packed("gdn", 1, 1, [40, 0, 25], D=16),
    Row("delta_rule", 2, 2, 2, 40, D=16),
    *both_gates(Row("kda", 1, 1, 1, 70, D=32, bounded=True)),
    Row("gdn", 1, 1, 1, 48, D=16, part="both"),
]

SETS = {
    "targets": TARGETS,
    "sweep": SWEEP,
    "training": TRAINING,
    "more-training": MORE_TRAINING,
    "small": SMALL,
}


def chosen(sets: list[str]) -> list[Row]:
    """The rows of these sets, those that share kernels one after the other."""
    rows = list(dict.fromkeys(row for name in sets for row in SETS[name]))
    first = {}
    for at, row in enumerate(rows):
        first.setdefault(row.kernels, at)
    return sorted(rows, key=lambda row: (first[row.kernels], rows.index(row)))
