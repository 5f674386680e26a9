"""Wyvern, by the plan that its cache has and by the default plan."""

from __future__ import annotations

from inputs import Inputs
from rows import Row
from sides.side import Call, Side, kda_options


class Wyvern(Side):
    name = "wyvern"
    about = "Wyvern, the tuned plan where one is stored"
    modules = ("wyvern.ops",)
    devices = ("cuda", "cpu")
    trains = True
    policy = "cached"

    def versions(self) -> dict[str, str]:
        import wyvern

        return {"wyvern": wyvern.__version__} | super().versions()

    def activate(self) -> None:
        import wyvern

        wyvern.policy(self.policy)

    def prepare(self, row: Row, x: Inputs) -> Call:
        import wyvern

        leaves = self.leaves(row, x)
        options = dict(output_final_state=True, cu_seqlens=x.cu_seqlens)
        if x.cu_seqlens is not None:  # FLA's layers know it there too
            options["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
        if row.op == "kda":
            function, options = wyvern.ops.chunk_kda, options | kda_options(x, row)
        elif row.op == "gdn":
            function = wyvern.ops.chunk_gated_delta_rule
        else:
            function = wyvern.ops.chunk_delta_rule
        return Call(lambda: function(**leaves, **options), lambda result: result, leaves)

    def tune(self, call: Call, seconds: float) -> list[dict]:
        import wyvern

        return wyvern.tune(call.run, budget=seconds, progress=False)

    def notes(self) -> dict[str, object]:
        import wyvern

        keys = ("problem", "origin", "plan")
        return {"plans": [{key: one[key] for key in keys} for one in wyvern.prepared()]}


class WyvernDefault(Wyvern):
    name = "wyvern-default"
    about = "Wyvern, the default plan"
    policy = "off"
