"""Every operation by name. The modules of `tk_core.ops` are imported when the registry is first asked."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tk_core.op import Op


@functools.cache
def ops() -> dict[str, Op]:
    """All declared operations, sorted by area and name."""
    import tk_core.ops

    found: dict[str, Op] = {}
    for info in pkgutil.walk_packages(tk_core.ops.__path__, "tk_core.ops."):
        module = importlib.import_module(info.name)
        found.update({value.name: value for value in vars(module).values() if isinstance(value, Op)})
    return dict(sorted(found.items(), key=lambda item: (item[1].area, item[0])))


def get(name: str) -> Op:
    """The operation of that name; raises `KeyError` with the names there are."""
    try:
        return ops()[name]
    except KeyError:
        raise KeyError(f"no operation {name!r}; there are {', '.join(ops())}") from None
