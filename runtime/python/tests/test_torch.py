"""What PyTorch does with an operator: compile, export, checkpoint, autocast, threads, processes."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import warnings

import pytest
import torch
from conftest import DEVICES, make, reference_of
from reference import error
from torch.utils.checkpoint import checkpoint

from wyvern import _call, ops

DTYPE = torch.float32


def gated(device: str = "cpu", **sizes):
    return make(ops.chunk_gated_delta_rule, device=device, **sizes)


def layer(q, k, v, g, beta, initial_state):
    """The operator among others, as in a model."""
    o, state = ops.chunk_gated_delta_rule(
        q * 2.0, k, v, g, beta, initial_state=initial_state, output_final_state=True
    )
    return o.tanh(), state


def gradients_of(function, leaves) -> list[torch.Tensor]:
    o, state = function(*leaves)
    return [o, state, *torch.autograd.grad(o.square().sum() + state.sum(), leaves)]


@pytest.mark.filterwarnings("error:Dynamo detected")  # what it traces otherwise than Python runs it
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(device: str, backend: str) -> None:
    leaves = gated(device).leaves()
    wanted = gradients_of(layer, leaves)
    got = gradients_of(torch.compile(layer, fullgraph=True, backend=backend), leaves)
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < 1e-6


def test_compile_with_any_number_of_tokens(device: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 7):
        leaves = gated(device, T=T).leaves()
        for one, other in zip(
            gradients_of(compiled, leaves), gradients_of(layer, leaves), strict=True
        ):
            assert torch.equal(one, other)


def test_other_problems_do_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are called beside a compiled function, for the first time."""
    torch._dynamo.reset()  # what other tests compiled of the same function
    monkeypatch.setattr(ops, "_seen", set())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [x.detach() for x in gated().leaves()]
    with torch._dynamo.config.patch(error_on_recompile=True):
        o, _ = compiled(*leaves)
        layer(*leaves)
        make(ops.chunk_kda)()
        assert torch.equal(compiled(*leaves)[0], o)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta, initial_state):
            return layer(q, k, v, g, beta, initial_state)

    leaves = [x.detach() for x in gated().leaves()]
    tokens = torch.export.Dim("T", min=2, max=4096)
    shapes = [{1: tokens}] * 5 + [None]
    program = torch.export.export(Layer(), tuple(leaves), dynamic_shapes=shapes, strict=strict)
    shorter = [x[:, :33].contiguous() for x in leaves[:5]] + leaves[5:]
    for one, other in zip(program.module()(*shorter), layer(*shorter), strict=True):
        assert torch.equal(one, other)


OPERATORS = {
    "op=gated_delta_rule output_final_state=1": ops.chunk_gated_delta_rule,
    "op=delta_rule output_final_state=1 state_v_first=1 pass=recurrent": ops.chunk_delta_rule,
    "op=kda disable_recompute=1": ops.chunk_kda,
    "op=kda return_intermediate_states=1": ops.chunk_kda,
    "op=gated_delta_rule disable_recompute=1 chunk_size=32": ops.chunk_gated_delta_rule,
    "op=gdn2": ops.chunk_gdn2,
    "op=gated_delta_rule output_norm=silu keep_output=1": ops.chunk_gated_delta_rule,
    "op=kda output_final_state=1 return_intermediate_states=1 output_conv_state=1": ops.chunk_kda,
    "op=gated_delta_rule output_conv_state=1": ops.chunk_gated_delta_rule,
}


@pytest.mark.parametrize("problem", OPERATORS)
def test_the_dispatcher_holds_the_operators_to_its_rules(device: str, problem: str) -> None:
    call = make(OPERATORS[problem], device=device, T=3 if "recurrent" in problem else 70)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    if "state_v_first" in problem:
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    if "output_norm" in problem:
        tensors |= {"norm_weight": torch.randn(16, device=device), "norm_gate": torch.randn_like(tensors["v"])}
    if "output_conv_state" in problem:
        tensors["conv_weight"] = torch.randn(96, 3, device=device)
        tensors["initial_conv_state"] = torch.randn(1, 96, 2, device=device)
    names = {"erase": "b", "write": "w"}
    inputs = [tensors.get(names.get(name, name)) for name in _call.INPUTS]
    torch.library.opcheck(_call.forward_op, (problem, *inputs))
    if "recurrent" in problem or "intermediate" in problem:
        return
    o, *others = _call.forward_op(problem, *inputs)
    kept = others if "disable_recompute" in problem or "keep_output" in problem else []
    backward = problem.removesuffix(" keep_output=1")
    window = torch.randn(1, 96, 2, device=device) if "output_conv_state" in problem else None
    torch.library.opcheck(_call.backward_op, (backward, *inputs, torch.randn_like(o), None, window, kept))


