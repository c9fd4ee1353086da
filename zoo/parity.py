"""Do two models compute the same? Judged by error against float64, not by a fixed tolerance.

Three passes over the same inputs, in eval mode: a float64 copy of the reference ("exact"), the reference ("stock"), and
the model. The model's outputs, and with ``gradients=True`` its gradients, may be about as far from exact as stock's
are: the rule and its constants are in :mod:`zoo.judging`.

A tensor that breaks the rule gets a second look, with more evidence of what is honest there:

* stock runs ``RESAMPLES`` more times on weights and inputs moved by half an eps at random, and the largest of its
  errors counts. A sum that nearly cancels, or a tensor of one element, has an error that a single run may miss. (Not
  if a tensor of any size is over its limit ``HOPELESS`` times; nothing excuses that.)
* gradients are compared with float64's *at the model's own activations*. An activation near a kink (ReLU, a maximum)
  may fall on either side by rounding alone, and then the gradients differ by far more than rounding; so the exact copy
  is run with the outputs of its layers set to those of the model (and to stock's for stock), and differentiated there.
  Whether the activations are right was judged with the outputs. What a norm takes off again is not seen there; so this
  does not excuse a tensor of any size that is off by over ``PARTED`` of its norm, where stock is off by a tenth of that
  at most: a kink moves a few of its values.

Where the reference does not run in float64, as its forward makes float32 of a part, that part is float64 too in the
exact copy. If stock is then off by more than roundings are, the copy computes something else, and is refused.

Where the models are float64 themselves, the reference is no more exact than they are. There stock's error is that of
its float32 copy, scaled by the ratio of the two eps, and ``FLOAT64_SLACK`` times that.

Cotangents are random, seeded, the same for all passes, and exactly representable in every dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zoo.isolation import undisturbed
from zoo.judging import SMALL, Entry, Measure, judge, measure_all, refusal
from zoo.layers.units import FusedParent, inside_units
from zoo.passes import (
    DoesNotRun,
    Pass,
    Values,
    after_each_call,
    all_tensors,
    jittered,
    named_tensors,
    snapshot,
    twin_of,
    with_values,
    without_parallel,
)
from zoo.readout import equalities
from zoo.report import Report

__all__ = ["HOPELESS", "PARTED", "RESAMPLES", "ParityReport", "parity"]

RESAMPLES = 8
HOPELESS = 1000.0
PARTED = 0.7
FLOAT64_SLACK = 4.0
_SEED = 7
_TF32 = 2.0**-10
_ROWS = 5

Measures = dict[str, "Measure | None"]


@dataclass(frozen=True)
class ParityReport(Report):
    """What :func:`parity` found."""

    entries: tuple[Entry, ...]
    """One per output tensor (kind "output") and per gradient ("gradient")."""
    first_divergence: Entry | None = None
    """Where outputs fail, the first layer at which the two models part (kind "layer"), unless no layer shows it.
    Where only gradients fail, the one nearest the output."""
    weights_differ: tuple[str, ...] = ()
    """State dict entries that are not equal in both models: the usual cause of a failure, and none by itself."""

    @property
    def ok(self) -> bool:
        """Whether every output and gradient holds."""
        return all(entry.ok for entry in self.entries)

    @property
    def worst(self) -> Entry:
        """The entry that is furthest over its limit, or nearest to it."""
        return self._ranked()[0]

    @property
    def blank(self) -> tuple[str, ...]:
        """Tensors that are zero in the reference, such as everything before a head of zeros: they show little."""
        return tuple(entry.name for entry in self.entries if entry.exact_norm == 0)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "blank": list(self.blank)}

    def _ranked(self) -> list[Entry]:
        return sorted(self.entries, key=lambda entry: (entry.ok, -entry.excess))

    def __str__(self) -> str:
        counts = Counter(entry.kind for entry in self.entries)
        what = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items())
        failed = sum(not entry.ok for entry in self.entries)
        lines = [f"parity: FAILED for {failed} of {what}" if failed else f"parity: ok, {what}"]
        rows = self._ranked()[:_ROWS]
        width = max(6, *(len(entry.name) for entry in rows))
        lines.append(f"  {'':4} {'tensor':{width}} {'error':>8} {'stock':>8} {'limit':>8}  {'dtype':9} shape")
        for e in rows:
            numbers = f"{e.error:8.1e} {e.reference_error:8.1e} {e.limit:8.1e}"
            lines.append(f"  {'ok' if e.ok else 'FAIL':4} {e.name:{width}} {numbers}  {e.dtype:9} {e.shape}")
            if not e.ok:
                lines.append(f"       {e.reason}")
        if len(self.entries) > len(rows):
            lines.append(f"  and {len(self.entries) - len(rows)} more")
        if self.blank:
            lines.append(
                f"{len(self.blank)} of {len(self.entries)} tensors are zero in the reference and show little "
                f"({self.blank[0]} first); give the models weights that are not zero"
            )
        if self.first_divergence is not None:
            at = self.first_divergence
            lines.append(f"first divergence: {at.kind} {at.name}: {at.reason}")
        if self.weights_differ:
            names = ", ".join(self.weights_differ[:_ROWS]) + (", ..." if len(self.weights_differ) > _ROWS else "")
            cause = "" if self.ok else ", which is the probable cause"
            lines.append(f"the models do not hold equal weights{cause}: {names}")
        return "\n".join(lines)


def parity(
    model: nn.Module, reference: nn.Module, inputs: Tensor | Sequence[Any], *, gradients: bool = False
) -> ParityReport:
    """Compare ``model`` with ``reference``, which should hold equal weights, on ``inputs``.

    Args:
        model: the model to judge. Compiled models and DDP wrappers are looked through for names.
        reference: the stock model, on the same device. Model and reference may be one object.
        inputs: a tensor, or the tuple or list of positional arguments, which may nest tensors.
        gradients: judge the gradients of every parameter that requires one and of every floating input too.

    Both run in eval mode, under the caller's autocast. Nothing of the caller's changes: not training flags, ``.grad``,
    buffers, inputs, random state, hooks or grad mode; also when an exception passes.

    What a model keeps of a pass (timm's LeViT, its attention biases in eval mode) is gone before the next. What it kept
    of the caller's own runs is used: kept without a graph, it has no gradient, and that fails; ``train()`` and
    ``eval()`` have such models drop it.

    Raises:
        ValueError: for models on the meta device, with lazy parameters, or on different devices; for inputs of another
            kind; if there is nothing to judge.
    """
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise ValueError(
            f"inputs: got {type(inputs).__name__}, expected a tensor or a tuple or list of positional arguments"
        )
    custom, stock = Pass("the model", without_parallel(model)), Pass("the reference", without_parallel(reference))
    core, reference_core = custom.core, stock.core
    _check(core, reference_core, inputs)
    with torch.inference_mode(False), undisturbed(core, reference_core), _in_eval_mode(core, reference_core):
        exact = Pass("the float64 copy of the reference", twin_of(reference_core, torch.float64), torch.float64)
        if _all_float64(reference_core, inputs):
            stock = Pass("the float32 copy of the reference", twin_of(reference_core, torch.float32), torch.float32)
        entries, first = _Comparison(exact, stock, custom, tuple(inputs), gradients).judged()
    return ParityReport(entries, first, _different_weights(core, reference_core))


@dataclass(frozen=True)
class _Comparison:
    exact: Pass
    stock: Pass
    custom: Pass
    inputs: tuple[Any, ...]
    gradients: bool

    def judged(self) -> tuple[tuple[Entry, ...], Entry | None]:
        """The entries, and the first divergence if there is one."""
        exact = None
        try:
            exact = self._values(self.exact)
        except DoesNotRun:
            if self.exact.widened:
                raise
        if exact is None:  # here, as the error holds what the pass had in memory
            return replace(self, exact=replace(self.exact, widened=True)).judged()
        if not exact.outputs:
            raise ValueError("inputs: the reference returns no tensor for them; expected at least one to judge")
        if self.gradients and not exact.gradients:
            raise ValueError(
                "gradients=True: no parameter of the reference requires a gradient and no input is floating; "
                "set requires_grad on those that are to be judged"
            )
        # Of each pass only measures are kept, so that no more than two are in memory.
        values = self._values(self.stock)
        stock, form, rounding = self._measures(self.stock, values, exact), values.form, self._rounding(values)
        if self.exact.widened:
            _check_widened(stock[0], rounding)
        values = self._values(self.custom)
        if values.form != form:
            return (_other_form(values.form, form),), None
        custom = self._measures(self.custom, values, exact)
        del values

        outputs = judge("output", custom[0], stock[0])
        if _in_doubt(outputs):
            more = stock[0]
            for again in self._resampled(rounding):
                more = _larger(more, self._measures(again, self._values(again, gradients=False), exact)[0])
            outputs = _second_look(outputs, judge("output", custom[0], more))
        del exact
        gradients = judge("gradient", custom[1], stock[1])
        if any(not entry.ok for entry in gradients) and all(entry.comparable for entry in gradients):
            own, more = self._at_own_activations(self.custom), self._at_own_activations(self.stock)
            parted = {entry.name: entry for entry in gradients if _has_parted(entry)}
            gradients = _second_look(gradients, judge("gradient", own, more))
            if _in_doubt(gradients):
                for again in self._resampled(rounding):
                    more = _larger(more, self._at_own_activations(again))
                gradients = _second_look(gradients, judge("gradient", own, more))
            gradients = tuple(parted.get(entry.name, entry) for entry in gradients)

        return outputs + gradients, self._first_divergence(outputs, gradients)

    def _first_divergence(self, outputs: Iterable[Entry], gradients: tuple[Entry, ...]) -> Entry | None:
        if not all(entry.ok for entry in outputs):
            return self._first_layer()
        return None if all(entry.ok for entry in gradients) else self._last_gradient(gradients)

    def _values(self, run: Pass, *, gradients: bool | None = None) -> Values:
        wanted = self.gradients if gradients is None else gradients
        return run.run(self.inputs, gradients_like=self.exact.core if wanted else None)

    def _measures(self, run: Pass, values: Values, exact: Values) -> tuple[Measures, Measures]:
        outputs = {
            name: (value, exact.outputs[name]) for name, value in values.outputs.items() if name in exact.outputs
        }
        gradients = {}
        for name, value in values.gradients.items():
            right = exact.gradients.get(name)
            if value is not None:
                gradients[name] = (value, torch.zeros_like(value) if right is None else right)
        found = self._measured(run, gradients)
        return self._measured(run, outputs), {name: found.get(name) for name in values.gradients}

    def _measured(self, run: Pass, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Measures:
        found: Measures = {}
        for name, result in measure_all(pairs).items():
            value, exact = pairs[name]
            single = run.dtype is torch.float32 and value.dtype is torch.float32 and exact.dtype is torch.float64
            factor = FLOAT64_SLACK * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            found[name] = result.scaled(factor, torch.float64) if single else result
        return found

    def _rounding(self, stock: Values) -> float:
        """The coarsest eps that stock works in: of its outputs, or of autocast."""
        dtypes = {v.dtype for v in stock.outputs.values() if v.is_floating_point() or v.is_complex()}
        if self.stock.dtype is None:
            kinds = {t.device.type for t in all_tensors(self.stock.core, self.inputs)}
            dtypes |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)

    def _resampled(self, rounding: float) -> Iterator[Pass]:
        """Stock, with its weights and inputs moved at random by about a rounding."""
        device = next((t.device for t in all_tensors(self.stock.core, self.inputs)), None)
        generator = torch.Generator(device or "cpu").manual_seed(_SEED)
        for _ in range(RESAMPLES):
            moved = twin_of(self.stock.core)
            with torch.no_grad():
                for parameter in moved.parameters():
                    if parameter.is_floating_point() or parameter.is_complex():
                        parameter.copy_(jittered(parameter, generator, rounding))
            yield replace(self.stock, call=moved, jitter=(generator, rounding))

    def _at_own_activations(self, run: Pass) -> Measures:
        """The errors of a pass's gradients against float64's at the activations of that pass."""
        record: dict[tuple[str, int], Any] = {}
        apart, fused = self._hidden()
        layers = [
            name
            for name, module in self.exact.core.named_modules()
            if name and name not in apart and (name in fused or not any(module.children()))
        ]
        run = run.bare()
        with after_each_call(run.core, layers, lambda key, output: record.update({key: snapshot(output)})):
            values = self._values(run)
        with after_each_call(
            self.exact.core, layers, lambda key, output: with_values(output, record[key]) if key in record else None
        ):
            exact = self._values(self.exact)
        return self._measures(run, values, exact)[1]

    def _hidden(self) -> tuple[set[str], set[str]]:
        """The names of the modules that units of the custom model stand for, and of the parents of such units.

        A hook on one of the former would have it run, and another computation would be judged.
        """
        inside, named = inside_units(self.custom.core), dict(self.custom.core.named_modules())
        return (
            {name for name, module in named.items() if module in inside},
            {name for name, module in named.items() if isinstance(module, FusedParent)},
        )

    def _first_layer(self) -> Entry | None:
        """The first module, in stock's order of completion, whose output breaks the rule."""
        exact: dict[str, Tensor] = {}
        stock: Measures = {}
        custom: Measures = {}

        def tensors(key: tuple[str, int], output: Any) -> Iterator[tuple[str, Tensor]]:
            name, call = key
            return named_tensors(output, f"{name} (call {call + 1})" if call else name)

        def keep(key: tuple[str, int], output: Any) -> None:
            exact.update(tensors(key, snapshot(output)))

        def compare(run: Pass, into: Measures) -> Callable[[tuple[str, int], Any], None]:
            def hook(key: tuple[str, int], output: Any) -> None:
                into.update(self._measured(run, {n: (v, exact[n]) for n, v in tensors(key, output) if n in exact}))

            return hook

        apart, _ = self._hidden()
        names = [name for name, _ in self.exact.core.named_modules() if name and name not in apart]
        for run, hook in (
            (self.exact, keep),
            (self.stock, compare(self.stock, stock)),
            (self.custom, compare(self.custom, custom)),
        ):
            with after_each_call(run.core, names, hook):
                self._values(run.bare(), gradients=False)
        both = [name for name in stock if name in custom]
        layers = judge("layer", {n: custom[n] for n in both}, {n: stock[n] for n in both})
        return next((entry for entry in layers if not entry.ok), None)

    def _last_gradient(self, gradients: Iterable[Entry]) -> Entry:
        """The failing gradient whose module is the last in the forward; an input's only if no other fails."""
        order: dict[str, int] = {}
        names = [name for name, _ in self.exact.core.named_modules()]
        with after_each_call(self.exact.core, names, lambda key, output: order.update({key[0]: len(order)})):
            self._values(self.exact, gradients=False)
        mine = {name for name, _ in self.exact.core.named_parameters()}

        def done(entry: Entry) -> int:
            owner = entry.name
            while entry.name in mine and owner:
                owner = owner.rpartition(".")[0]
                if owner in order:
                    return order[owner]
            return -1

        return max((entry for entry in gradients if not entry.ok), key=done)


def _check_widened(stock: Mapping[str, Measure | None], rounding: float) -> None:
    most = math.sqrt(max(rounding, _TF32))
    for name, found in stock.items():
        if found is not None and found.norm > most * found.exact_norm:
            raise ValueError(
                "the reference computes something else where its forward is given float64 for the float32 that it asks "
                f"for: {name!r} is {found.error:.1e} off, expected at most {most:.1e}; give it a forward that computes "
                "in the dtype of its weights and inputs, since float64 is what errors are measured against"
            )


def _in_doubt(entries: Iterable[Entry]) -> bool:
    """Whether something fails that more evidence may excuse."""
    failing = [entry for entry in entries if not entry.ok]
    return bool(failing) and not any(
        entry.excess > HOPELESS and (not entry.comparable or math.prod(entry.shape) >= SMALL) for entry in failing
    )


def _has_parted(entry: Entry) -> bool:
    """Whether a failing gradient is another one, as no kink makes it."""
    large = math.prod(entry.shape) >= SMALL
    return not entry.ok and large and entry.error > max(PARTED, 10 * entry.reference_error)


def _second_look(entries: Iterable[Entry], again: Iterable[Entry]) -> tuple[Entry, ...]:
    by_name = {entry.name: entry for entry in again}
    return tuple(entry if entry.ok else by_name[entry.name] for entry in entries)


def _larger(a: Measures, b: Mapping[str, Measure | None]) -> Measures:
    def larger(one: Measure | None, other: Measure | None) -> Measure | None:
        return one if one is None or other is None else one.at_least(other)

    return {name: larger(one, b.get(name)) for name, one in a.items()}


def _other_form(got: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> Entry:
    at = next(i for i in range(max(len(got), len(expected))) if got[i : i + 1] != expected[i : i + 1])
    here = [f"{form[at][0]} is {form[at][1]}" if at < len(form) else "nothing more" for form in (got, expected)]
    return refusal("output", "output", (), "", f"structure: got {here[0]}, expected {here[1]}")


@contextlib.contextmanager
def _in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Eval mode and no ``.grad`` inside; ``.grad`` as it was outside (modes are :func:`undisturbed`'s matter)."""
    grads = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    try:
        for model in models:
            for module in model.modules():
                # Set directly: a model's own train() may do more than set flags, and then undo it differently.
                module.training = False
        for parameter, _ in grads:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad


def _all_float64(model: nn.Module, inputs: Any) -> bool:
    dtypes = {t.dtype for t in all_tensors(model, inputs) if t.is_floating_point() or t.is_complex()}
    return bool(dtypes) and dtypes <= {torch.float64, torch.complex128}


def _check(model: nn.Module, reference: nn.Module, inputs: Any) -> None:
    devices = []
    for what, module in (("model", model), ("reference", reference)):
        lazy = [name for name, t in [*module.named_parameters(), *module.named_buffers()] if is_lazy(t)]
        if lazy:
            raise ValueError(f"{what}: {lazy[0]} is not initialised yet; run the {what} once on real inputs first")
        if any(tensor.is_meta for tensor in all_tensors(module, inputs)):
            raise ValueError(f"{what}: it or its inputs hold no values, being on the meta device; use real tensors")
        devices.append({str(tensor.device) for tensor in all_tensors(module)})
    if all(devices) and devices[0] != devices[1]:
        got, expected = (", ".join(sorted(names)) for names in devices)
        raise ValueError(f"model: got device {got}, expected the reference's, {expected}; move one of them with .to()")


def _different_weights(model: nn.Module, reference: nn.Module) -> tuple[str, ...]:
    mine, theirs = model.state_dict(), reference.state_dict()
    names = [*theirs, *(name for name in mine if name not in theirs)]
    tensors = [n for n in names if isinstance(mine.get(n), Tensor) and isinstance(theirs.get(n), Tensor)]
    equal = dict(zip(tensors, equalities([(mine[n], theirs[n]) for n in tensors], equal_nan=True), strict=True))
    for name in names:
        if name not in equal:
            a, b = mine.get(name), theirs.get(name)
            equal[name] = type(a) is type(b) and bool(a == b)
    return tuple(name for name in names if not equal[name])
