"""vLLM's own layers between their projections, with and without Wyvern: what a step takes.

    python tools/benchmark/vllm_layers.py [--model qwen,kimi] [--steps REGEX] [--runs 15] [-o vllm_layers.json]

by a Python that has vLLM 0.33 and Wyvern. Layers are made without a model: random weights, pages of states and windows
as an engine allocates them, the metadata of a step as vLLM's builder makes it. Sides of a step:

* `vllm`: the layer's method by vLLM's kernels
* `functions`: vLLM's method, whose calls of functions Wyvern serves
* `layer`: Wyvern's method in its place

Qwen3-Next's layer has 16 and 32 heads and states in bf16, Kimi Linear's 32 heads, states in fp32 and the norm of o. Steps
that decode are timed as CUDA graphs of ten calls, the others as calls; in turn, medians. Errors are of o and of the states
beside vLLM's. On a CPU only `layer` runs, on small layers, and nothing is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_PLUGINS", "none")  # what is enabled is said here

import torch
import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as kimi_module
import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as qwen_module
from torch import Tensor
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices, prepare_chunk_offsets
from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

import wyvern.vllm

TAPS, DRAFTS, SLOTS = 4, 3, 300
NAME = "layer"
CALLS = 10  # of a graph


@dataclass(frozen=True)
class Step:
    """decodes: sequences of one token. prompts: tokens, whether the sequence goes on. drafts: sequences of DRAFTS."""

    name: str
    decodes: int = 0
    prompts: tuple[tuple[int, bool], ...] = ()
    drafts: int = 0


STEPS = [
    *(Step(f"decode {n}", decodes=n) for n in (1, 8, 64, 256)),
    *(Step(f"drafts {n}", drafts=n) for n in (1, 8, 32)),
    Step("prefill 1x2048", prompts=((2048, False),)),
    Step("prefill 1x8192", prompts=((8192, False),)),
    Step("prefill 4x4096", prompts=((4096, False),) * 4),
    Step("prefill 32x512", prompts=((512, True),) * 32),
    Step("mixed 16 and 1x4096", decodes=16, prompts=((4096, True),)),
]
SMALL = [Step("decode 4", 4), Step("drafts 4", drafts=4), Step("mixed", 3, ((66, True), (40, False)))]


class Model:
    """A kind of layer: its class, its sizes and the arguments of its method."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device, self.kimi = name, device, name == "kimi"
        small = device == "cpu"
        self.D = 32 if small else 128
        self.H, self.HV = (2, 2) if small and self.kimi else (1, 2) if small else (32, 32) if self.kimi else (16, 32)
        self.channels = (2 * self.H + self.HV) * self.D
        self.kind = kimi_module.KimiGatedDeltaNetAttention if self.kimi else qwen_module.QwenGatedDeltaNetAttention
        self.method = "_forward" if self.kimi else "_forward_core"

    def layer(self, kind: type) -> Any:
        """An instance without a model; the same random numbers each time."""
        generator = torch.Generator(self.device).manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        def uniform(count: int, low: float, high: float) -> Tensor:
            return torch.empty(count, device=self.device).uniform_(low, high, generator=generator)

        D, HV = self.D, self.HV
        layer = torch.nn.Module.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.prefix, layer.activation, layer.tp_size = NAME, "silu", 1
        layer.head_k_dim = layer.head_v_dim = layer.head_dim = D
        layer.num_k_heads, layer.num_v_heads, layer.key_dim, layer.value_dim = self.H, HV, self.H * D, HV * D
        layer.local_projection_size, layer.layer_norm_epsilon = HV * D, 1e-6
        layer.enable_packed_recurrent_decode, layer.gate_lower_bound = True, None
        layer.conv1d = torch.nn.Module()
        layer.conv1d.bias = None
        layer.conv1d.weight = torch.nn.Parameter(0.5 * normal(self.channels, 1, TAPS))
        layer.A_log = uniform(HV, 1, 16).log()
        layer.dt_bias = uniform(HV * D if self.kimi else HV, -6, -1)
        states = 0.3 * normal(SLOTS, HV, D, D)
        windows = normal(SLOTS, TAPS - 1 + DRAFTS - 1, self.channels).bfloat16()
        if self.kimi:
            layer.o_norm = self._norm(1 + 0.1 * normal(D))
        else:
            layer.conv1d.weight.data, layer.dt_bias = layer.conv1d.weight.bfloat16(), layer.dt_bias.bfloat16()
            if self.device != "cpu":  # decoding with such states goes to vLLM's kernel, of which a CPU has none
                states = states.bfloat16()
            chunk = torch.nn.Module.__new__(qwen_module.ChunkGatedDeltaRule)
            torch.nn.Module.__init__(chunk)
            layer.chunk_gated_delta_rule = lambda **given: qwen_module.ChunkGatedDeltaRule.forward_native(
                chunk, **given
            )
        layer.kv_cache = [windows, states]
        return layer.requires_grad_(False)

    def _norm(self, weight: Tensor) -> Any:
        norm = torch.nn.Module.__new__(FusedRMSNormGated)
        torch.nn.Module.__init__(norm)
        norm.weight, norm.bias = torch.nn.Parameter(weight), None
        norm.eps, norm.activation, norm.hidden_size, norm.elementwise_affine = 1e-5, "sigmoid", self.D, True
        norm._forward_method = lambda *args, **given: FusedRMSNormGated.forward_cuda(norm, *args, **given)
        return norm

    def rows(self, tokens: int) -> dict[str, Tensor]:
        """The arguments of the method: projections, and where o goes."""
        generator = torch.Generator(self.device).manual_seed(tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device).bfloat16()

        D, HV = self.D, self.HV
        out, qkv = normal(tokens, HV, D), normal(tokens, self.channels)
        if not self.kimi:
            return dict(mixed_qkv=qkv, b=normal(tokens, HV), a=normal(tokens, HV), core_attn_out=out)
        return dict(
            mixed_qkv=qkv, g1=normal(1, tokens, HV, D), g2=normal(tokens, HV, D), beta=normal(1, tokens, HV),
            core_attn_out=out[None],
        )  # fmt: skip


