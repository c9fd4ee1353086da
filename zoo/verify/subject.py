"""The layer under test beside the stock layer, and how both are run and compared.

The rule is that of :mod:`zoo.judging`: the error against float64 may be about as large as the stock layer's own.
Cotangents are exactly representable in every dtype, so that rounding them tells nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.judging import Entry, Measure, judge, measure_all
from zoo.verify.case import Case
from zoo.verify.kinds import Suite, suite_of
from zoo.verify.outcome import REFUSED, Broken, Refused, Untested, outcome_of
from zoo.verify.target import build

__all__ = [
    "ALL",
    "Case",
    "Subject",
    "double_of",
    "evaluate",
    "hold",
    "judged",
    "measures",
    "parameter_of",
    "saying",
    "terms_of",
]

ALL = ("input", "weight", "bias")
"""What has a gradient in a Linear, a LayerNorm and a Conv2d; of any kind it is ``subject.suite.all``."""
FLOAT64_SLACK = 4.0  # as zoo.parity allows where the models are float64 themselves

Tensors = Mapping[str, "Tensor | None"]
Measures = Mapping[str, "Measure | None"]


Evaluate = Callable[[nn.Module, Case], Tensors]


@dataclass
class Subject:
    """A layer under test, of a kind."""

    layer: Any
    """A class, or a function of what its kind's functions take."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    kind: str = "linear"
    against: Any = None
    """A class to compare it with in the place of the kind's stock layer, and built as that is."""
    target: Any = None
    """What it was found by, where that was a name: other processes find it so too."""

    @functools.cached_property
    def suite(self) -> Suite:
        """What the claims need to know of the kind, and of what the layer is compared with."""
        suite = suite_of(self.kind)
        if self.against is None:
            return suite
        stock = functools.partial(build, self.against, kind=self.kind)
        named = dict(stock(*suite.sizes, device="meta", dtype=self.dtype).named_parameters())
        weights = tuple(n for n, parameter in named.items() if parameter.dim() > 1 or n in suite.weights)
        return replace(suite, stock=stock, parameters=tuple(named), weights=weights)

    def pair(self, *sizes: Any, **options: Any) -> tuple[Any, Any]:
        """The layer and the stock layer, with equal weights; of the typical size unless told."""
        sizes = sizes or self.suite.sizes
        stock = self.suite.stock(*sizes, **options, device=self.device, dtype=self.dtype)
        self.suite.fill(stock)
        custom = build(self.layer, *sizes, kind=self.kind, device=self.device, dtype=self.dtype, **options)
        custom.load_state_dict(stock.state_dict())
        return custom, stock

    def input(self, *rows: int) -> Tensor:
        """Normally distributed input of a typical layer, (*rows, *sample)."""
        return self.randn(*rows, *self.suite.sample)

    def gradient(self, *rows: int) -> Tensor:
        """What may come in for the output of :meth:`input`, (*rows, *out)."""
        return self.cotangent(*rows, *self.suite.out)

    def case(self, name: str, input: Tensor, **more: Any) -> Case:
        """A case of a typical layer."""
        return Case(name, input, self.suite.size, **more)

    def of(self, dtype: torch.dtype) -> Subject:
        """The same layer in another dtype."""
        return replace(self, dtype=dtype)

    def randn(self, *shape: int) -> Tensor:
        """Normally distributed values."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(self.dtype)

    def cotangent(self, *shape: int) -> Tensor:
        """Normally distributed values that every dtype holds exactly."""
        return torch.randn(shape, device=self.device).half().bfloat16().to(self.dtype)

    def compare(
        self,
        cases: Iterable[Case],
        *,
        evaluate: Evaluate | None = None,
        exactly: Evaluate | None = None,
        transformed: Callable[[nn.Module], nn.Module] = lambda layer: layer,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Run the layer, the stock layer and its float64 copy on every case, and judge all tensors together.

        Args:
            evaluate: what is run, :func:`evaluate` unless told; ``exactly`` for the float64 copy, if it differs.
            transformed: what is made of both layers first, as a compiled one. Never of the float64 copy.
            around: a context for both, as autocast. Never for the float64 copy.

        Raises:
            Broken: a tensor is wrong, or a case ended with an error that is no refusal.
            Refused: the layer refused a case, and was right in the others.
            Untested: the stock layer itself does not do it.
        """
        run = evaluate or _evaluate
        refused: list[str] = []
        broken: list[str] = []
        overflown: list[str] = []
        got: dict[str, Measure | None] = {}
        want: dict[str, Measure | None] = {}
        for case in cases:
            whole = self._with_cotangent(case)
            try:
                custom, stock = self.pair(*self.suite.sizes_of(case), **case.options)
            except Exception as error:
                status, reason = outcome_of(error)
                (refused if status == REFUSED else broken).append(f"{case.name}, to be built: {reason}")
                continue
            if case.weight_scale != 1.0:
                self._scale((custom, stock), case.weight_scale)
            exact = (exactly or run)(copy.deepcopy(stock).double(), _double(whole))
            try:
                with around():
                    stocks = run(transformed(stock), whole)
            except Exception as error:
                raise Untested(f"{case.name}: the stock layer itself raised {type(error).__name__}: {error}") from None
            try:
                with around():
                    values = run(transformed(custom), whole)
            except Exception as error:
                status, reason = outcome_of(error)
                (refused if status == REFUSED else broken).append(f"{case.name}: {reason}")
                continue
            found = measures(case.name, stocks, exact, least=self._single(run, whole, stock))
            if any(m is not None and m.fault for m in found.values()):
                overflown.append(case.name)
                continue
            got.update(measures(case.name, values, exact))
            if case.conditioned:
                rounded = (exactly or run)(copy.deepcopy(stock).double(), _rounded(whole))
                found = _at_least(found, measures(case.name, rounded, exact))
            terms = terms_of(stock, exact["output"]) if "output" in exact else 1
            want.update({name: m and m.of_sum(terms) for name, m in found.items()})
        broken += [saying(entry) for entry in judge("value", got, want) if not entry.ok]
        if broken:
            raise Broken(_some(broken))
        if refused:
            raise Refused(_some(refused))
        if overflown and not got:
            raise Untested(f"{_some(overflown)}: the stock layer's own values are not finite")

    def _scale(self, layers: tuple[nn.Module, ...], factor: float) -> None:
        with torch.no_grad():
            for layer in layers:
                for name, parameter in layer.named_parameters():
                    if name.rpartition(".")[2] in self.suite.parameters:
                        parameter.mul_(factor)

    def _single(self, run: Evaluate, whole: Case, stock: nn.Module) -> Tensors | None:
        # In float64 the reference is no more exact than the layer: the stock's float32 copy shows its error.
        if self.dtype != torch.float64:
            return None
        return run(copy.deepcopy(stock).float(), _cast(whole, torch.float32))

    def _with_cotangent(self, case: Case) -> Case:
        if case.cotangent is not None or not case.gradients:
            return case
        return replace(case, cotangent=self.cotangent(*self.suite.shape_of(case)))


