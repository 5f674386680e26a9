"""One plan for all ranks of a job."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from .._extension import extension, prepared
from .._records import Cell, Records

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Differences(Records):
    """What :func:`agree` gives."""

    def _heading(self) -> tuple[str, ...]:
        return ("problem", "ranks that had another plan", "plan of rank")

    def _lines(self) -> list[tuple[Cell, ...]]:
        return [
            (one["problem"], ", ".join(map(str, one["ranks"])), str(one["plan_of"]))
            for one in self
        ]


def _plans() -> dict[str, str]:
    """The plan of each problem that this process prepared, as JSON; of several the least text."""
    plans: dict[str, str] = {}
    for one in prepared():
        plan = json.dumps(one["plan"], sort_keys=True)
        plans[one["problem"]] = min(plan, plans.get(one["problem"], plan))
    return plans


def _digest(plans: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(plans, sort_keys=True).encode()).hexdigest()


def plan_digest() -> str:
    """SHA-256, in hexadecimal, of the problems that operators of this process were prepared for and of
    their plans: of :func:`wyvern.prepared` without devices and origins. Two processes with the same
    digest launch the same kernels for the same calls. Thread-safe."""
    return _digest(_plans())


def agree(group: ProcessGroup | None = None) -> Differences:
    """Has all ranks of ``group`` (default: of the whole job) use one plan for each problem.

    Every rank of the group calls it, after a step that met the problems of the model and outside the
    capture of a graph, with ``torch.distributed`` initialized. Where digests of plans differ, each
    problem gets the plan of the lowest rank that has met it: rank 0's, where it has. From then on calls
    of the problem are by that plan in every rank, whatever the policy, also in those that have not met it
    yet; their origin is "given". A problem that no rank had met stays with the policy: call it again.
    Captured graphs keep their plans.

    Returns the problems for which a rank had another plan, the same list in every rank, empty where there
    is none: a list of dictionaries ("problem", "ranks", "plan_of" the rank whose plan it is, "plan"),
    which prints as a table. ValueError where ranks made other calls with a ``cp_context`` of this group than
    the rest, or in another order. RuntimeError where ``torch.distributed`` is not initialized; a later call
    raises a ValueError that names the plan where this rank's device cannot have it.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group() first"
        )
    from ._exchange import calls_of

    mine, calls = _plans(), calls_of(dist.group.WORLD if group is None else group)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (_digest(mine), mine, calls), group=group)
    made = [calls for _, _, calls in gathered]
    if len(set(made)) > 1:
        found = "; ".join(f"rank {rank}: {calls}" for rank, calls in enumerate(made))
        raise ValueError(
            f"the ranks' calls with a cp_context of group differ ({found}); all must make the same in one order"
        )
    if len({digest for digest, _, _ in gathered}) == 1:
        return Differences()
    every = [plans for _, plans, _ in gathered]
    found = Differences()
    for problem in sorted(set().union(*every)):
        first = next(rank for rank, plans in enumerate(every) if problem in plans)
        plan = every[first][problem]
        extension().wyvern_extension_use_plan(problem.encode(), plan.encode())
        others = [rank for rank, plans in enumerate(every) if plans.get(problem, plan) != plan]
        if others:
            found.append(
                {"problem": problem, "ranks": others, "plan_of": first, "plan": json.loads(plan)}
            )
    extension().wyvern_extension_forget()
    return found
