"""Installs the hooks when the rank's script imports torch, or at once in a process that has imported it already.

Every rank of a Python program imports this file when it starts, so it imports nothing; the rest follows with torch.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Hook = Callable[[Any], None]

_MODULES = (
    "torch.autograd",
    "torch.distributed.rendezvous",
    "torch.distributed.distributed_c10d",
    "torch.nn.parallel.distributed",
    "torch",  # loaded after its modules; its hook replaces nothing
)


def install(environment: Mapping[str, str]) -> None:
    """Install all hooks, each as soon as its module of torch is imported.

    Call once, from the main thread. In a process that a warm one has forked with torch loaded, `environment` is that of the rank.
    """
    own = {name: value for name, value in environment.items() if name.startswith("TTLAUNCH_")}
    hooks = _Hooks(own)
    waiting = set()
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is None:
            waiting.add(name)
        else:
            hooks.call(name, module)
            if name != "torch":
                _tell_importers(module)
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting, hooks))


class _Hooks:
    """Calls the hook of a module of torch; a hook that fails leaves the module usable."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._hooks: dict[str, Hook] | None = None

    def call(self, name: str, module: ModuleType | None) -> None:
        """Call the hook of a module that has been loaded, or `import torch` when this begins."""
        try:
            if self._hooks is None:
                from ttlaunch.torch_hooks.all_hooks import make_hooks

                self._hooks = make_hooks(self._environment)
            hook = self._hooks.get(name)
            if hook is not None:
                hook(module)
        except Exception as error:  # noqa: BLE001 - the script runs as well without what is recorded of it
            print(f"ttlaunch: calls of {name} are not recorded: {error!r}", file=sys.stderr)


class _AfterImport:
    """Finds some modules as Python would, and has a function called with each when it has been loaded."""

    def __init__(self, names: set[str], hooks: _Hooks) -> None:
        self._names = names
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of one of the modules, with its loader wrapped; None for any other module."""
        if name not in self._names:
            return None
        self._names.discard(name)
        if name == "torch":
            self._hooks.call("import torch", None)
        if not self._names:
            sys.meta_path.remove(self)
        for finder in [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]:
            spec: ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _call_after_loading(spec.loader, self._hooks)
                return spec
        return None


def _call_after_loading(loader: object, hooks: _Hooks) -> None:
    execute = loader.exec_module  # type: ignore[attr-defined]

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # type: ignore[attr-defined]  # from here on the loader is as it was
        execute(module)
        hooks.call(module.__name__, module)

    loader.exec_module = exec_module  # type: ignore[attr-defined]


def _tell_importers(module: ModuleType) -> None:
    """Put what a hook has replaced into the modules of torch that imported it before."""
    for name, other in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            for key, value in list(vars(other).items()):
                wrapped = vars(module).get(key)
                # Hooks replace functions; torch warns of each look at an attribute of its deprecated names, which are none.
                if (
                    type(wrapped) is type(_tell_importers)
                    and getattr(wrapped, "__wrapped__", None) is value is not None
                ):
                    setattr(other, key, wrapped)
