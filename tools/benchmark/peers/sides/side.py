"""What a library that is measured has to say about itself."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from inputs import Inputs
from rows import Row


@dataclass
class Call:
    """A library's call on a row's tensors. `run` gives what `read` makes o [B,T,HV,V] and the final
    state [N,HV,K,V] of (None where there is none). `leaves` are the tensors that it takes, by the
    names of Inputs: what has gradients in a training row, in the shapes that the library takes."""

    run: Callable[[], object]
    read: Callable[[object], tuple[Tensor, Tensor | None]]
    leaves: dict[str, Tensor] = field(default_factory=dict)


class Side:
    """A library, or a way to call it. Subclasses say what it is and how it is called."""

    name = ""
    about = ""
    modules: tuple[str, ...] = ()  # that must be importable
    packages: tuple[str, ...] = ()  # whose versions are written down
    devices: tuple[str, ...] = ("cuda",)
    trains = False
    state_v_first = False  # whether its states are [N,HV,V,K]

    def absent(self) -> str | None:
        """Why it cannot be measured here: what is not installed or does not load."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except (
                Exception
            ) as error:  # some libraries fail in their own ways where there is no GPU
                return f"{module}: {one_line(error)}"
        return None

    def versions(self) -> dict[str, str]:
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                pass
        return found

    def declines(self, row: Row) -> str | None:
        """Why it does not compute this row."""
        return None

    def activate(self) -> None:
        """Called before each use, outside the timed region."""

    def prepare(self, row: Row, x: Inputs) -> Call:
        raise NotImplementedError

    def notes(self) -> dict[str, object]:
        """What is worth knowing about what it ran, after it has."""
        return {}

    def own_state(self, x: Inputs) -> Tensor:
        """The initial state in its layout."""
        state = x.initial_state
        return state.transpose(-1, -2).contiguous() if self.state_v_first else state

    def leaves(self, row: Row, x: Inputs) -> dict[str, Tensor]:
        """Tensors of its own to take gradients of, those of Inputs where it is not trained."""
        given = x.given() | {"initial_state": self.own_state(x)}
        if row.part == "forward":
            return given
        return {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}

    def k_first(self, state: Tensor | None) -> Tensor | None:
        return state.transpose(-1, -2) if state is not None and self.state_v_first else state


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def kda_options(x: Inputs, row: Row) -> dict[str, object]:
    """Of flash-linear-attention's chunk_kda, and of what has its arguments."""
    if not row.bounded:
        return {}
    return dict(
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        A_log=x.A_log,
        dt_bias=x.dt_bias.reshape(-1),
    )
