"""Structural mutation operators: each changes one node in the syntax tree of one function.

A site is one possible change. An operator lists the sites of a function in source order, and a mutant names a site by
its position in that list. Renamed variables, new comments and new formatting therefore leave mutants valid.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = Callable[[], None]


class MutationError(ValueError):
    """Error of a mutant that no longer fits the source."""


class Place(NamedTuple):
    """A node and the field of its parent that holds it."""

    parent: ast.AST
    field: str
    index: int | None
    """position in the field, if the field is a list"""
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def places(parent: ast.AST) -> Iterator[Place]:
    """Yield the places of all nodes under `parent`, each before its children. Type annotations are left out."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns"):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST):
                yield Place(parent, field, index, node)
                yield from places(node)


# -- operators ---------------------------------------------------------------------------------------------------------

_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}
_OPPOSITE |= {"argmax": "argmin", "floor": "ceil", "ceil": "floor"}


def _compare(function: Function) -> Iterator[Change]:
    """`<` becomes `<=`, `==` becomes `!=`, `is` becomes `is not`, and vice versa."""
    for place in places(function):
        if type(place.node) in _OTHER_COMPARISON:
            yield lambda it=place: it.put(_OTHER_COMPARISON[type(it.node)]())  # pyright: ignore[reportArgumentType]


def _operator(function: Function) -> Iterator[Change]:
    """`+` becomes `-`, `*` becomes `/`, `and` becomes `or`, and so on."""
    for place in places(function):
        if type(place.node) in _OTHER_OPERATOR:
            yield lambda it=place: it.put(_OTHER_OPERATOR[type(it.node)]())


def _conditions(function: Function) -> Iterator[tuple[Place, ast.expr]]:
    for place in places(function):
        if place.field in ("test", "ifs", "guard") and isinstance(place.node, ast.expr):
            yield place, place.node


def _negate(function: Function) -> Iterator[Change]:
    """A condition of an `if`, `while`, `assert` or comprehension becomes its negation."""
    for place, node in _conditions(function):
        yield lambda it=place, node=node: it.put(ast.UnaryOp(ast.Not(), node))


def _always(function: Function) -> Iterator[Change]:
    """A condition becomes True."""
    for place, _ in _conditions(function):
        yield lambda it=place: it.put(ast.Constant(True))


def _never(function: Function) -> Iterator[Change]:
    """A condition becomes False."""
    for place, _ in _conditions(function):
        yield lambda it=place: it.put(ast.Constant(False))


def _drop(function: Function) -> Iterator[Change]:
    """A statement, with all that it holds, becomes `pass`. The docstring is no site."""
    for place in places(function):
        text = isinstance(place.node, ast.Expr) and isinstance(place.node.value, ast.Constant)
        if isinstance(place.node, ast.stmt) and not text and not isinstance(place.node, ast.Pass):
            yield lambda it=place: it.put(ast.Pass())


def _swap(function: Function) -> Iterator[Change]:
    """Two neighbours change places: arguments of a call, elements of a tuple, operands, or the branches of `a if b`."""
    for place in places(function):
        match place.node:
            case ast.Call(args=nodes) | ast.Tuple(elts=nodes, ctx=ast.Load()):
                for i in range(len(nodes) - 1):
                    yield lambda nodes=nodes, i=i: nodes.insert(i, nodes.pop(i + 1))
            case ast.BinOp() as sum_:
                yield lambda it=sum_: _exchange(it, "left", "right")
            case ast.IfExp() as choice:
                yield lambda it=choice: _exchange(it, "body", "orelse")


def _exchange(node: ast.AST, one: str, other: str) -> None:
    first, second = getattr(node, one), getattr(node, other)
    setattr(node, one, second)
    setattr(node, other, first)


def _constant(function: Function) -> Iterator[Change]:
    """A number grows by one, a truth value is inverted, a text becomes another text."""
    for place in places(function):
        match place.node:
            case ast.Constant(value=bool() as value):
                yield lambda it=place, value=value: it.put(ast.Constant(not value))
            case ast.Constant(value=int() | float() as value):
                yield lambda it=place, value=value: it.put(ast.Constant(value + 1))
            case ast.Constant(value=str()) if not isinstance(place.parent, ast.Expr | ast.JoinedStr):
                yield lambda it=place: it.put(ast.Constant("mutant"))


