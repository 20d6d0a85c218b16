"""Folding, exact identities, common subexpressions, dead code: one pass, linear in the number of nodes.

Every rewrite gives the same value for every input, NaN, infinities and the sign of zero included (but for the sign and
payload of a NaN), and the same derivative.  So there is

    x*1 -> x    x/1 -> x    x*-1 -> -x    x + -0 -> x    x - 0 -> x    --x -> x    a + -b -> a - b    x/4 -> x*0.25
    join(even(x), odd(x)) -> x    even(join(a, b)) -> a    where(true, a, b) -> a    not(a == b) -> a != b
    pow(x, 1) -> x    pow(x, 2) -> x*x    cast(cast(x, bf16), bf16) -> cast(x, bf16)  ...

but not  x*0 -> 0 (NaN, inf, -0),  x - x -> 0,  x/x -> 1,  x + 0 -> x (-0 + 0 is +0),  0 - x -> -x (0 - 0 is +0),
-(a - b) -> b - a,  not(a < b) -> a >= b (NaN).  `stop_gradient` stays, or the derivative would change.

On indices, which wrap around in 32 bits, the same rules are exact, and i + 0 -> i, i * 1 -> i, too.

A rewrite never changes a type, because a reduction's domain is its value's: where(true, s, tile) stays where s is a
scalar.  Operations on constants are computed in double precision and rounded where they are used.

The result is a fixed point: nodes are made from simplified operands only, and no rule looks further up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Keep, Node, with_values
from codalang.ir.infer import infer
from codalang.ir.types import Dims, Dtype, Kind, ValueType

_DTYPES = {float: Dtype.F32, int: Dtype.I32, bool: Dtype.BOOL}
# Not min and max: which zero they answer may depend on the order.
_COMMUTATIVE = frozenset({"add", "mul", "eq", "ne", "and", "or"})
# Exponents for which a power of two and its reciprocal are normal in f32.
_EXPONENTS = range(-125, 126)


def simplify(epilogue: Epilogue) -> Epilogue:
    """An epilogue with the same outputs and, as far as it sees, no superfluous node.  In canonical order."""
    graph = _Graph(epilogue.dims)
    new_index: list[int] = []
    for node in epilogue.nodes:
        if node.op in ("param", "const"):
            new_index.append(graph.leaf(node))
        else:
            new_index.append(graph.make(node.op, tuple(new_index[a] for a in node.args), node, node.attr))
    outputs = tuple(with_values(o, tuple(new_index[v] for v in o.values)) for o in epilogue.outputs)
    keeps = _kept(epilogue.keeps, new_index, graph.nodes)
    return canonical(attrs.evolve(epilogue, nodes=tuple(graph.nodes), outputs=outputs, keeps=keeps))


def _kept(keeps: tuple[Keep, ...], new_index: list[int], nodes: list[Node]) -> tuple[Keep, ...]:
    """What is still there to be kept.  Where values that are now one were to be both, it is saved."""
    kept: dict[int, Keep] = {}
    for keep in sorted(keeps, key=lambda k: k.how != "save"):
        value = new_index[keep.value]
        if nodes[value].op != "const":
            kept.setdefault(value, attrs.evolve(keep, value=value))
    return tuple(kept.values())


class _Graph:
    """Nodes by hash consing: the same op on the same operands is the same node."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.nodes: list[Node] = []
        self._known: dict[tuple[object, ...], int] = {}

    def leaf(self, node: Node) -> int:
        return self._intern((node.op, repr(node.attr), node.type), node)

    def constant(self, value: float | bool, like: Node) -> int:
        type_ = ValueType(Kind.SCALAR, None, _DTYPES[type(value)])
        value = math.nan if isinstance(value, float) and math.isnan(value) else value
        return self.leaf(Node("const", (), type_, value, like.loc))

    def make(self, op: str, args: tuple[int, ...], like: Node, attr: str | float | int | None = None) -> int:
        """The simplest node for `op(args)`.  `like` is the node that it is made for: its location and hint."""
        operands = [self.nodes[a] for a in args]
        if all(n.op == "const" for n in operands):
            value = fold(op, [n.attr for n in operands], attr)
            if value is not None:
                return self.constant(value, like)
        type_ = infer(op, [n.type for n in operands], self.dims, like.loc, attr)
        for rule in _RULES.get(op, ()):
            # A rule sees the attribute of the node to make.
            found = rule(self, args, like if like.attr == attr else attrs.evolve(like, attr=attr))
            if found is not None and self.nodes[found].type == type_:
                return self._keep_hint(found, like)
        # The operands keep their order: they only compare without it.
        key = (op, tuple(sorted(args)) if op in _COMMUTATIVE else args, repr(attr))
        return self._intern(key, Node(op, args, type_, attr, like.loc, like.hint))

    def op(self, index: int) -> str:
        return self.nodes[index].op

    def arg(self, index: int, position: int = 0) -> int:
        return self.nodes[index].args[position]

    def is_constant(self, index: int, value: float | bool) -> bool:
        """True where the node is that very constant: 0.0 is not -0.0, and 1.0 is not true."""
        node = self.nodes[index]
        return node.op == "const" and repr(node.attr) == repr(value)

    def _intern(self, key: tuple[object, ...], node: Node) -> int:
        if key not in self._known:
            self.nodes.append(node)
            self._known[key] = len(self.nodes) - 1
            return len(self.nodes) - 1
        return self._keep_hint(self._known[key], node)

    def _keep_hint(self, index: int, like: Node) -> int:
        node = self.nodes[index]
        if node.hint is None and like.hint is not None and node.op not in ("param", "const"):
            self.nodes[index] = attrs.evolve(node, hint=like.hint)
        return index