def test_checkpoint(device: str) -> None:
    leaves = gated(device).leaves()
    again = gradients_of(lambda *x: checkpoint(layer, *x, use_reentrant=False), leaves)
    for one, other in zip(again, gradients_of(layer, leaves), strict=True):
        assert torch.equal(one, other)


def test_autocast_casts_rows_alone(device: str) -> None:
    call = gated(device)
    with torch.autocast(device, torch.bfloat16):
        o, state = call()
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    gradients = torch.autograd.grad(o.float().sum() + state.sum(), call.leaves())
    assert all(one.dtype == torch.float32 for one in gradients)
    _, (wanted, _) = reference_of(call)
    assert error(o, wanted) < 1e-2


def test_gradients_of_the_final_state_alone_and_of_nothing(device: str) -> None:
    call = gated(device)
    o, state = call()
    leaves, (_, wanted) = reference_of(call)
    exact = torch.autograd.grad(wanted.sum(), leaves, allow_unused=True, materialize_grads=True)
    for (name, x), gradient, other in zip(
        call.tensors.items(),
        torch.autograd.grad(state.sum(), call.leaves(), retain_graph=True),
        exact,
        strict=True,
    ):
        assert gradient.shape == x.shape
        assert name == "q" or error(gradient, other) < 5e-5, name
        assert name != "q" or not gradient.any()
    with torch.no_grad():
        assert not call()[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(call()[0], o)


def test_function_transforms(device: str) -> None:
    leaves = [x.detach() for x in gated(device).leaves()]

    def loss(*inputs):
        o, state = layer(*inputs)
        return o.square().sum() + state.sum()

    got = torch.func.grad(loss, argnums=(0, 3))(*leaves)
    wanted = torch.autograd.grad(loss(*(own := [x.clone().requires_grad_() for x in leaves])), own)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[3])


VMAPPED = {
    "rows": ("q", "k", "v", "g", "beta", "initial_state"),
    "some": ("q", "g"),
    "states": ("initial_state",),
    "gate": ("q", "A_log"),
    "shared gate": ("q", "v"),
    "packed": ("q", "k", "v", "g", "beta", "initial_state"),
}


@pytest.mark.parametrize("recompute", [True, False], ids=["", "disable_recompute"])
@pytest.mark.parametrize("what", VMAPPED)
def test_vmap(device: str, what: str, recompute: bool) -> None:
    """Values and gradients for each sample are those of calls one after the other."""
    call = gated(device, T=20, B=1 if what == "packed" else 2, N=3 if what == "packed" else 2)
    options = call.options | {"disable_recompute": not recompute}
    if "gate" in what:
        call.tensors["A_log"] = torch.tensor([0.1, -0.2], device=device)
        options["use_gate_in_kernel"] = True
    if what == "packed":
        options["cu_seqlens"] = torch.tensor([0, 7, 7, 20], device=device)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    dims = {name: 1 if name in VMAPPED[what] else None for name in tensors}
    samples = {
        name: torch.stack([x * (1 + 0.1 * i) for i in range(3)], 1) if dims[name] == 1 else x
        for name, x in tensors.items()
    }

    def loss(given):
        o, state = ops.chunk_gated_delta_rule(**given, **options)
        return o.square().sum() + state.sum(), (o, state)

    each = torch.func.grad(loss, has_aux=True)
    got = torch.func.vmap(each, in_dims=(dims,))(samples)
    plain = torch.func.vmap(lambda given: loss(given)[1], in_dims=(dims,))(samples)
    for i in range(3):
        one = {name: x.select(1, i) if dims[name] == 1 else x for name, x in samples.items()}
        gradients, outputs = each(one)
        for name, x in gradients.items():
            assert error(got[0][name][i], x) < 1e-6, name
        for values in (got[1], plain):
            for x, wanted in zip(values, outputs, strict=True):
                assert error(x[i], wanted) < 1e-6


