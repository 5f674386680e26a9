"""Megatron-Core's GatedDeltaNet on the CPU, served and as it is, beside the same in float64.

Its PyTorch path runs, which ``deterministic_mode`` chooses; FLA's norm of q and k, a Triton kernel, is PyTorch's here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip(
    "megatron.core", reason="megatron-core is not installed: pip install --no-deps megatron-core"
)
pytest.importorskip("fla", reason="megatron-core's GatedDeltaNet needs flash-linear-attention")
from context_ranks import BOUNDS, Ranks, ranks  # noqa: F401 (ranks is a fixture)
from reference import error, recurrence

import wyvern.megatron as served
from wyvern.distributed import context_parallel

NAME, HIDDEN, V = "gated_delta_net", 64, 32
HEADS = {"heads alike": (2, 2), "heads of keys shared": (2, 8)}


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.double() if x.dtype is torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@contextlib.contextmanager
def prepared() -> Iterator[tuple[Any, pytest.MonkeyPatch]]:
    """Megatron's module, which makes parameters on the current GPU and compiles a part of its code, and a patch."""
    module = importlib.import_module("megatron.core.ssm.gated_delta_net")
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        for name, other in list(sys.modules.items()):
            if name.startswith(module.__name__) and hasattr(other, "l2norm"):
                patch.setattr(other, "l2norm", l2norm)
        yield module, patch


def make(
    groups: Any,
    heads: tuple[int, int] = (2, 4),
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A layer with random parameters, the same at every call."""
    module = importlib.import_module("megatron.core.ssm.gated_delta_net")
    linear = importlib.import_module("megatron.core.tensor_parallel.layers")
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    given = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "normalization": "RMSNorm",
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": V,
        "linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1], "activation_func": F.silu,
        "use_cpu_initialization": True, "perform_initialization": False, "deterministic_mode": True,
        "params_dtype": dtype, **config,
    }  # fmt: skip
    kind = importlib.import_module("megatron.core.transformer").TransformerConfig
    if hasattr(kind, "linear_cp_mode"):  # of two ways to lie on several ranks the one that PyTorch's path has
        given["linear_cp_mode"] = "headwise"
    layer = module.GatedDeltaNet(
        kind(**given),
        module.GatedDeltaNetSubmodules(linear.ColumnParallelLinear, norm, linear.RowParallelLinear),
        layer_number=1, pg_collection=groups, **options or {},
    )  # fmt: skip
    torch.manual_seed(1)
    for name, x in layer.named_parameters():
        nn.init.normal_(x, mean=0.7 if "norm" in name else 0.0, std=0.3)
    return layer.to(dtype)


def collection(**groups: Any) -> Any:
    kind = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    return kind(**groups)


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    """One process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield collection(tp=dist.group.WORLD, cp=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def module() -> Iterator[Any]:
    served.report(reset=True)
    with prepared() as (module, _):
        yield module
    served.disable()


def method_of(kind: type) -> str:
    """The method that is replaced: ``forward``, but in versions where that calls another for all that it computes."""
    return "_forward_compute" if hasattr(kind, "_forward_compute") else "forward"


def for_packs(module: Any) -> dict[str, bool]:
    """A forward method in front of the one that is replaced refuses packs with ``deterministic_mode``."""
    return {"deterministic_mode": method_of(module.GatedDeltaNet) == "forward"}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, rounded as dtype is; its gradient is not."""
    return x + (x.to(dtype).double() - x).detach()


def in_float64(layer: Any, x: Tensor, ends: list[int] | None = None) -> list[Tensor]:
    """What a layer makes of x in float64, and the gradients of x and its parameters, where loss is ``seed_of(x)``'s:
    its formulas, and its roundings of what the projection and the convolution give."""
    p = {name: w.detach().double().requires_grad_() for name, w in layer.named_parameters()}
    exact, dtype = x.detach().double().requires_grad_(), layer.conv1d.weight.dtype
    H, HV = layer.num_key_heads, layer.num_value_heads
    K = layer.key_head_dim
    projected = rounded(F.linear(exact.transpose(0, 1), p["in_proj.weight"]), dtype)
    qkv, z, b, a = projected.split([2 * H * K + HV * V, HV * V, HV, HV], -1)
    parts = []
    for begin, end in zip(ends[:-1], ends[1:], strict=True) if ends else [(0, x.shape[0])]:
        rows = F.pad(qkv[:, begin:end].mT, (3, 0))
        y = F.conv1d(rows, p["conv1d.weight"], p.get("conv1d.bias"), groups=rows.shape[1])
        q, k, v = rounded(F.silu(y.mT), dtype).split([H * K, H * K, HV * V], -1)
        o, _ = recurrence(
            q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), a[:, begin:end],
            b[:, begin:end], l2norm=True, beta_sigmoid=True, gate=True, A_log=p["A_log"], dt_bias=p["dt_bias"],
        )  # fmt: skip
        parts.append(o)
    o = torch.cat(parts, 1)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.out_norm.eps) * p["out_norm.weight"]
    o = (o * F.silu(z.unflatten(-1, (HV, V)))).flatten(2).transpose(0, 1)
    out = F.linear(o, p["out_proj.weight"])
    return [out.detach(), *torch.autograd.grad(out, [exact, *p.values()], seed_of(x).double())]


def seed_of(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype)


def run(layer: Any, x: Tensor, **given: Any) -> list[Tensor]:
    """The output, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    out, bias = layer(x, None, **given)
    assert bias is None
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], seed_of(out))]


