"""Claims about the layer as an nn.Module: state, copies, hooks, devices."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zoo.verify.kinds import EVERY
from zoo.verify.outcome import Broken, Claim, Untested
from zoo.verify.subject import Subject, double_of, judged, parameter_of

__all__ = ["CLAIMS"]


def state_dict(s: Subject) -> None:
    for options in s.suite.variants:
        custom, stock = s.pair(**options)
        got, want = custom.state_dict(), stock.state_dict()
        if list(got) != list(want):
            raise Broken(f"keys: got {list(got)}, expected {list(want)}")
        for name, value in want.items():
            if got[name].shape != value.shape or got[name].dtype != value.dtype or not torch.equal(got[name], value):
                raise Broken(f"{name} is not what was loaded")
        fresh, back = s.pair(**options)
        fresh.load_state_dict(got)
        back.load_state_dict(fresh.state_dict())
        if not all(map(torch.equal, back.state_dict().values(), want.values())):
            raise Broken("weights that went through the layer's state dict came back changed")


def deepcopied(s: Subject) -> None:
    custom, _ = s.pair()
    x = s.input(64)
    before = custom(x).detach()
    twin = copy.deepcopy(custom)
    _same(twin(x), before, "a deep copy")
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    if twin(x).any():
        raise Broken("a deep copy whose parameters are zero computes with other ones")
    _same(custom(x), before, "the layer, after its copy changed,")


def pickled(s: Subject) -> None:
    custom, _ = s.pair()
    _importable(custom)
    x = s.input(64)
    before = custom(x).detach()
    try:
        data = pickle.dumps(custom)
    except (TypeError, AttributeError, pickle.PicklingError) as error:  # pickle's, by something that the layer holds
        raise Broken(f"it cannot be pickled: {error}") from None
    _same(pickle.loads(data)(x), before, "a pickled copy")
    file = io.BytesIO()
    torch.save(custom, file)
    file.seek(0)
    _same(torch.load(file, weights_only=False)(x), before, "a copy by torch.save")


def _importable(module: nn.Module) -> None:
    for what in (type(module), getattr(module, "function", None)):
        try:
            pickle.dumps(what)
        except Exception:
            raise Untested(f"{what!r} is not to be found by its name in a module") from None


def hooks(s: Subject) -> None:
    custom, _ = s.pair()
    x = s.input(64).requires_grad_()
    called: list[str] = []
    handles = [
        custom.register_forward_pre_hook(lambda module, args: called.append("forward pre-hook")),
        custom.register_forward_hook(lambda module, args, output: called.append("forward hook")),
        custom.register_full_backward_pre_hook(lambda module, grads: called.append("backward pre-hook")),
        custom.register_full_backward_hook(lambda module, grads, outputs: called.append("backward hook")),
    ]
    custom(x).sum().backward()
    missing = {"forward pre-hook", "forward hook", "backward pre-hook", "backward hook"} - set(called)
    if missing:
        raise Broken(f"never called: {', '.join(sorted(missing))}")
    for handle in handles:
        handle.remove()
    right = custom(2 * x).detach()
    doubled = custom.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    _same(custom(x), right, "a pre-hook that doubles the input: the layer")
    doubled.remove()
    replaced = custom.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    if custom(x).any():
        raise Broken("a forward hook's output did not take the place of the layer's")
    replaced.remove()
    for weight in s.suite.weights[:1]:
        seen: list[Tensor] = []
        handle = parameter_of(custom, weight).register_hook(seen.append)
        custom(x).sum().backward()
        handle.remove()
        if not seen:
            raise Broken(f"a hook on the gradient of {weight} was never called")


def converted(s: Subject) -> None:
    # Through bfloat16 and back: weights that were kept aside from the parameters would be the old ones.
    custom, stock = s.pair()
    custom, stock = custom.bfloat16().float(), stock.bfloat16().float()
    x = s.input(64)
    name = "after .bfloat16().float()"
    judged({name: custom(x)}, {name: stock(x)}, {name: double_of(stock, x)})
    output = custom.double()(x.double())
    if output.dtype != torch.float64:
        raise Broken(f"after .double() the output is {output.dtype}")


def on_meta(s: Subject) -> None:
    """The meta device stands for any that is not the first one: what ignores the input's device is found."""
    meta = replace(s, device=torch.device("meta"))
    custom, stock = meta.pair()
    for name, parameter in custom.named_parameters():
        if parameter.device.type != "meta":
            raise Broken(f"built for another device, {name} is on {parameter.device}")
    x = torch.empty(64, *s.suite.sample, device="meta", requires_grad=True)
    got, want = custom(x), stock(x)
    if got.device != want.device or got.shape != want.shape or got.dtype != want.dtype:
        raise Broken(
            f"an input on {x.device}: got {tuple(got.shape)} {got.dtype} on {got.device}, "
            f"expected {tuple(want.shape)} {want.dtype} on {want.device}"
        )


def parametrized(s: Subject) -> None:
    if not s.suite.weights:
        raise Untested("it has no weight that is trained")
    for weight in s.suite.weights:
        custom, stock = s.pair()
        x = s.input(64)
        if weight not in custom._parameters:
            raise Untested(f"its {weight} is not a parameter of its own")
        for layer in (custom, stock):
            parametrize.register_parametrization(layer, weight, _Half())
        name = f"output with a parametrized {weight}"
        judged({name: custom(x)}, {name: stock(x)}, {name: double_of(stock, x)})
        custom(x).backward(s.gradient(64))
        if custom.parametrizations[weight].original.grad is None:
            raise Broken(f"the parameter behind a parametrized {weight} got no gradient")


class _Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight


def trained(s: Subject) -> None:
    """Ten steps of an optimizer, beside the stock layer."""
    custom, stock = s.pair()
    x, target = s.input(128), s.randn(128, *s.suite.out)
    double = copy.deepcopy(stock).double()
    for layer, dtype in ((custom, s.dtype), (stock, s.dtype), (double, torch.float64)):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.mse_loss(layer(x.to(dtype)), target.to(dtype)).backward()
            optimizer.step()
    got, want, exact = (dict(layer.named_parameters()) for layer in (custom, stock, double))
    judged(
        {f"{name} after 10 steps": got.get(name) for name in exact},
        {f"{name} after 10 steps": want[name] for name in exact},
        {f"{name} after 10 steps": exact[name].detach() for name in exact},
    )


def _same(got: Tensor, right: Tensor, what: str) -> None:
    if got.shape != right.shape or not torch.equal(got.detach(), right):
        raise Broken(f"{what} computes something else")


CLAIMS = (
    Claim("state-dict", "the state dict goes both ways, with the stock layer's keys", state_dict, EVERY),
    Claim("deepcopy", "a deep copy computes the same, with parameters of its own", deepcopied, EVERY),
    Claim("pickle", "a pickled layer and one by torch.save compute the same", pickled, EVERY),
    Claim("hooks", "hooks on the module and on its weight are called, and may replace values", hooks, EVERY),
    Claim("conversion", ".bfloat16(), .float() and .double() change what it computes with", converted, EVERY),
    Claim("device", "it computes on the device of its input (shown on meta)", on_meta, EVERY),
    Claim("parametrization", "a parametrized weight is used, and trained", parametrized, EVERY),
    Claim("training", "ten optimizer steps end where the stock layer's do", trained, EVERY),
)