@pytest.mark.parametrize(
    "name",
    [
        "chunk_delta_rule",
        "chunk_kda",
        "chunk_gated_delta_product",
        "chunk_gdn2",
        "fused_recurrent_kda",
    ],
)
def test_vmap_of_every_kind(device: str, name: str) -> None:
    """Their own tensors, and what disable_recompute keeps of them, where they have it."""
    call = make(getattr(ops, name), device=device, T=20, steps=2 if "product" in name else 1)
    if name == "chunk_kda":
        call.options["disable_recompute"] = True
    many = {key: torch.stack([x.detach(), 0.5 * x.detach()]) for key, x in call.tensors.items()}

    def loss(given):
        o, state = call.function(**given, **call.options)
        return o.square().sum() + state.sum()

    each = torch.func.grad_and_value(loss)
    gradients, value = torch.func.vmap(each)(many)
    for i in range(2):
        wanted, other = each({key: x[i] for key, x in many.items()})
        assert error(value[i], other) < 1e-6
        assert all(error(gradients[key][i], x) < 1e-6 for key, x in wanted.items())


def test_vmap_within_others(device: str) -> None:
    """In a vmap, under gradients that are recorded outside, and as torch.func.jacrev uses it."""
    leaves = gated(device, T=5).leaves()[:5]
    many = [torch.stack([torch.stack([x, 0.5 * x]), torch.stack([2 * x, 3 * x])]) for x in leaves]
    got = torch.func.vmap(torch.func.vmap(squares))(*many)
    wanted = [[squares(*(x[i, j] for x in many)) for j in range(2)] for i in range(2)]
    for i, j in ((i, j) for i in range(2) for j in range(2)):
        assert error(got[i, j], wanted[i][j]) < 1e-6
    gradients = torch.autograd.grad(got.sum(), leaves, retain_graph=True)
    exact = torch.autograd.grad(sum(sum(row) for row in wanted), leaves)
    assert all(error(x, y) < 1e-6 for x, y in zip(gradients, exact, strict=True))
    slopes = torch.func.vmap(torch.func.grad(squares))(*(x[0] for x in many))
    with pytest.raises(NotImplementedError, match="gated_delta_rule has no second derivatives"):
        torch.autograd.grad(slopes.sum(), leaves)

    fixed = [x.detach() for x in leaves]

    def of_q(q: torch.Tensor) -> torch.Tensor:
        return ops.chunk_gated_delta_rule(q, *fixed[1:])[0]

    jacobian = torch.func.jacrev(of_q)(fixed[0])
    o, pullback = torch.func.vjp(of_q, fixed[0])
    do = torch.randn_like(o)
    (dq,) = pullback(do)
    assert error(torch.tensordot(do, jacobian, o.dim()), dq) < 1e-6


def squares(*inputs: torch.Tensor) -> torch.Tensor:
    return ops.chunk_gated_delta_rule(*inputs)[0].square().sum()


@pytest.mark.parametrize("of", range(5))
def test_second_derivatives_are_refused(device: str, of: int) -> None:
    leaves = gated(device, T=5).leaves()[:5]
    once = torch.autograd.grad(squares(*leaves), leaves)
    gradients = torch.autograd.grad(squares(*leaves), leaves, create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(gradients, once, strict=True))
    for x in leaves:
        with pytest.raises(NotImplementedError, match="gated_delta_rule has no second derivatives"):
            torch.autograd.grad(gradients[of].sum(), x, retain_graph=True, allow_unused=True)


def test_a_penalty_on_gradients_is_refused(device: str) -> None:
    """Where the gradient that comes in is constant: without a refusal the loss's own gradient passes."""
    leaves = gated(device, T=5).leaves()[:5]
    o, _ = ops.chunk_delta_rule(*leaves[:3], leaves[4])
    (gradient,) = torch.autograd.grad(o.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="^delta_rule has no second derivatives"):
        (o.sum() + gradient.square().sum()).backward()


