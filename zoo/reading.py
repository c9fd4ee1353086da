"""What the source of a function says about the modules it names: a small reader on :mod:`ast`."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

__all__ = [
    "BELOW",
    "CHILD",
    "Names",
    "Path",
    "arguments_of",
    "asked_about",
    "bound_names",
    "chain_of",
    "function_of",
    "is_super",
    "names_in",
    "parsed",
    "paths_of",
]

CHILD, BELOW = "*", "**"
"""In a path: any child, and any module below, itself included."""

Path = tuple[str, ...]
"""From a module to what an expression stands for: ``self.layers[i].weight`` is ("layers", "*", "weight")."""
Names = Mapping[str, set[Path]]

_LONGEST = 8
# asking about a weight is not computing with it
_ABOUT = {"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda", "layout"}
_HANDING_ON = {"children", "named_children", "modules", "named_modules", "values", "items"}
_HANDING_ON |= {"enumerate", "getattr", "iter", "list", "next", "reversed", "sorted", "tuple", "zip"}
"""Calls that return the modules that they are given, or those in them."""


def function_of(member: Any) -> types.FunctionType | None:
    """The plain function behind a method, property, cached property or decorator; None where there is none."""
    for attribute in ("__func__", "fget", "func"):
        member = getattr(member, attribute, member)
    member = inspect.unwrap(member) if callable(member) else member
    return member if isinstance(member, types.FunctionType) and member is not nn.Module.forward else None


def arguments_of(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.lru_cache(maxsize=4096)
def parsed(code: types.CodeType) -> ast.AST | None:
    try:
        source = inspect.getsource(code)
        return ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, SyntaxError):  # none, as for what was typed into a prompt; or a lambda, cut out of its line
        return None


def names_in(code: types.CodeType) -> set[str]:
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}  # of getattr
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return texts.union(code.co_names, *inner)


def chain_of(node: ast.AST) -> tuple[str, Path] | None:
    """The name that an expression such as ``self.a[i].b`` begins with, and the path from there."""
    path: list[str] = []
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=value, attr=name):
                path.append(name)
            case ast.Subscript(value=value):
                path.append(CHILD)
            case ast.NamedExpr(value=value):
                pass
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                path.append(name)
            case _:
                return None
        node = value
    return node.id, tuple(reversed(path))


def paths_of(node: ast.AST, names: Names) -> set[Path]:
    """What an expression may stand for."""
    chain = chain_of(node)
    return {(*base, *chain[1])[:_LONGEST] for base in names.get(chain[0], ())} if chain else set()


def bound_names(tree: ast.AST, given: Names) -> Names:
    """The given names, and those that the code binds to something that mentions them."""
    names: dict[str, set[Path]] = defaultdict(set, {name: set(paths) for name, paths in given.items()})
    bindings = list(_bindings(tree))
    known = -1
    # until a round adds nothing: which line runs before which is unknown
    while known != (known := sum(map(len, names.values()))):
        for target, value in bindings:
            if chain_of(value):
                meant = paths_of(value, names)
            else:
                inside = {path for node in _handed_on(value) for path in paths_of(node, names) if path}
                meant = {path if path[-1] == BELOW else (*path, BELOW)[:_LONGEST] for path in inside}
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names[node.id] |= meant
    return names


def _handed_on(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression that its value may be, or contain: not what a call computes from them."""
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name not in _HANDING_ON:
            return
    yield node
    for part in ast.iter_child_nodes(node):
        yield from _handed_on(part)


def _bindings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _matched(target, value)
            case ast.NamedExpr(target=target, value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                yield target, value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                # not the container itself but what is in it
                yield target, ast.Tuple(elts=[value], ctx=ast.Load())


def _matched(target: ast.AST, value: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The single assignments in ``a, b = self.a, self.b``."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            yield from zip(targets, values, strict=True)
        case _:
            yield target, value


def asked_about(tree: ast.AST) -> Iterator[int]:
    """ids of the expressions that are only asked about."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if name in _ABOUT:
                yield id(value)
            case ast.Compare(left=value, ops=ops) if all(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                yield id(value)


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
