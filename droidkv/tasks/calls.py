"""Writing and comparing one function call in Python's notation."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

# In bfcl-eval an empty string among the allowed values says that the argument may be left out.
_MAY_BE_ABSENT = ""
_IGNORED_IN_STRINGS = re.compile(r"[ ,./\-_*^]")


def call_text(function: str, allowed: Mapping[str, Sequence[Any]], question: str = "") -> str:
    """A right call with the arguments that must be there.

    Args:
        function: Dotted name.
        allowed: Allowed values by argument name; at least one each.
        question: Of several allowed values the first that occurs in this text is taken.
    """
    arguments = [
        f"{name}={_first_in(values, question)!r}"
        for name, values in allowed.items()
        if _MAY_BE_ABSENT not in values
    ]
    return f"{function}({', '.join(arguments)})"


def _first_in(values: Sequence[Any], text: str) -> Any:
    return next((value for value in values if str(value) in text), values[0])


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Function name, positional and named arguments of a call, or None if it is no such call.

    Only literals are accepted as values; nothing is executed.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call):
            return None
        named = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        positional = [ast.literal_eval(argument) for argument in node.args]
        if any(word.arg is None for word in node.keywords):
            return None
        return ast.unparse(node.func), positional, named
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def matches(
    text: str, function: str, parameters: Sequence[str], allowed: Mapping[str, Sequence[Any]]
) -> bool:
    """Whether a text is a call of the function with allowed values only.

    As in the leaderboard's AST check: an argument may be absent if its allowed values hold "",
    strings are compared without case, blanks and punctuation, an integer may stand for a float.

    Args:
        text: What the model wrote.
        function: The right function's name.
        parameters: Its parameters in order, for positional arguments.
        allowed: Allowed values by argument name.
    """
    call = parse_call(text)
    if call is None or call[0] != function or len(call[1]) > len(parameters):
        return False
    given = dict(zip(parameters, call[1], strict=False))
    if given.keys() & call[2].keys():
        return False
    given |= call[2]
    if not given.keys() <= allowed.keys():
        return False
    return all(
        _is_allowed(given[name], values) if name in given else _MAY_BE_ABSENT in values
        for name, values in allowed.items()
    )


def _is_allowed(value: object, allowed: Sequence[Any]) -> bool:
    return any(_equal(value, candidate) for candidate in allowed)


def _equal(value: object, candidate: object) -> bool:
    if isinstance(value, str) and isinstance(candidate, str):
        return _normalise(value) == _normalise(candidate)
    if isinstance(value, list | tuple) and isinstance(candidate, list | tuple):
        return len(value) == len(candidate) and all(
            _equal(mine, theirs) for mine, theirs in zip(value, candidate, strict=True)
        )
    # True == 1 in Python, but they are different arguments.
    return isinstance(value, bool) == isinstance(candidate, bool) and value == candidate


def _normalise(text: str) -> str:
    return _IGNORED_IN_STRINGS.sub("", text).lower().replace("'", '"')
