"""How an operator reaches its kernel: one door for eager, compile, torch.func and forward mode.

An operator's calculus is a :class:`Rule`: what to save, the backward, the forward-mode derivative, and how it is
mapped over a batch. The derivatives are written with the differentiable functions of ``zoo.ops``, so that they hold
to any order. From a rule :func:`register` makes

- an ``autograd.Function`` for eager mode, the cheapest in host time;
- a kernel for the operator's Autograd key, so that ``torch.ops.zoo.*`` itself is differentiable, and is what
  compile and export see;
- an ``autograd.Function`` that torch.func can transform. (A registered operator alone is not enough: its tangents
  would be dropped without a word.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _AutoDispatchBelowAutograd, _get_tracing_state
from torch.autograd import Function, forward_ad

__all__ = ["Rule", "apply", "has_tangent", "implement", "is_final", "is_plain", "register"]


class Rule:
    """The calculus of one operator. Subclasses are never instantiated; all of it is static."""

    op: Any
    """The operator, e.g. ``torch.ops.zoo.linear.default``."""
    run: Callable[..., Any]
    """The operator without OpOverload's Python around it, which costs about as much as a small kernel."""
    eager: type[Function]
    transformable: type[Function]

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save for backward what the requested gradients need, and nothing else."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The requested gradients; None for each of the others."""
        raise NotImplementedError

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        """The output's tangent for the inputs' tangents, each of which may be None (at least one is not)."""
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """The operator over one batch dimension (torch.library.register_vmap). Called below the level that is being
        mapped, so it calls the operators themselves, not the functions around them."""
        raise NotImplementedError


_library = torch.library.Library("zoo", "IMPL")
implement = _library.impl
"""Register a kernel in Python: ``implement(name, function, dispatch_key)``."""


def register(rule: type[Rule]) -> type[Rule]:
    """Class decorator: make the Functions of a rule and register its kernels."""
    op = rule.op
    run = rule.run = op._op
    name = op._schema.name.removeprefix("zoo::")

    def eager_forward(ctx: Any, *args: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            output = run(*args)
        rule.setup(ctx, args, output)
        return output

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rule.setup(ctx, inputs, output)
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.save_for_forward(*(a if isinstance(a, Tensor) else None for a in inputs), *outputs)
        ctx.options = [None if isinstance(a, Tensor) else a for a in inputs]

    def jvp(ctx: Any, *tangents: Any) -> Any:
        count = len(ctx.options)
        inputs = tuple(o if t is None else t for t, o in zip(ctx.saved_tensors, ctx.options, strict=False))
        outputs = ctx.saved_tensors[count:]
        return rule.jvp(inputs, outputs if len(outputs) > 1 else outputs[0], tangents)

    rule.eager = type(
        f"{name}_eager", (Function,), {"forward": staticmethod(eager_forward), "backward": staticmethod(rule.backward)}
    )
    rule.transformable = type(
        f"{name}_transformable",
        (Function,),
        {
            "forward": staticmethod(op),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(rule.backward),
            "jvp": staticmethod(jvp),
            "generate_vmap_rule": True,
        },
    )

    def autograd_kernel(*args: Any) -> Any:
        if has_tangent(args):
            raise NotImplementedError(
                f"torch.ops.zoo.{name} takes no forward-mode tangents; call zoo.ops.{name}, which does"
            )
        return _eager(rule, args)

    _library.impl(name, autograd_kernel, "Autograd")
    torch.library.register_vmap(op, rule.vmap, lib=_library)
    return rule


def is_plain() -> bool:
    """No derivative is recorded and nothing traces or transforms: ``rule.run`` below autograd is all there is to do."""
    return not torch.compiler.is_compiling() and is_final()


def is_final() -> bool:
    """No derivative will be taken of what is computed now; it may be compiled, but not traced or transformed."""
    return not (
        is_grad_enabled()
        or _get_tracing_state() is not None
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def apply(rule: type[Rule], *args: Any) -> Any:
    """Call the operator of a rule, differentiably, in whatever mode the caller is."""
    if torch.compiler.is_compiling() or _get_tracing_state() is not None:
        return rule.op(*args)
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return rule.transformable.apply(*args)
    if is_grad_enabled():
        for a in args:
            if isinstance(a, Tensor) and a.requires_grad:
                return rule.eager.apply(*args)
    with _AutoDispatchBelowAutograd():  # not a call of _eager: it would cost as much as the checks above
        return rule.run(*args)


def _eager(rule: type[Rule], args: tuple[Any, ...]) -> Any:
    if is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return rule.eager.apply(*args)
    with _AutoDispatchBelowAutograd():
        return rule.run(*args)


def has_tangent(args: tuple[Any, ...]) -> bool:
    """Whether a forward-mode derivative is on its way through one of the arguments."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)
