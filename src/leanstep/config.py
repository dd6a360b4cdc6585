"""Settings in a file: `leanstep.yaml`, `[tool.leanstep]` in pyproject.toml, a VISSL file as it is.

    budget: 16GiB
    splits: auto
    overrides:
      "encoder.*": recompute

`splits` cuts the chain of blocks into that many even segments and recomputes all but the last, as
VISSL does; `auto` finds the number that fits the budget at the least cost. Without it, the solver
decides block by block. Of a VISSL file (with or without `config:` at its head) only
`MODEL.ACTIVATION_CHECKPOINTING` and `DISTRIBUTED.MANUAL_GRADIENT_REDUCTION` are read, and a section
`LEANSTEP` with the keys above, for a budget. A key that nobody knows is an error: a setting that is
silently ignored costs a night of training.
"""

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from leanstep.errors import InputError, unknown_name
from leanstep.planner.options import check_engine
from leanstep.solvers.base import Solver
from leanstep.solvers.registry import find_solver
from leanstep.solvers.uniform import Uniform
from leanstep.units import check_budget

_USE, _NUMBER = "USE_ACTIVATION_CHECKPOINTING", "NUM_ACTIVATION_CHECKPOINTING_SPLITS"
_SECTION, _REDUCTION = "ACTIVATION_CHECKPOINTING", "MANUAL_GRADIENT_REDUCTION"

# VISSL's own, where the file leaves it out.
_SPLITS_OF_VISSL = 2


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says; the names are those of its keys, the meaning that of `fit`'s arguments."""

    budget: str | int | None = None
    solver: str = "auto"
    engine: str = "auto"
    overrides: Mapping[str, str] = field(default_factory=dict)
    splits: int | Literal["auto"] | None = None
    verify: bool = True
    exact: bool = True
    offload: bool = True
    chunks: bool = True
    gradients_kept: bool = False
    takeover: bool = False
    manual_gradient_reduction: bool = False

    @property
    def chosen_solver(self) -> str | Solver:
        """The solver that the file asks for."""
        if self.splits is None:
            return self.solver
        return Uniform(None if self.splits == "auto" else self.splits)


def read_config(path: str | Path) -> Config:
    """Read a file of settings.

    Raises:
        InputError: the file cannot be read, or has a key or a value that means nothing.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return _config(_table(path, text), str(path))


def _table(path: Path, text: str) -> Mapping[str, Any]:
    # Late: nobody who has no such file needs it.
    import yaml

    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".toml":
        tables = content.get("tool", {})
        if "leanstep" not in tables:
            raise InputError(f"{path} has no table [tool.leanstep]")
        content = tables["leanstep"]
    if not isinstance(content, Mapping):
        found = "nothing" if content is None else type(content).__name__
        raise InputError(f"{path} holds {found}, not keys with values such as budget: 16GiB")
    return content


def _config(table: Mapping[str, Any], where: str) -> Config:
    inner = table.get("config")
    head = inner if isinstance(inner, Mapping) else table
    if "MODEL" in head or "DISTRIBUTED" in head:
        given = _from_vissl(head, where)
    else:
        _refuse_unknown(table, [one.name for one in fields(Config)], where)
        given = dict(table)
    return _checked(given, where)


def _from_vissl(head: Mapping[str, Any], where: str) -> dict[str, Any]:
    section = _mapping(_mapping(head, "MODEL", where), _SECTION, where)
    _refuse_unknown(section, (_USE, _NUMBER), f"{where}, MODEL.{_SECTION}")
    distributed = _mapping(head, "DISTRIBUTED", where)
    near = difflib.get_close_matches(_REDUCTION, list(distributed), n=1, cutoff=0.8)
    if near and near[0] != _REDUCTION:
        raise InputError(f"{where}, DISTRIBUTED: {near[0]!r} means nothing; write {_REDUCTION!r}")
    own = dict(_mapping(head, "LEANSTEP", where))
    _refuse_unknown(own, [one.name for one in fields(Config)], f"{where}, LEANSTEP")
    own.setdefault("manual_gradient_reduction", distributed.get(_REDUCTION, False))
    is_on = section.get(_USE, False)
    if not isinstance(is_on, bool):
        raise InputError(f"{where}: {_USE} is {is_on!r}, not true or false")
    # Off is one segment: the untouched step.
    own.setdefault("splits", section.get(_NUMBER, _SPLITS_OF_VISSL) if is_on else 1)
    return own


def _mapping(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = table.get(key) or {}
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: {key} is {found!r}, not a section")
    return found


def _refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise InputError(f"{where}: {unknown_name('key', key, known)}")


def _checked(given: Mapping[str, Any], where: str) -> Config:
    for name in (one.name for one in fields(Config) if isinstance(one.default, bool)):
        if not isinstance(given.get(name, False), bool):
            raise InputError(f"{where}: {name} is {given[name]!r}, not true or false")
    overrides = _mapping(given, "overrides", where)
    splits = given.get("splits")
    is_number = isinstance(splits, int) and not isinstance(splits, bool) and splits >= 1
    if splits is not None and splits != "auto" and not is_number:
        raise InputError(f'{where}: splits is {splits!r}, not a number from 1 on or "auto"')
    config = Config(**{**given, "overrides": dict(overrides)})
    try:
        check_engine(config.engine)
        find_solver(config.solver)
        if config.budget is not None:
            check_budget(config.budget)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if splits is not None and config.solver != "auto":
        raise InputError(f"{where}: splits is a solver of its own; leave out solver")
    if splits == "auto" and config.budget is None:
        raise InputError(f"{where}: splits: auto finds the number for a budget; add one")
    return config
