"""A Jinja environment for templates nobody has vetted.

Owns the extensions chat templates rely on (those of Hugging Face's renderer) and the bounds of a rendering: steps of
loops and macro calls, time, and size of what is written and built. Templates reach no attribute that begins with an
underscore and change no value given to them. Bounds are checked at each step and each operation that makes a value
grow.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
# Characters a rendering writes (whether they end up in the prompt or in a variable), and those it builds on the way.
MAX_WRITTEN = 64 << 20
MAX_BUILT = 1 << 30
# Elements of a list, and any number a filter or method is given, which may be a width.
MAX_NUMBER = 1_000_000
_MAX_BITS = 4096
_WIDTH = re.compile(r"\d{6}")


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, which only training uses; its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rendering(threading.local):
    """What the rendering of this thread has used up."""

    steps = 0
    written = 0
    built = 0
    ends = 0.0


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders templates within the bounds. Renderings may run side by side in several threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = {name: self._bounded(filter) for name, filter in self.filters.items()}
        self.filters |= {"tojson": _tojson, "join": self._join}
        self.globals.pop("lipsum", None)
        self._used = _Rendering()

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Returns the text; raises jinja2.TemplateError where a bound is passed."""
        self._used.steps = self._used.written = self._used.built = 0
        self._used.ends = time.monotonic() + MAX_SECONDS
        return "".join(template.generate(variables))

    def step(self, written: int) -> None:
        """Counts one step of a loop or call of a macro, whose body writes that many characters of its own."""
        used = self._used
        used.steps += 1
        used.written += written
        if used.steps > MAX_STEPS:
            raise jinja2.TemplateError(f"takes more than {MAX_STEPS} steps")
        if used.written > MAX_WRITTEN:
            raise jinja2.TemplateError(f"writes more than {MAX_WRITTEN} characters")
        if used.steps % 64 == 0 and time.monotonic() > used.ends:
            raise jinja2.TemplateError(f"takes longer than {MAX_SECONDS:.0f} s")

    def written(self, value: Any) -> str:
        """Returns the text of a value that is about to be written."""
        text = str(value)
        self.step(len(text))
        return text

    def joined(self, *values: Any) -> str:
        """Returns the values as one text, as Jinja's `~` does."""
        texts = [str(value) for value in values]
        self._build(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator whose result may be far larger than its operands."""
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise jinja2.TemplateError("computes a number out of bounds")
        elif operator == "*":
            sized, times = (right, left) if isinstance(left, int) else (left, right)
            if hasattr(sized, "__len__") and isinstance(times, int):
                self._build(len(sized) * max(times, 0), sized)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._build(len(left) + len(right), left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls, after a look at methods that make text grow."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        if isinstance(owner, str):
            args = __self._check_method(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)

    def _check_method(self, owner: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        _check_numbers(args)
        if method == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self._build(len(owner) + owner.count(args[0]) * len(args[1]))
        elif method == "join" and args:
            parts = list(args[0])
            self._build(sum(len(part) + len(owner) for part in parts if isinstance(part, str)))
            return (parts,)
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the sandboxed `format` of a string whose widths are within bounds."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        """Jinja's `join` filter."""
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        texts = [str(part) for part in value]
        self._build(sum(map(len, texts)) + len(d) * len(texts))
        return str(d).join(texts)

    def _bounded(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that refuses numbers out of bounds, and counts the text it is given and returns."""

        @functools.wraps(filter)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_numbers((*args, *kwargs.values()))
            for value in args:
                if isinstance(value, str):
                    self._build(len(value))
                    if filter.__name__ == "do_format":
                        _check_format(value)
            if filter.__name__ == "do_replace":
                self._check_method(str(args[1]), "replace", tuple(args[2:]))
            result = filter(*args, **kwargs)
            if isinstance(result, str):
                self._build(len(result))
            return result

        return bounded

    def _build(self, size: int, like: Any = "") -> None:
        if not isinstance(like, str) and size > MAX_NUMBER:
            raise jinja2.TemplateError(f"builds a list of more than {MAX_NUMBER} elements")
        self._used.built += size
        if size > MAX_WRITTEN or self._used.built > MAX_BUILT:
            raise jinja2.TemplateError("builds more text than a prompt may need")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _count(tree)
        return tree


def _count(tree: nodes.Template) -> None:
    """Makes the compiled template count its steps and what it writes and joins."""
    for node in _below(tree):
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            own = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_call("step", [nodes.Const(own)], node.lineno), lineno=node.lineno))
        elif isinstance(node, nodes.Output):
            node.nodes = [
                part if isinstance(part, nodes.TemplateData) else _call("written", [part], node.lineno)
                for part in node.nodes
            ]
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(node, field, _call("joined", value.nodes, value.lineno))
            elif isinstance(value, list):
                value[:] = [
                    _call("joined", item.nodes, item.lineno) if isinstance(item, nodes.Concat) else item
                    for item in value
                ]


def _below(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yields a node and all under it, from the top; what a node becomes while it is held is what is gone into."""
    yield node
    for child in node.iter_child_nodes():
        yield from _below(child)


def _call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, args, [], None, None, lineno=line)


def _check_numbers(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values[1:] or values):
        raise jinja2.TemplateError("passes a number out of bounds")


def _check_format(text: str) -> None:
    if _WIDTH.search(text) or "*" in text:
        raise jinja2.TemplateError("formats with a width out of bounds")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as Hugging Face's renderer writes it: nothing escaped for HTML, characters as they are."""
    if indent is not None:
        _check_numbers((indent,))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