def names(layer: Any) -> list[str]:
    return ["out", "x", *(name for name, _ in layer.named_parameters())]


def bounds(layer: Any) -> list[float]:
    """Of the output; of what the gradients of q, k and v go into; of the others."""
    o, heads, others = BOUNDS[layer.conv1d.weight.dtype]
    return [o if name == "out" else heads if name in ("x", "in_proj.weight") else others for name in names(layer)]


def check(layer: Any, got: list[Tensor], wanted: list[Tensor]) -> None:
    for name, value, exact, bound in zip(names(layer), got, wanted, bounds(layer), strict=True):
        assert error(value, exact) < bound, name


def pack_of(ends: list[int], **others: Any) -> Any:
    kind = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
    bounds = torch.tensor(ends, dtype=torch.int32)
    return kind(**{"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds} | others)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_training(groups: Any, heads: str, dtype: torch.dtype, batch: int) -> None:
    layer = make(groups, HEADS[heads], dtype)
    x = torch.randn(70, batch, HIDDEN).to(dtype)
    wanted = in_float64(layer, x)
    if dtype is torch.float32:  # it is their layer that is in float64
        check(layer, run(layer, x), wanted)
    with served.enable():
        got = run(layer, x)
    check(layer, got, wanted)
    assert [g.dtype for g in got] == [dtype] * len(got)
    counted = served.report()
    assert counted.served == {NAME: 1} and not counted.declined


def test_in_float64(groups: Any) -> None:
    """The served layer to rounding; theirs computes its operator in float32."""
    layer = make(groups, dtype=torch.float64, options={"conv_bias": True})
    x = torch.randn(40, 2, HIDDEN, dtype=torch.float64)
    wanted, theirs = in_float64(layer, x), run(layer, x)
    with served.enable():
        got = run(layer, x)
    for name, value, own, exact in zip(names(layer), got, theirs, wanted, strict=True):
        assert error(value, exact) < 1e-12 and error(own, exact) < 1e-4, name


@pytest.mark.parametrize("ends", [[0, 1, 3, 40, 72], [0, 72]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packs(groups: Any, module: Any, dtype: torch.dtype, ends: list[int]) -> None:
    """Each sequence is what it is by itself; of bounds of padded sequences and of their own those of padded ones."""
    layer = make(groups, dtype=dtype, **for_packs(module))
    x = torch.randn(72, 1, HIDDEN).to(dtype)
    with served.enable():
        check(layer, run(layer, x, packed_seq_params=pack_of(ends)), in_float64(layer, x, ends))
        other = torch.tensor([0, 30, 60], dtype=torch.int32)
        padded = torch.tensor(ends, dtype=torch.int32)
        pack = pack_of([0, 72], cu_seqlens_q=other, cu_seqlens_kv=other, cu_seqlens_q_padded=padded,
                       cu_seqlens_kv_padded=padded.clone())  # fmt: skip
        check(layer, run(layer, x, packed_seq_params=pack), in_float64(layer, x, ends))
    assert served.report().served == {NAME: 2} and not served.report().declined


def test_packs_of_no_format_are_dense(groups: Any) -> None:
    layer, x = make(groups), torch.randn(20, 1, HIDDEN)
    with served.enable():
        check(layer, run(layer, x, packed_seq_params=pack_of([0, 5, 20], qkv_format="sbhd")), in_float64(layer, x))


def test_evaluation_and_recomputation(groups: Any) -> None:
    """Bits of a short batch are those of training, and of a forward pass that the backward pass repeats."""
    layer = make(groups)
    x = torch.randn(12, 2, HIDDEN, requires_grad=True)
    with served.enable():
        wanted = run(layer, x)
        with torch.no_grad():
            assert torch.equal(layer.eval()(x, None)[0], wanted[0])
        out, _ = checkpoint(layer, x, None, use_reentrant=False)
        got = torch.autograd.grad(out, [x, *layer.parameters()], seed_of(out))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted[1:], strict=True))
    assert served.report().served == {NAME: 4}


def moved(function: Callable[[], Any], least: int) -> int:
    """How many tensors of so many elements or more a call copies or joins."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        function()
    made = [event for event in profile.events() if event.name == "aten::copy_"]
    return sum(torch.Size(event.input_shapes[0]).numel() >= least for event in made)


def test_a_sequence_and_a_pack_are_read_in_place(groups: Any, module: Any) -> None:
    """No part of the projection is copied; of a batch it is copied once, and the output."""
    layer = make(groups, (4, 8), **for_packs(module))  # whose parts begin at multiples of 16 bytes
    least = 70 * 4 * 32  # q's and k's
    one, two = torch.randn(70, 1, HIDDEN), torch.randn(35, 2, HIDDEN)
    with served.enable(), torch.no_grad():
        assert moved(lambda: layer(one, None), least) == 0
        assert moved(lambda: layer(one, None, packed_seq_params=pack_of([0, 30, 70])), least) == 0
        assert moved(lambda: layer(two, None), least) == 2


def test_a_zero_centred_norm(groups: Any) -> None:
    layer, x = make(groups), torch.randn(40, 1, HIDDEN)
    wanted = in_float64(layer, x)
    with torch.no_grad():
        layer.out_norm.weight -= 1
    layer.out_norm.zero_centered_gamma = True  # Transformer Engine's norm has it
    with served.enable():
        check(layer, run(layer, x), wanted)


def test_parameters_that_are_gathered_meanwhile(groups: Any) -> None:
    """Megatron's own hooks, with ``overlap_param_gather``, wait for what its modules read."""
    parallel = importlib.import_module("megatron.core.distributed.distributed_data_parallel")
    layer, x = make(groups), torch.randn(20, 1, HIDDEN)
    waited: list[Tensor] = []

    def bucket_of(parameter: Tensor) -> Any:
        return SimpleNamespace(finish_param_sync=lambda **_: waited.append(parameter))

    model = SimpleNamespace(
        use_forward_hook=True, overlap_param_gather_with_optimizer_step=False,
        ddp_config=SimpleNamespace(align_param_gather=False),
        param_to_bucket_group={x: bucket_of(x) for x in layer.parameters()},
        _finish_param_sync_for_bucket_group=lambda group: group.finish_param_sync(),
    )  # fmt: skip
    wanted = layer(x, None)[0]
    for part in layer.modules():
        part.register_forward_pre_hook(parallel.DistributedDataParallel._make_forward_pre_hook(model))
    with served.enable():
        assert error(layer(x, None)[0], wanted) < 1e-5
    assert served.report().served == {NAME: 1}
    assert {id(x) for x in waited} == {id(x) for x in layer.parameters()}


def subclass(layer: Any) -> None:
    layer.__class__ = type("Own", (type(layer),), {})


def recompute_the_norm(layer: Any) -> None:
    if not hasattr(layer, "_gated_norm_and_a2a"):  # a version that knows no such thing
        layer.recompute_norm_out = True
        return
    pytest.skip("recomputation of this version needs a GPU's generators")


def hook_the_norm(layer: Any) -> None:
    layer.out_norm.register_forward_hook(lambda module, args, y: 2 * y)


def hook_before_the_norm(layer: Any) -> None:
    layer.out_norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def another_convolution(layer: Any) -> None:
    layer.conv1d.__class__ = type("Conv", (nn.Conv1d,), {})


def no_l2norm(layer: Any) -> None:
    layer.use_qk_l2norm = False


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None]] = {
    "the layer is a Own, a subclass": ({}, subclass),
    "recompute_modules has gdn_norm_out": ({}, recompute_the_norm),
    "the activation is gelu; it must be": ({"activation_func": F.gelu}, None),
    "use_qk_l2norm is False": ({}, no_l2norm),
    "conv1d is a Conv or has hooks": ({}, another_convolution),
    "out_norm is a RMSNorm or has hooks": ({}, hook_the_norm),
    "out_norm is a RMSNorm or": ({}, hook_before_the_norm),
    "out_norm is a LayerNorm or has hooks": ({"normalization": "LayerNorm"}, None),
    "conv_weight has shape [256, 5]": ({"linear_conv_kernel_dim": 5}, None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_layers_are_theirs(groups: Any, reason: str) -> None:
    config, change = REFUSED[reason]
    layer, x = make(groups, **config), torch.randn(20, 1, HIDDEN)
    if change is not None:
        change(layer)
    wanted = layer(x, None)[0]
    with served.enable():
        assert torch.equal(layer(x, None)[0], wanted)
    counted = served.report()
    ((why, count),) = counted.declined[NAME].items()
    assert why.startswith(reason) and count == 1 and not counted.served


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda: {"inference_context": SimpleNamespace(is_static_batching=lambda: True,
                                                       is_dynamic_batching=lambda: False)}, "an inference context"),
        (lambda: {"packed_seq_params": pack_of([0, 5, 19])}, "cu_seqlens_q does not end at the number of tokens"),
        (lambda: {"packed_seq_params": pack_of([0, 20], cu_seqlens_kv=torch.tensor([0, 4, 20]))}, "cu_seqlens_q and"),
        (lambda: {"packed_seq_params": pack_of([0, 20], cu_seqlens_q=None)}, "a pack has no cu_seqlens_q"),
    ],
)  # fmt: skip
def test_other_calls_are_theirs(
    groups: Any, module: Any, given: Callable[[], dict[str, Any]], reason: str
) -> None:
    """Which their layer refuses, with its own error."""
    if method_of(module.GatedDeltaNet) != "forward":
        pytest.skip("the forward method of this version refuses them before it calls what is replaced")
    layer, x = make(groups), torch.randn(20, 1, HIDDEN)
    with pytest.raises((AssertionError, NotImplementedError, TypeError, ValueError)) as own:
        layer(x, None, **given())
    with served.enable(), pytest.raises(own.type):
        layer(x, None, **given())
    (why,) = served.report().declined[NAME]
    assert why.startswith(reason)