# Identities.  A rule gets the graph, the operands and the node to make; it answers a node, or None where it does not
# apply.  An answer of another type than the op's is not taken.

_Rule = Callable[[_Graph, tuple[int, ...], Node], int | None]


def _neutral(position: int, value: float | bool) -> _Rule:
    """`value` as that operand leaves the other one as it is."""
    return lambda g, args, like: args[1 - position] if g.is_constant(args[position], value) else None


def _neutral_either(value: float | bool) -> tuple[_Rule, _Rule]:
    return _neutral(0, value), _neutral(1, value)


def _absorbing(position: int, value: bool) -> _Rule:
    return lambda g, args, like: args[position] if g.is_constant(args[position], value) else None


def _negating(position: int, value: float) -> _Rule:
    """`value` as that operand negates the other one."""
    return lambda g, args, like: (
        g.make("neg", (args[1 - position],), like) if g.is_constant(args[position], value) else None
    )


def _same(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    """op(x, x) -> x"""
    return args[0] if args[0] == args[1] else None


def _again(op: str) -> _Rule:
    """op of op(x) is op(x)."""
    return lambda g, args, like: args[0] if g.op(args[0]) == op else None


def _undone_by(op: str, position: int = 0) -> _Rule:
    """The op gives back the operand of `op` that stands at `position`."""
    return lambda g, args, like: g.arg(args[0], position) if g.op(args[0]) == op else None


def _of_negated(new_op: str, position: int, swap: bool = False) -> _Rule:
    """A negated operand moves into the op: a + -b -> a - b, -a + b -> b - a, a - -b -> a + b."""

    def rule(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
        if g.op(args[position]) != "neg":
            return None
        new = [*args]
        new[position] = g.arg(args[position])
        return g.make(new_op, (new[1], new[0]) if swap else (new[0], new[1]), like)

    return rule


def _of_two_negated(op: str) -> _Rule:
    """-a * -b -> a * b"""

    def rule(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
        negated = all(g.op(a) == "neg" for a in args)
        return g.make(op, (g.arg(args[0]), g.arg(args[1])), like) if negated else None

    return rule


def _reciprocal_of_power(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    """x / 2**k -> x * 2**-k: both round the same real number."""
    node = g.nodes[args[1]]
    if node.op != "const":
        return None
    mantissa, exponent = math.frexp(float(node.attr or 0.0))
    if abs(mantissa) != 0.5 or exponent - 1 not in _EXPONENTS:
        return None
    return g.make("mul", (args[0], g.constant(math.copysign(2.0 ** (1 - exponent), mantissa), like)), like)


def _power(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    """pow(x, 1) -> x, pow(x, 2) -> x * x"""
    if like.attr == 1.0:
        return args[0]
    return g.make("mul", (args[0], args[0]), like) if like.attr == 2.0 else None


def _cast_again(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    """What is rounded to a dtype already, or to one whose values f32 has all, stays."""
    inner = g.nodes[args[0]]
    return args[0] if inner.op == "cast" and like.attr in (inner.attr, "f32") else None


def _abs_of_negated(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    return g.make("abs", (g.arg(args[0]),), like) if g.op(args[0]) == "neg" else None


def _not_of(op: str, opposite: str) -> _Rule:
    """Exact for == and != only: an order comparison with NaN is false either way."""
    return lambda g, args, like: g.make(opposite, g.nodes[args[0]].args, like) if g.op(args[0]) == op else None


def _where_constant(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    condition, yes, no = args
    return yes if g.is_constant(condition, True) else no if g.is_constant(condition, False) else None


def _where_same(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    return args[1] if args[1] == args[2] else None


def _where_not(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    return g.make("where", (g.arg(args[0]), args[2], args[1]), like) if g.op(args[0]) == "not" else None


def _join_of_split(g: _Graph, args: tuple[int, ...], like: Node) -> int | None:
    left, right = args
    split = g.op(left) == "even" and g.op(right) == "odd" and g.arg(left) == g.arg(right)
    return g.arg(left) if split else None


_RULES: dict[str, tuple[_Rule, ...]] = {
    "add": (*_neutral_either(-0.0), *_neutral_either(0), _of_negated("sub", 1), _of_negated("sub", 0, swap=True)),
    "sub": (_neutral(1, 0.0), _neutral(1, 0), _negating(0, -0.0), _negating(0, 0), _of_negated("add", 1)),
    "mul": (
        *(rule for one in (1.0, 1) for rule in _neutral_either(one)),
        *(_negating(position, one) for one in (-1.0, -1) for position in (0, 1)),
        _of_two_negated("mul"),
    ),
    "div": (_neutral(1, 1.0), _negating(1, -1.0), _of_two_negated("div"), _reciprocal_of_power),
    "neg": (_undone_by("neg"),),
    "abs": (_again("abs"), _abs_of_negated),
    "min": (_same,),
    "max": (_same,),
    "and": (_neutral(0, True), _neutral(1, True), _absorbing(0, False), _absorbing(1, False), _same),
    "or": (_neutral(0, False), _neutral(1, False), _absorbing(0, True), _absorbing(1, True), _same),
    "not": (_undone_by("not"), _not_of("eq", "ne"), _not_of("ne", "eq")),
    "where": (_where_constant, _where_same, _where_not),
    "pow": (_power,),
    "cast": (_cast_again,),
    "stop_gradient": (_again("stop_gradient"),),
    "even": (_undone_by("join", 0),),
    "odd": (_undone_by("join", 1),),
    "join": (_join_of_split,),
}


# Constant folding, with the special values of torch.


def fold(
    op: str, values: Sequence[float | bool | str | None], attr: str | float | int | None = None
) -> float | bool | None:
    """The value of an op on constants, or None where there is none that is certain."""
    if op not in _FOLD:
        return None
    try:
        value = _FOLD[op](*values, *([] if attr is None else [attr]))
    except OverflowError:  # only exp, exp2 overflow: everything else answers infinities by itself
        return math.inf
    if type(value) is int:
        return (value + 2**31) % 2**32 - 2**31  # indices wrap around
    return value


def _divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _extreme(choose: Callable[[float, float], float]) -> Callable[[float, float], float | None]:
    def fold(a: float, b: float) -> float | None:
        if math.isnan(a) or math.isnan(b):
            return math.nan
        if a == 0 and b == 0 and repr(a) != repr(b):
            return None  # which zero comes out is not defined
        return choose(a, b)

    return fold


def _logarithm(log: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: log(x) if x > 0 else -math.inf if x == 0 else math.nan


def _pow(x: float, exponent: float) -> float | None:
    if repr(x) in ("-0.0", "-inf") and not exponent.is_integer():
        return None  # the C library has other answers than a root, which may stand for the power
    if x == 0 and exponent < 0:
        odd = exponent % 2 == 1
        return math.copysign(math.inf, x) if odd else math.inf
    if math.isfinite(x) and x < 0 and not exponent.is_integer():
        return math.nan
    try:
        return math.pow(x, exponent)
    except OverflowError:
        return -math.inf if x < 0 and exponent % 2 == 1 else math.inf


def _periodic(f: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: f(x) if math.isfinite(x) else math.nan


def _sqrt(x: float) -> float:
    return math.sqrt(x) if not x < 0 else math.nan


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) if x < 0 else math.nan


_FOLD: dict[str, Callable[..., float | bool | None]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "neg": lambda a: -a,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "where": lambda c, a, b: a if c else b,
    "min": _extreme(min),
    "max": _extreme(max),
    "abs": abs,
    "exp": math.exp,
    "exp2": lambda x: math.pow(2.0, x),
    "log": _logarithm(math.log),
    "log2": _logarithm(math.log2),
    "sqrt": _sqrt,
    "rsqrt": lambda x: _divide(1.0, _sqrt(x)),
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "erf": math.erf,
    "sin": _periodic(math.sin),
    "cos": _periodic(math.cos),
    "pow": _pow,
    "float": float,
    "stop_gradient": lambda x: x,
}
