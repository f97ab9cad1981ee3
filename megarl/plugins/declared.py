"""Reads names, options and arguments of built-in losses, estimators, rewards and trackers from source.

    @register_policy_loss("gmpo", "geo_mean", per_sequence=True, agg_mode="seq-mean-token-mean")
    def gmpo(log_probs: Tensor, ..., *, clip_low: float = 0.4, clip_high: float = 0.4) -> ...

The configuration is checked, and the tables of the documentation are written, in processes without torch.  Both get
from here the name of the function, the options of its decorator, and its keyword-only arguments; so a built-in loss,
estimator, KL estimator, aggregation or reward is one function in one file.  A decorator's arguments must be literals,
except for a function of the same file (`select=`), whose keyword-only arguments then count as the loss's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
REQUIRED = "required"  # stands for the default of an argument without one


@dataclass(frozen=True, eq=False)
class Declared:
    """One built-in.  Example: declared("register_reward", "rewards/functions")["exact"].names == ("exact",)."""

    names: tuple[str, ...]  # the name and its aliases
    address: str  # module:function
    doc: str
    options: Mapping[str, Any]  # literal keyword arguments of the decorator
    inputs: tuple[str, ...]  # keyword-only arguments that are tensors: columns of the batch
    settings: Mapping[str, Any]  # the other keyword-only arguments: name -> default, or REQUIRED

    @property
    def arguments(self) -> tuple[str, ...]:
        """All keyword-only arguments."""
        return (*self.inputs, *self.settings)


@cache
def declared(decorator: str, where: str) -> dict[str, Declared]:
    """All names and aliases that `decorator` declares in a folder or file of the package -> the declaration.

    Args: decorator: "register_policy_loss"; where: "algo/losses", "algo/kl.py".
    """
    root = PACKAGE / where
    declarations: dict[str, Declared] = {}
    for path in sorted(root.glob("*.py")) if root.is_dir() else [root]:
        for one in _in_file(path, decorator):
            for name in one.names:
                assert name not in declarations, f"{one.address}: {decorator} {name!r} is declared twice"
                declarations[name] = one
    assert declarations, f"nothing in {where} is declared by {decorator}"
    return declarations


def constant(where: str, name: str) -> Any:
    """The literal value of a top-level name in a file of the package.

    Example: constant("algo/registry.py", "FULL").
    """
    for node in _tree(PACKAGE / where).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None, (
                f"{where}: {name} has no value"
            )
            return ast.literal_eval(node.value)
    raise AssertionError(f"{where} has no constant {name}")


def argument_faults(choice: str, key: str, known: Mapping[str, bool], given: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each argument that a choice does not accept, and for each required one that is missing.

    Args: choice: "algorithm.policy_loss_fn=dro"; key: the mapping with its arguments, "algorithm.policy_loss_args";
        known: name -> whether it has a default; given: the mapping's content.
    """
    for name, value in given.items():
        if name not in known:
            yield f"{key}.{name}={value}: {choice} takes {', '.join(known) or 'no values of its own'}"
    for name, has_default in known.items():
        if not has_default and name not in given:
            yield f"{choice}: expected a value in {key}.{name}, it has no default"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))


def _in_file(path: Path, decorator: str) -> Iterator[Declared]:
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    by_name = {node.name: node for node in _tree(path).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for function in by_name.values():
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == decorator:
                others = [by_name[k.value.id] for k in call.keywords if isinstance(k.value, ast.Name)]
                inputs, settings = _arguments([function, *others])
                yield Declared(
                    names=tuple(ast.literal_eval(name) for name in call.args),
                    address=f"{module}:{function.name}",
                    doc=ast.get_docstring(function) or "",
                    options={
                        k.arg: ast.literal_eval(k.value)
                        for k in call.keywords
                        if k.arg and not isinstance(k.value, ast.Name)
                    },
                    inputs=inputs,
                    settings=settings,
                )


def _arguments(functions: list[ast.FunctionDef | ast.ClassDef]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The keyword-only arguments of these functions: tensors, and all others except `generator`; a class has none."""
    inputs: list[str] = []
    settings: dict[str, Any] = {}
    for function in (each for each in functions if isinstance(each, ast.FunctionDef)):
        for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if "Tensor" in kind:
                inputs.append(argument.arg)
            elif argument.arg != "generator":
                literal = default is None or isinstance(default, ast.Constant | ast.UnaryOp)
                assert literal, f"{function.name}: the default of {argument.arg} is no literal"
                settings[argument.arg] = REQUIRED if default is None else ast.literal_eval(default)
    return tuple(inputs), settings
