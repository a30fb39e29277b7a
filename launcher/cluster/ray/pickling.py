"""Pickle a script's functions and classes, so that they work on a worker as in the script.

Definitions of a script travel by value, as cloudpickle does it; all others by name. Four things
that cloudpickle leaves out are added here:

- A class that is registered as a pytree is registered on the worker, too, with the same functions.
- Such a class comes to life without the hooks of its bases, which would register it (and all there
  is at that moment is its name), or, where its metaclass has to run, with its dataclass fields.
- Functions that a library has made (by `jax.checkpoint`, for one) find that library's own globals
  on the worker, and not copies of them; so do objects that a library knows by their identity.
- `jax.custom_vjp` functions, which cannot be unpickled by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import io
import operator
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import jax

from launcher.base.jax_compat import pytree_registration

_PLACES = {"site-packages", "dist-packages"}  # where packages are installed
_BY_VALUE = 6  # the parts of what cloudpickle makes of a class or function that travels by value
_PLAIN = (bool, int, float, str, type(None))


def dumps_script(value: Any) -> bytes:
    """Return `value`, which may contain functions and classes of the script, pickled."""
    file = io.BytesIO()
    _pickler()(file).dump(value)
    return file.getvalue()


@functools.cache
def _pickler() -> Any:
    """Return the class of the pickler; Ray reads its settings when it is imported."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            self._names: dict[str, dict[int, str]] = {}

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, jax.custom_vjp):
                return _bare, (type(obj),), vars(obj)
            if name := _name_in_library(obj, self._names):
                return name
            reduced = super().reducer_override(obj)
            if reduced is NotImplemented and isinstance(obj, type):
                return _class_that_the_script_registers(obj)
            if reduced is NotImplemented or len(reduced) < _BY_VALUE:
                return reduced
            if isinstance(obj, type):
                return _registered_class(obj, reduced)
            return _library_function(obj, reduced)

    return Pickler


# -- Classes --------------------------------------------------------------------------------------


def _registered_class(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how to make a class that travels by value and register it as it is registered here.

    Args:
        cls: the class.
        reduced: what cloudpickle does: it makes an empty class and later fills it, since what the
            class holds may refer to it.
    """
    if not jax.tree_util.is_tree_node(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return reduced
    registration = pytree_registration(cls)
    if registration is None:
        raise TypeError(
            f"{cls.__qualname__} is a pytree whose registration this JAX does not show; define it "
            "in a module that the script imports"
        )
    make, (metaclass, name, bases, namespace, *rest), state, _, _, fill = reduced
    namespace = {**namespace, **_declared(cls)}
    made_by = make, (metaclass, name, bases, namespace, *rest)
    return _make_class, made_by, (fill, state, registration), None, None, _fill_class


def _class_that_the_script_registers(cls: type) -> Any:
    """Return how to register a class that travels by name, if importing it may not do that."""
    if (registration := pytree_registration(cls)) is None:
        return NotImplemented
    first = registration[1][0]
    if callable(first) and getattr(first, "__module__", None) != "__main__":
        return NotImplemented
    named = cls.__module__, cls.__qualname__
    return _imported, named, registration, None, None, _register


def _declared(cls: type) -> dict[str, Any]:
    """Return the names that a metaclass reads in a class's namespace when it makes a dataclass.

    Defaults and converters are left out: they may refer to the class itself, and the attributes
    that are made of them come with it.
    """
    declared: dict[str, Any] = {}
    own = inspect.get_annotations(cls)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name not in own:
            continue
        required = field.default is field.default_factory is dataclasses.MISSING
        kept = {k: v for k, v in field.metadata.items() if isinstance(v, _PLAIN)}
        settings: dict[str, Any] = {"init": field.init, "kw_only": field.kw_only, "metadata": kept}
        if not required:
            settings["default"] = None
        declared[field.name] = dataclasses.field(**settings)
    if declared:
        declared["__annotations__"] = dict.fromkeys(declared, object)
    params = cls.__dict__.get("__dataclass_params__")
    if params is not None and not params.init and "__init__" in cls.__dict__:
        declared["__init__"] = _stand_in
    return declared


def _make_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Make a class that `_fill_class` fills."""
    metaclass, _, bases, *_ = arguments
    hooked = None
    if metaclass in (type, ABCMeta):
        classes = [c for base in types.resolve_bases(bases) for c in base.__mro__]
        hooked = next((c for c in classes if "__init_subclass__" in vars(c)), None)
    if hooked is None or hooked is object or hooked.__module__ == "typing":
        return make(*arguments)
    hook = vars(hooked)["__init_subclass__"]
    hooked.__init_subclass__ = classmethod(_stand_in)
    try:
        return make(*arguments)
    finally:
        hooked.__init_subclass__ = hook


def _fill_class(cls: type, parts: tuple[Any, ...]) -> type:
    """Fill a class with its attributes, and register it unless it is registered by now."""
    fill, state, registration = parts
    fill(cls, state)
    _register(cls, registration)
    return cls


def _register(cls: type, registration: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    register, arguments = registration
    if not jax.tree_util.is_tree_node(cls):
        register(cls, *arguments)


def _imported(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _stand_in(*_: Any, **__: Any) -> None:
    pass


# -- Libraries ------------------------------------------------------------------------------------


def _library_function(fun: types.FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how to make a function that travels by value, with its library's globals."""
    module = sys.modules.get(fun.__globals__.get("__name__", ""))
    if module is None or vars(module) is not fun.__globals__ or not _is_installed(module.__name__):
        return reduced
    _, (code, _, *rest), (state, slots), *more = reduced
    made_by = module.__name__, code, *rest
    return _make_function, made_by, (state, {**slots, "__globals__": {}}), *more


def _make_function(module: str, code: types.CodeType, *rest: Any) -> types.FunctionType:
    return types.FunctionType(code, vars(importlib.import_module(module)), *rest)


def _name_in_library(obj: Any, known: dict[str, dict[int, str]]) -> str | None:
    """Return the name of an object that is an attribute of the library module that it is of.

    Args:
        obj: any object.
        known: the names of the attributes of modules, by their identity; new ones are added.
    """
    if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
        return None
    module = getattr(obj, "__module__", None)  # its own, or that of its class
    if not isinstance(module, str) or module == "builtins" or not _is_installed(module):
        return None
    if module not in known:
        known[module] = {id(value): name for name, value in vars(sys.modules[module]).items()}
    return known[module].get(id(obj))


@functools.cache
def _is_installed(module: str) -> bool:
    """Return whether a module is Python's or an installed one: it is the same on the workers."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _PLACES.isdisjoint(PurePath(file).parts)


def _bare(cls: type) -> Any:
    return object.__new__(cls)
