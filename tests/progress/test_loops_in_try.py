"""Loops within `try` and `with`: a signal's handler that raises where one jumps back is to find them around it."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import mpdist

PACKAGE = Path(mpdist.__file__).parent
LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)

# Where nothing has to be undone as they jump back.
UNDO_NOTHING = {
    "Supervisor.run": "the handlers of mpdist run raise nothing",
    "ArrayReceive._meet": "the message has been given to the mailbox",
    "Collective._advance": "the next look goes on with the request that was got last",
    "Receive._step": "the next look goes on with the request that was got last",
}


def needs_its_end(node: ast.AST) -> bool:
    """Whether it undoes something after any exception; a file closes when nobody has it any more."""
    if isinstance(node, ast.With):
        contexts = [ast.unparse(item.context_expr) for item in node.items]
        return not all("suppress(" in each or each.startswith("open(") for each in contexts)
    if not isinstance(node, ast.Try):
        return False
    kinds = [handler.type for handler in node.handlers]
    return bool(node.finalbody) or any(kind is None or "BaseException" in ast.unparse(kind) for kind in kinds)


def functions(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from functions(constant)


def loops_in_try(tree: ast.AST) -> set[tuple[int, int]]:
    """First and last line of each."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.With | ast.Try) and needs_its_end(node)]
    inside = [each for body in bodies for statement in body for each in ast.walk(statement)]
    return {(each.lineno, each.end_lineno or 0) for each in inside if isinstance(each, LOOPS)}


def escaping(source: str) -> Iterator[str]:
    """Functions in which a jump back has other handlers of exceptions than the loop to which it belongs."""
    loops = loops_in_try(ast.parse(source))
    if not loops:
        return
    for code in functions(compile(source, "<source>", "exec")):
        lines = {each.offset: each.positions and each.positions.lineno for each in dis.get_instructions(code)}
        table = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # there, as dis shows it

        def handlers(offset: int, table: list[dis._ExceptionTableEntry] = table) -> set[int]:  # type: ignore[name-defined]
            return {entry.target for entry in table if entry.start <= offset < entry.end}

        for jump in dis.get_instructions(code):
            ends = lines[jump.offset], lines.get(jump.argval)
            is_of_loop = any(all(line and first <= line <= last for line in ends) for first, last in loops)
            if jump.opname == "JUMP_BACKWARD" and is_of_loop and handlers(jump.offset) != handlers(jump.argval):
                yield code.co_qualname


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_loop_that_needs_its_try_does_not_jump_back_outside_of_it(path: Path) -> None:
    found = set(escaping(path.read_text(encoding="utf-8"))) - UNDO_NOTHING.keys()
    assert not found, f"let the loops be functions of their own in {', '.join(found)} of {path}"


def test_such_a_loop_is_found() -> None:
    """From Python 3.12 on; before, there is none."""
    source = "def f(lock, x):\n    with lock:\n        while x:\n            x.pop()\n"
    assert list(escaping(source)) == (["f"] if sys.version_info >= (3, 12) else [])
