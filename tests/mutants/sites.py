"""Print the sites of all operators in one function: python -m mutants.sites engine.committing:Stops.append"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from difflib import unified_diff

from mutants.mutant import SOURCE
from mutants.mutate import OPERATORS, find


def sites(module: str, name: str) -> Iterator[tuple[str, int, str]]:
    """Yield each operator and site with the lines that it changes."""
    source = (SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    text = ast.unparse(find(ast.parse(source), name))
    for operator, changes_of in OPERATORS.items():
        for site in range(len(list(changes_of(_function(text))))):
            function = _function(text)
            list(changes_of(function))[site]()
            after = ast.unparse(ast.fix_missing_locations(function))
            diff = list(unified_diff(text.split("\n"), after.split("\n"), lineterm="", n=0))[3:]
            yield operator, site, " ".join(line[1:].strip() for line in diff if line[0] == "+")


def _function(text: str) -> ast.FunctionDef:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


if __name__ == "__main__":
    for operator, site, line in sites(*sys.argv[1].split(":")):
        print(f"{operator} {site}: {line}")
