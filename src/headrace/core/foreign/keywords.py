"""Other engines' names as keyword arguments, as keys of headrace.toml and as variables.

Values in, our settings out. cli/foreign.py does the same for a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from headrace.core.errors import ConfigError
from headrace.core.foreign.answers import find_keyword, shared_value, understand

# A name and a value as the user wrote them.
Write = Callable[[str, object], str]


def own_keywords(values: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    """For `LLM(...)`: `known` are our names there. Names that nobody has are left as they are."""
    found: dict[str, tuple[object, str]] = {}
    for name, value in values.items():
        settings = own_settings(name, value, "{}={!r}".format, is_own=name in known)
        is_theirs = settings is not None
        for ours, translated in ({name: value} if settings is None else settings).items():
            if is_theirs and ours not in known:
                raise _of_the_server(name, ours)
            before = found.get(ours)
            has_ours = before is not None and (before[1] in known or name in known)
            if before is not None and (before[0] != translated or has_ours):
                raise both(before[1], name, ours)
            found[ours] = (translated, name)
    return {ours: value for ours, (value, _) in found.items()}


def own_settings(
    name: str, value: object, write: Write, *, is_own: bool
) -> dict[str, object] | None:
    """Our settings for a name and a value; None where both are ours, or nobody's."""
    if is_own:
        return shared_value(name, value, write(name, value))
    found = find_keyword(name)
    return None if found is None else understand(found[0], value, write(name, value))


def both(first: str, second: str, ours: str) -> ConfigError:
    return ConfigError(
        f"{first} and {second} are given; both set {ours}.", "Keep one of them.", param=second
    )


def _of_the_server(name: str, ours: str) -> ConfigError:
    if ours == "model":
        return ConfigError(f"{name} is given; expected model.", "Write model=... instead.")
    return ConfigError(
        f"{name} is {ours} here, a setting of the server and not of an engine.",
        f"Leave it out; `headrace serve` has --{ours.replace('_', '-')}.",
        param=name,
    )