def _less(function: Function) -> Iterator[Change]:
    """A number shrinks by one."""
    for place in places(function):
        match place.node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                yield lambda it=place, value=value: it.put(ast.Constant(value - 1))


def _operand(function: Function) -> Iterator[Change]:
    """One operand of `a + b`, `a and b` or `-a` is left out, with its operator."""
    for place in places(function):
        match place.node:
            case ast.BinOp(left=left, right=right):
                yield lambda it=place, node=right: it.put(node)
                yield lambda it=place, node=left: it.put(node)
            case ast.BoolOp(values=values):
                for i in range(len(values)):
                    yield lambda values=values, i=i: values.__delitem__(i)
            case ast.UnaryOp(operand=node):
                yield lambda it=place, node=node: it.put(node)


def _argument(function: Function) -> Iterator[Change]:
    """One argument of a call is left out, so that its default holds."""
    for place in places(function):
        if isinstance(place.node, ast.Call):
            for nodes in (place.node.args, place.node.keywords):
                for i in range(len(nodes)):
                    yield lambda nodes=nodes, i=i: nodes.__delitem__(i)


def _element(function: Function) -> Iterator[Change]:
    """One element of a tuple, list or set, or one end of a slice, is left out."""
    for place in places(function):
        match place.node:
            case ast.Tuple(elts=nodes, ctx=ast.Load()) | ast.List(elts=nodes, ctx=ast.Load()) | ast.Set(elts=nodes):
                for i in range(len(nodes)):
                    yield lambda nodes=nodes, i=i: nodes.__delitem__(i)
            case ast.Slice() as part:
                for end in ("lower", "upper", "step"):
                    if getattr(part, end) is not None:
                        yield lambda it=part, end=end: setattr(it, end, None)


def _unwrap(function: Function) -> Iterator[Change]:
    """A call becomes its first argument, or the object whose method it calls."""
    for place in places(function):
        match place.node:
            case ast.Call(func=ast.Attribute(value=owner), args=args):
                yield lambda it=place, node=owner: it.put(node)
                if args:
                    yield lambda it=place, node=args[0]: it.put(node)
            case ast.Call(args=[first, *_]):
                yield lambda it=place, node=first: it.put(node)


def _opposite(function: Function) -> Iterator[Change]:
    """`min` becomes `max`, `any` becomes `all`, `break` becomes `continue`, and vice versa."""
    for place in places(function):
        match place.node:
            case ast.Name(id=name) as node if name in _OPPOSITE:
                yield lambda it=node: setattr(it, "id", _OPPOSITE[it.id])
            case ast.Attribute(attr=name) as node if name in _OPPOSITE:
                yield lambda it=node: setattr(it, "attr", _OPPOSITE[it.attr])
            case ast.Break():
                yield lambda it=place: it.put(ast.Continue())
            case ast.Continue():
                yield lambda it=place: it.put(ast.Break())


_ALL = (_compare, _operator, _negate, _always, _never, _drop, _swap, _constant, _less, _operand, _argument, _element)
OPERATORS = {it.__name__[1:]: it for it in (*_ALL, _unwrap, _opposite)}


# -- a mutated module --------------------------------------------------------------------------------------------------


def find(module: ast.Module, name: str) -> Function:
    """Return the function with the qualified name `name`, such as `Class.method` or `outer.inner`."""
    node: ast.AST = module
    for part in name.split("."):
        inside = [place.node for place in places(node) if isinstance(place.node, Function | ast.ClassDef)]
        node = next((it for it in inside if it.name == part), node)
        if not isinstance(node, Function | ast.ClassDef) or node.name != part:
            raise MutationError(f"no function {name}")
    if isinstance(node, ast.ClassDef):
        raise MutationError(f"{name} is a class: name a method")
    return node


def mutate(source: str, function: str, operator: str, site: int) -> str:
    """Return the module with one change to one function. Raises MutationError if there is no such function or site."""
    module = ast.parse(source)
    if operator not in OPERATORS:
        raise MutationError(f"no operator {operator!r}: use one of {', '.join(OPERATORS)}")
    changes = list(OPERATORS[operator](find(module, function)))
    if not 0 <= site < len(changes):
        raise MutationError(f"{function} has {len(changes)} sites for {operator!r}, no site {site}")
    changes[site]()
    return ast.unparse(ast.fix_missing_locations(module))


@cache
def unmutated(source: str) -> str:
    """Return the module as `mutate` formats it, without a change."""
    return ast.unparse(ast.parse(source))
