"""The filters a chat template may use, each within the budget of the rendering under way.

Most are Jinja's own behind a guard; the few whose result can be far larger than their input are
bounded first. All take the context, which also keeps Jinja from running them while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from headrace.tokenizer import template_values as values
from headrace.tokenizer.template_budget import current_budget, over_limit

Filter = Callable[..., Any]

# Jinja's filters whose result is not much larger than their input.
_PLAIN = (
    *("abs", "capitalize", "count", "d", "default", "first", "float", "int", "items", "last"),
    *("length", "lower", "reverse", "string", "title", "truncate", "upper", "urlencode"),
)
_ITERATING = ("list", "map", "reject", "rejectattr", "select", "selectattr")
_SORTING = ("dictsort", "groupby", "max", "min", "sort", "unique")
_SORT_COST = 16  # comparisons per item, about
_MAX_PRECISION = 100

_jinja = ImmutableSandboxedEnvironment()


def guarded_filters() -> dict[str, Filter]:
    """All allowed filters, by name."""
    filters = {name: _behind_guard(name) for name in (*_PLAIN, *_ITERATING, *_SORTING)}
    own = (_center, _escape, _format, _indent, _join, _replace, _round, _safe, _sum)
    filters.update({function.__name__.removeprefix("_"): function for function in own})
    filters.update(e=_escape, tojson=_tojson, trim=_trim)
    return filters


def _behind_guard(name: str) -> Filter:
    iterating, sorting = name in _ITERATING, name in _SORTING

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        if iterating:
            value = budget.iterate(value)
        elif sorting:
            if not isinstance(value, dict):
                value = list(budget.iterate(value))
            budget.charge(_SORT_COST * budget.size(value))
        return budget.made(_call(context, name, value, *args, **kwargs))

    return guarded


def _call(context: Context, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return _jinja.call_filter(name, value, args, kwargs, context=context, eval_ctx=context.eval_ctx)


@pass_context
def _center(context: Context, value: Any, width: int = 80) -> Any:
    budget = current_budget.get()
    return values.call_method(budget, budget.text(value), "center", [width], {})


@pass_context
def _escape(context: Context, value: Any) -> str:
    """For HTML, but as plain text: markup strings would escape what is added to them."""
    budget = current_budget.get()
    return budget.made(str(_call(context, "escape", budget.text(value))))


@pass_context
def _safe(context: Context, value: Any) -> str:
    return current_budget.get().text(value)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
    budget = current_budget.get()
    template = budget.text(value)
    values.require_printf(budget, template, kwargs or args)
    return budget.made(_call(context, "format", template, *args, **kwargs))


@pass_context
def _indent(
    context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    budget = current_budget.get()
    values.require_indent(budget, budget.text(value), width)
    return budget.made(_call(context, "indent", budget.text(value), width, first, blank))


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    budget = current_budget.get()
    items = budget.iterate(value)
    if attribute is not None:
        items = _call(context, "map", items, attribute=attribute)
    return values.join(budget, [budget.text(item) for item in items], budget.text(d))


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return values.replace(current_budget.get(), value, old, new, count)


@pass_context
def _round(context: Context, value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > _MAX_PRECISION:
        raise over_limit(f"rounding to over {_MAX_PRECISION} digits")
    return _call(context, "round", value, precision, method)


@pass_context
def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = current_budget.get().iterate(value)
    if attribute is not None:
        items = _call(context, "map", items, attribute=attribute)
    total = start
    environment = context.environment
    for item in items:  # through the sandbox's +, since items may be lists
        total = environment.call_binop(context, "+", total, item)  # type: ignore[attr-defined]
    return total


@pass_context
def _tojson(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    return values.to_json(current_budget.get(), value, *args, **kwargs)


@pass_context
def _trim(context: Context, value: Any, chars: str | None = None) -> Any:
    budget = current_budget.get()
    return values.call_method(budget, budget.text(value), "strip", [chars], {})