def evaluate(layer: nn.Module, case: Case) -> Tensors:
    """The output, and the gradients that the case asks for, by name. None for a gradient that does not come."""
    parameters = {name.rpartition(".")[2]: p for name, p in layer.named_parameters()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in case.gradients)
    x = case.input.detach()
    if not case.gradients:
        with torch.no_grad():
            return {"output": layer(x)}
    leaves = {"input": x.requires_grad_("input" in case.gradients), **parameters}
    asked = [name for name in case.gradients if name in leaves]
    output = layer(x)
    if not asked:
        return {"output": output.detach()}
    assert case.cotangent is not None
    grads = torch.autograd.grad(
        output, [leaves[name] for name in asked], case.cotangent.to(output.dtype), allow_unused=True
    )
    return {"output": output.detach(), **dict(zip(asked, grads, strict=True))}


_evaluate = evaluate


def parameter_of(layer: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that name, wherever in the layer it lies. :class:`Broken` where there is none."""
    named = {full.rpartition(".")[2]: parameter for full, parameter in layer.named_parameters()}
    if name not in named:
        raise Broken(f"it has no parameter {name!r}; it has {', '.join(named) or 'none'}")
    return named[name]


def double_of(stock: nn.Module, x: Tensor) -> Tensor:
    """The output of a stock layer's float64 copy: the exact one, so to speak."""
    with torch.no_grad():
        return copy.deepcopy(stock).double()(x.double())


def terms_of(stock: nn.Module, output: Tensor | None) -> int:
    """The most terms of a sum in a layer's plainest forward and backward: over the features of its input (or channels
    and taps), those of its output, or the rows."""
    terms = [1]
    for parameter in stock.parameters():
        if parameter.numel():
            own, across = parameter.shape[0], parameter.shape[1] if parameter.dim() > 1 else 1
            rows = 0 if output is None else output.numel() // own
            terms += [parameter.numel() // (own if parameter.dim() > 1 else 1), parameter.numel() // across, rows]
    return max(terms)


def judged(got: Tensors, stock: Tensors, exact: Tensors, *, terms: int = 1) -> None:
    """Judge tensors that were computed by other means, of sums of so many terms. Raises :class:`Broken`."""
    limits = measures("", stock, exact)
    hold(measures("", got, exact), {name: m and m.of_sum(terms) for name, m in limits.items()})


def hold(got: Measures, stock: Measures) -> None:
    """Judge errors that were measured. Raises :class:`Broken`."""
    broken = [saying(entry) for entry in judge("value", got, stock) if not entry.ok]
    if broken:
        raise Broken(_some(broken))


def saying(entry: Entry) -> str:
    """A tensor that is wrong, in a line."""
    stock = "" if math.isnan(entry.reference_error) else f" (the stock layer's is {entry.reference_error:.1e})"
    return f"{entry.name}: {entry.reason}{stock}"


def measures(case: str, values: Tensors, exact: Tensors, least: Tensors | None = None) -> dict[str, Measure | None]:
    """The errors of what :func:`evaluate` gave, by the case and the tensor's name."""
    names = list(dict.fromkeys((*exact, *values)))
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in names:
        value, right = values.get(name), exact.get(name)
        if value is not None:
            pairs[name] = value, (value.double() if right is None else right)
            low = None if least is None or right is None else least.get(name)
            if low is not None and right is not None:
                pairs[f"{name} at least"] = low, right
    found = measure_all(pairs)  # one wait for the device
    for name in names:
        low_found = found.get(f"{name} at least")
        if low_found is not None:
            scale = FLOAT64_SLACK * torch.finfo(torch.float64).eps / torch.finfo(low_found.dtype).eps
            found[name] = found[name].at_least(low_found.scaled(scale, found[name].dtype))
    return {f"{case} {name}".strip(): found.get(name) for name in names}


def _at_least(found: dict[str, Measure | None], other: dict[str, Measure | None]) -> dict[str, Measure | None]:
    pairs = ((name, mine, other.get(name)) for name, mine in found.items())
    return {name: mine.at_least(theirs) if mine and theirs else mine for name, mine, theirs in pairs}


def _rounded(case: Case) -> Case:
    """The case in float64, with an input that is a rounding of its own dtype off."""
    eps = torch.finfo(case.input.dtype).eps
    double = _double(case)
    return replace(double, input=double.input * (1 + eps * torch.randn_like(double.input)))


def _some(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
    return "; ".join(reasons[:2]) + more


def _double(case: Case) -> Case:
    return _cast(case, torch.float64)


def _cast(case: Case, dtype: torch.dtype) -> Case:
    cotangent = None if case.cotangent is None else case.cotangent.to(dtype)
    return replace(case, input=case.input.detach().to(dtype), cotangent=cotangent)
