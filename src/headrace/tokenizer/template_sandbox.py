"""Jinja for untrusted templates: transformers' dialect, in a sandbox with limits.

Jinja's own sandbox protects the machine from a template, but not its time and memory. Here the
parsed template is rewritten so that every loop, call, literal, slice and concatenation goes
through a Budget; methods, filters and globals are allow-listed. It knows nothing of chats.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from headrace.core.errors import TemplateError
from headrace.tokenizer import template_values as values
from headrace.tokenizer.template_budget import (
    MAX_VALUE_CHARS,
    Budget,
    current_budget,
    over_limit,
)
from headrace.tokenizer.template_filters import guarded_filters

MAX_SOURCE_CHARS = 128 << 10
MAX_STRFTIME_CHARS = 256
_MAX_ERROR_CHARS = 500

_REFUSED_NODES = (
    *(nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include),
    *(nodes.EvalContextModifier, nodes.ScopedEvalContextModifier),
)


class CompiledTemplate:
    """One template, ready to render any number of times, from any thread."""

    def __init__(self, source: str, *, clock: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"The chat template has {len(source)} characters; expected at most "
                f"{MAX_SOURCE_CHARS}.",
                "Send a plain prompt instead, or give the model another template.",
            )
        environment = _Environment(clock)
        try:
            tree = _Rewriter().visit(environment.parse(source))
            tree.set_environment(environment)
            code = environment.compile(tree)
            self._template = jinja2.Template.from_code(
                environment, code, environment.make_globals(None)
            )
        except TemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise _failed("is malformed", f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # deep nesting, absurd literals: Python's parser has its own
            raise _failed("is malformed", f"{type(error).__name__}: {error}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text, or TemplateError: refused by the template, failed, or past its limits."""
        token = current_budget.set(Budget())
        try:
            pieces: list[str] = []
            length = 0
            for piece in self._template.generate(**variables):
                length += len(piece)
                if length > MAX_VALUE_CHARS:
                    raise over_limit(f"over {MAX_VALUE_CHARS} characters of text")
                pieces.append(piece)
            return "".join(pieces)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise _failed("failed", str(error.message or type(error).__name__)) from error
        except Exception as error:  # whatever its operations raise on values they don't fit
            raise _failed("failed", f"{type(error).__name__}: {error}") from error
        finally:
            current_budget.reset(token)


def _failed(how: str, reason: str) -> TemplateError:
    return TemplateError(
        f"The chat template {how}: {reason[:_MAX_ERROR_CHARS].rstrip('.')}.",
        "Check the messages against what the model's template expects, or send a plain prompt.",
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own shape

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Rewriter(NodeTransformer):
    """Rewrites operations that cost time or memory to call the environment's `checked_*`."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, _REFUSED_NODES):
            name = type(node).__name__.lower()
            raise _failed("is malformed", f"line {node.lineno}: {name} is not allowed")
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _checked("iterate", node.iter)
        _charge_static(node, node.body)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        _charge_static(node, node.body)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        _charge_static(node, node.body)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _checked("concatenate", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _checked("made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _checked("made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _checked("made", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _checked("made", node) if isinstance(node.arg, nodes.Slice) else node


def _checked(name: str, *arguments: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(f"checked_{name}")
    line = arguments[0].lineno if arguments else None
    return nodes.Call(function, list(arguments), [], None, None, lineno=line)


def _charge_static(node: nodes.Node, body: list[nodes.Node]) -> None:
    """Charge a body's literal text each time it runs; Jinja emits it without any hook."""
    chars = sum(len(data.data) for part in body for data in part.find_all(nodes.TemplateData))
    if chars:
        charge = _checked("charge", nodes.Const(chars, lineno=node.lineno))
        body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, which could shadow its own workings."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be a name too
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise TypeError(f"a namespace can't hold the name {name!r}")


class _Format:
    """`text.format`, taken but not yet called."""

    __slots__ = ("formatter", "text")

    def __init__(self, text: str, formatter: Callable[..., str]) -> None:
        self.text = text
        self.formatter = formatter


class _Check:
    """A function that only the rewriter can put into a template."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


@pass_context
def _finalize(context: Context, value: Any) -> str:
    budget = current_budget.get()
    text = budget.text(value)
    budget.charge(len(text))
    return text


def _refuse_messages(message: object) -> None:
    reason = current_budget.get().text(message)[:_MAX_ERROR_CHARS].rstrip(".")
    raise TemplateError(
        f"The chat template refused the messages: {reason}.",
        "Change the messages to what the model's template accepts.",
        param="messages",
    )


class _Environment(ImmutableSandboxedEnvironment):
    # Never folded at compile time, always through call_binop.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
        )
        bounded_range = self.globals["range"]  # the sandbox's own

        def strftime_now(format: str) -> str:
            if len(format) > MAX_STRFTIME_CHARS:
                raise over_limit(f"a date format of over {MAX_STRFTIME_CHARS} characters")
            return clock().strftime(format)

        def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        self.globals = {
            "dict": make_dict,
            "namespace": _Namespace,
            "raise_exception": _refuse_messages,
            "range": bounded_range,
            "strftime_now": strftime_now,
        }
        self._callables = frozenset(self.globals.values())
        self.filters = guarded_filters()

    # What the rewritten template calls; a template itself can't name the environment.
    checked_iterate = _Check(lambda budget, items: budget.iterate(items))
    checked_concatenate = _Check(lambda budget, *parts: values.concatenate(budget, parts))
    checked_made = _Check(lambda budget, value: budget.made(value))
    checked_charge = _Check(lambda budget, chars: budget.charge(chars))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        values.require_binary(budget, operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        formatter = super().wrap_str_format(value)
        return None if formatter is None else _Format(value.__self__, formatter)

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        if isinstance(target, _Check):
            return target.run(budget, *args)
        budget.step()
        # Jinja passes the block's variables along for functions that take the context.
        hidden = {
            name: kwargs.pop(name) for name in ("_block_vars", "_loop_vars") if name in kwargs
        }
        if isinstance(target, LoopContext):  # a recursive loop
            return budget.made(target(budget.iterate(args[0])))
        if isinstance(target, _Format):
            return values.format_text(budget, target.text, target.formatter, args, kwargs)
        owner = getattr(target, "__self__", None)
        if isinstance(target, types.BuiltinMethodType) and type(owner) in values.METHODS:
            return values.call_method(budget, owner, target.__name__, args, kwargs)
        if (
            isinstance(target, (Macro, Undefined))
            or isinstance(owner, LoopContext)
            or (isinstance(target, (types.FunctionType, type)) and target in self._callables)
        ):
            return budget.made(super().call(context, target, *args, **kwargs, **hidden))
        raise _failed("failed", f"it calls a {type(target).__name__}, which is not allowed")