def test_function_transforms_that_are_refused(device: str) -> None:
    leaves = [x.detach() for x in gated(device, T=5).leaves()[:5]]
    ones = tuple(map(torch.ones_like, leaves))
    with pytest.raises(NotImplementedError, match="gated_delta_rule has no second derivatives"):
        torch.func.grad(lambda *x: torch.func.grad(squares)(*x).sum())(*leaves)

    def within(*inputs):
        """The transform of something else, around the operator."""
        return torch.func.grad(lambda y: squares(*inputs) * y)(leaves[0].sum())

    for function in (squares, torch.func.grad(squares), within):
        with pytest.raises(NotImplementedError, match="gated_delta_rule has no forward-mode derivative"):
            torch.func.jvp(function, tuple(leaves), ones)
    with pytest.raises(NotImplementedError, match="gated_delta_rule has no forward-mode derivative"):
        torch.func.hessian(squares)(*leaves)


@pytest.mark.parametrize("recorded", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_derivatives_carried_forwards_are_refused(device: str, name: str, recorded: bool) -> None:
    call = make(ops.chunk_kda, device=device, T=5)
    tensors = {key: x if recorded else x.detach() for key, x in call.tensors.items()}
    states = {"return_intermediate_states": True} if not recorded else {}
    with torch.autograd.forward_ad.dual_level():
        wanted, _ = ops.chunk_kda(**tensors)  # constants
        one = torch.autograd.forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        with pytest.raises(NotImplementedError, match="^kda has no forward-mode derivative"):
            ops.chunk_kda(**tensors | {name: one}, **states)
    assert torch.equal(ops.chunk_kda(**tensors)[0], wanted)


def test_tensors_that_are_not_contiguous_or_aligned(device: str) -> None:
    """Slices of a projection, heads before tokens, a gradient that is expanded, an odd address."""
    call = gated(device, H=2)
    B, T, H, K = call.tensors["q"].shape
    wanted = gradients_of(layer, call.leaves())
    rows = torch.cat([call.tensors["q"].flatten(2), call.tensors["k"].flatten(2)], -1).detach()
    q, k = rows.requires_grad_().split(H * K, -1)
    q, k = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K))
    v = call.tensors["v"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    odd = torch.empty(call.tensors["g"].numel() + 1, device=device)
    g = odd[1:].view_as(call.tensors["g"]).copy_(call.tensors["g"].detach()).requires_grad_()
    assert not q.is_contiguous() and not v.is_contiguous() and g.data_ptr() % 16 != 0
    inputs = [q, k, v, g, call.tensors["beta"], call.tensors["initial_state"]]
    for one, other in zip(gradients_of(layer, inputs), wanted, strict=True):
        assert torch.equal(one, other)
    o, _ = layer(*inputs)
    expanded = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    for one, other in zip(expanded, torch.autograd.grad(o, inputs, torch.ones_like(o)), strict=True):
        assert torch.equal(one, other)


def test_threads(device: str) -> None:
    calls = [gated(device, T=5 + i % 2, seed=i) for i in range(8)]
    wanted = [gradients_of(layer, call.leaves()) for call in calls]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda call: gradients_of(layer, call.leaves()), calls))
    for some, others in zip(got, wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _child(queue) -> None:
    with torch.no_grad():
        queue.put(float(gated(T=7)()[0].sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(method: str) -> None:
    """A child inherits what is prepared, and prepares anew what it does not."""
    with torch.no_grad():
        wanted = float(gated(T=7)()[0].sum())
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside fork()
        child = context.Process(target=_child, args=(queue,))
        child.start()
    assert queue.get(timeout=60) == wanted
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no GPU that PyTorch can use")
def test_streams_and_graphs() -> None:
    """Work goes to the current stream; a graph is captured after one call, and refused before."""
    call = gated("cuda", T=130)
    wanted = gradients_of(layer, call.leaves())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = gradients_of(layer, call.leaves())
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients_of(layer, call.leaves())
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, wanted, strict=True))
    new = gated("cuda", T=131, V=48)
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(
        torch.cuda.CUDAGraph()
    ):
        new()


def test_host_copy_of_boundaries_is_checked() -> None:
    call = gated(N=2)
    call.fixed["cu_seqlens"] = torch.tensor([0, 30, 70])
    call.options["cu_seqlens_cpu"] = torch.tensor([0, 90, 70], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call()