def test_no_layer_falls_back_inside_of_a_context(groups: Any) -> None:
    layer, x = make(groups, activation_func=F.gelu), torch.randn(20, 1, HIDDEN)
    with served.enable(), context_parallel(dist.group.WORLD), pytest.raises(ValueError, match="the activation"):
        layer(x, None)


def test_on_and_off(groups: Any, module: Any) -> None:
    kind, method = module.GatedDeltaNet, method_of(module.GatedDeltaNet)
    own, layer, x = getattr(kind, method), make(groups), torch.randn(20, 1, HIDDEN)
    with served.enable():
        assert served.is_enabled() and getattr(kind, method) is not own
        layer(x, None)
        with served.enable():
            layer(x, None)
        layer(x, None)
    assert not served.is_enabled() and getattr(kind, method) is own
    layer(x, None)
    assert str(served.report(reset=True)) == "gated_delta_net: 3 served" and not served.report().served


def test_a_forward_of_others_stays(groups: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do more than the library's, which is what Wyvern computes."""
    kind, method = module.GatedDeltaNet, method_of(module.GatedDeltaNet)
    own, layer, x = getattr(kind, method), make(groups), torch.randn(20, 1, HIDDEN)

    @functools.wraps(own)
    def twice(*args: Any, **kwargs: Any) -> Any:
        out, bias = own(*args, **kwargs)
        return 2 * out, bias

    wanted = layer(x, None)[0]
    monkeypatch.setattr(kind, method, twice)
    with served.enable():
        assert torch.equal(layer(x, None)[0], 2 * wanted)
    assert not served.report().served and getattr(kind, method) is twice


def test_without_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.ssm.gated_delta_net", None)
    with pytest.raises(ImportError, match="wyvern.megatron needs megatron-core 0.16 or later"):
        served.enable()
    assert not served.is_enabled()


class Norm:
    """PyTorch's, which Megatron's wrapper refuses with sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
        return nn.RMSNorm(hidden_size, eps=eps)


def over_ranks(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A layer of two ranks, as it is and served, in one of them; and what was counted. given["over"]: "tp" or "cp"."""
    with prepared() as (_, patch):
        state = importlib.import_module("megatron.core.parallel_state")
        patch.setattr(state, "_GLOBAL_MEMORY_BUFFER", None)
        state._set_global_memory_buffer()
        if given.get("sequence_parallel"):
            norm = importlib.import_module("megatron.core.transformer.torch_norm")
            patch.setattr(norm, "WrappedTorchNorm", Norm)
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        groups = collection(**{"tp": alone, "cp": alone} | {given.pop("over"): group})
        layer = make(groups, (2, 8), **given)
        torch.manual_seed(3 + rank)
        x = torch.randn(40, 1, HIDDEN)
        theirs = run(layer, x)
        served.report(reset=True)
        with served.enable():
            ours = run(layer, x)
        return theirs, ours, served.report()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_has_its_heads(ranks: Ranks, sequence_parallel: bool) -> None:  # noqa: F811
    """Of tensor parallelism, whose projections exchange what they exchange without Wyvern."""
    given = {"over": "tp", "tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    for theirs, ours, counted in ranks(2, over_ranks, [given, given]):
        assert all(error(one, other) < 5e-5 for one, other in zip(ours, theirs, strict=True))
        assert theirs[0].shape == (40, 1, HIDDEN) and theirs[2].shape == (4,)  # dt_bias, of half the heads
        assert counted.served == {NAME: 1} and not counted.declined


def test_ranks_of_a_sequence_are_theirs(ranks: Ranks) -> None:  # noqa: F811
    given = {"over": "cp", "context_parallel_size": 2}
    for theirs, ours, counted in ranks(2, over_ranks, [given, given]):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert counted.declined == {NAME: {"sequences lie on 2 ranks of context parallelism": 1}}
        assert not counted.served
