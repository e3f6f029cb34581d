# SPDX-License-Identifier: Apache-2.0
"""Lists the public names of installed modules. A program, run by the Python that has them installed;
it needs nothing but the standard library.

    python probe.py < {"modules": ["vllm.outputs", ...]}

Prints one line of JSON behind MARK: `modules` (name -> its `names`, and `others` that it imports itself,
or why it cannot be imported),
`has_vllm`, and `elsewhere` (public name -> modules that were loaded on the way and define it).
"""

import importlib
import importlib.util
import inspect
import json
import sys

MARK = "INTERFACE "


def signature(value):
    """[[name, kind, whether it may be left out], ...] of a callable; None if it has none."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except Exception:  # Of annotations and lazy objects, which are evaluated for it.
        return None
    return [
        [p.name, p.kind.name, p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        for p in parameters
    ]


def home(value):
    """The module that defines it, as it says; None where asking fails, as lazy objects may."""
    try:
        told = value.__module__
    except Exception:
        return None
    return told if isinstance(told, str) else None


def describe(value):
    """{"kind", "signature", "home", "members"} of a class, a function or another value."""
    if inspect.isclass(value):
        kind, inner = "class", {"members": members(value)}
    else:
        kind, inner = "function" if callable(value) else "value", {}
    described = signature(value) if callable(value) else None
    return {"kind": kind, "signature": described, "home": home(value), **inner}


def members(cls):
    """Public methods and properties that the class or a base of its own package has."""
    package = cls.__module__.partition(".")[0]
    found = {}
    for base in reversed(inspect.getmro(cls)):
        if base.__module__.partition(".")[0] != package:
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            inner = getattr(value, "__func__", value)
            if inspect.isfunction(inner):
                found[name] = {"kind": "method", "signature": signature(inner)}
            elif isinstance(value, property):
                found[name] = {"kind": "property", "signature": None}
    return found


def own_names(module):
    """Public names that the module itself defines, and what its `__all__` passes on."""
    passed_on = set(getattr(module, "__all__", ()))
    for name, value in list(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        defined = home(value) == module.__name__
        if (defined and (inspect.isclass(value) or inspect.isfunction(value))) or name in passed_on:
            yield name, value


def other_names(module, own):
    """{name: described} of all else that can be imported from it, in short if it is not vllm's."""
    found = {}
    for name, value in list(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value) or name in own:
            continue
        is_ours = (home(value) or "").partition(".")[0] == "vllm"
        found[name] = describe(value) if is_ours else {"kind": "value", "signature": None}
    return found


def list_module(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            return {"missing": True}
        return {"error": f"{type(error).__name__}: {error}"}
    except BaseException as error:  # Whatever a module does when its device is not there.
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    names = {key: describe(value) for key, value in own_names(module)}
    return {"names": names, "others": other_names(module, names)}


def main():
    wanted = json.load(sys.stdin)
    modules = {name: list_module(name) for name in wanted["modules"]}
    elsewhere = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and module is not None:
            for key, value in list(vars(module).items()):
                if not key.startswith("_") and home(value) == name:
                    elsewhere.setdefault(key, []).append(name)
    has_vllm = importlib.util.find_spec("vllm") is not None
    print(MARK + json.dumps({"has_vllm": has_vllm, "modules": modules, "elsewhere": elsewhere}))


if __name__ == "__main__":
    main()