def metadata(step: Step, device: str) -> tuple[GDNAttentionMetadata, int]:
    """What vLLM's builder makes of the step, and its tokens."""

    def ints(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if step.drafts:
        tokens = step.drafts * DRAFTS
        return GDNAttentionMetadata(
            0, 0, 0, 0, step.drafts, tokens, tokens,
            spec_query_start_loc=ints(list(range(0, tokens + 1, DRAFTS))),
            spec_state_indices_tensor=ints([[1 + n * DRAFTS + j for j in range(DRAFTS)] for n in range(step.drafts)]),
            spec_sequence_masks=torch.ones(step.drafts, dtype=torch.bool, device=device),
            spec_token_indx=torch.arange(tokens, device=device), non_spec_token_indx=ints([]),
            num_accepted_tokens=ints([1 + n % DRAFTS for n in range(step.drafts)]),
        ), tokens  # fmt: skip
    lengths = [1] * step.decodes + [tokens for tokens, _ in step.prompts]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = ints(list(range(1, len(lengths) + 1)))
    goes_on = torch.tensor([True] * step.decodes + [goes for _, goes in step.prompts], device=device)
    made = GDNAttentionMetadata(
        len(step.prompts), sum(tokens for tokens, _ in step.prompts), step.decodes, step.decodes, 0, 0, int(ends[-1]),
        non_spec_query_start_loc=ends.to(device), non_spec_state_indices_tensor=slots,
    )  # fmt: skip
    if step.prompts:
        own = ends[step.decodes :] - step.decodes
        made.prefill_query_start_loc, made.prefill_state_indices = own.to(device), slots[step.decodes :]
        made.has_initial_state, made.prefill_has_initial_state = goes_on, goes_on[step.decodes :]
        if device != "cpu":
            found = compute_causal_conv1d_metadata(ends, device=torch.device(device))
            made.nums_dict, made.batch_ptr, made.token_chunk_offset_ptr = found
            made.chunk_indices = prepare_chunk_indices(own, 64).to(device)
            made.chunk_offsets = prepare_chunk_offsets(own, 64).to(device)
    return made, int(ends[-1])


class Side:
    """A layer and its method, called with tensors of its own, which graphs keep."""

    def __init__(self, name: str, model: Model, given: dict[str, Tensor]) -> None:
        kind = op_registry_oot[model.kind.__name__] if name == "layer" else model.kind
        self.layer, self.name = model.layer(kind), name
        self.given = {key: x.clone() for key, x in given.items()}
        self._method = getattr(kind, model.method)

    def call(self) -> None:
        os.environ["WYVERN_VLLM"] = "0" if self.name == "vllm" else "1"
        self._method(self.layer, **self.given)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.given["core_attn_out"].clone(), self.layer.kv_cache[1].clone()

    def graph(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self.call()
        return graph.replay


def relative(x: Tensor, wanted: Tensor) -> float:
    return float((x.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))


def times(sides: list[Side], in_graph: bool, runs: int) -> dict[str, float]:
    """Microseconds a call."""
    calls = {side.name: side.graph() if in_graph else side.call for side in sides}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            taken[name].append(1e3 * start.elapsed_time(end) / (CALLS if in_graph else 1))
    return {name: statistics.median(all_of) for name, all_of in taken.items()}


def measure(model: Model, step: Step, names: list[str], runs: int) -> dict[str, Any]:
    made, tokens = metadata(step, model.device)
    given = model.rows(tokens)
    sides = [Side(name, model, given) for name in names]
    context = ForwardContext(no_compile_layers={}, attn_metadata={NAME: made}, slot_mapping={})
    row: dict[str, Any] = {"model": model.name, "step": step.name}
    with torch.no_grad(), override_forward_context(context):
        results = {}
        for side in sides:
            side.call()
            results[side.name] = side.result()
        if "vllm" in results:
            o, states = results["vllm"]
            row["errors"] = {
                name: {"o": relative(x, o), "states": relative(y, states)} for name, (x, y) in results.items()
            }
        if model.device != "cpu":
            row["us"] = times(sides, not step.prompts, runs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen,kimi")
    parser.add_argument("--steps", default="", help="a regular expression of their names")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--out", type=Path, help="a JSON document")
    options = parser.parse_args()
    wyvern.vllm.enable()
    on_cpu = options.device == "cpu"
    names = ["layer"] if on_cpu else ["vllm", "functions", "layer"]
    rows = []
    for model in (Model(name, options.device) for name in options.model.split(",")):
        for step in SMALL if on_cpu else STEPS:
            if re.search(options.steps, step.name):
                rows.append(measure(model, step, names, options.runs))
                print(json.dumps(rows[-1]), flush=True)
    os.environ["WYVERN_VLLM"] = "1"
    told = wyvern.vllm.report(own=True)
    print(told)
    if options.out:
        device = "cpu" if on_cpu else torch.cuda.get_device_name()
        document = {"device": device, "rows": rows, "served": told.served, "declined": told.declined}
        options.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
