"""Inert stand-ins for packages that SGLang imports and only a GPU could use. Test set-up for machines without one.

`scripts/setup_sglang_cpu.sh` puts this module into a virtual environment, where each interpreter loads it at its start.
It then does nothing unless `SGLANG_USE_CPU_ENGINE=1` is set, as in a server for the CPU and in its children. A real
package always wins. With `SGLANG_CPU_FORK=1`, as in tests, a server forks its processes where SGLang would spawn them.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

PACKAGES = {"sgl_kernel", "torchvision", "triton"}


class Nothing:
    """Answers everything with itself."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        # A bare decorator leaves what it decorates as it is.
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getattr__(self, name):
        if name == "active" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # triton.runtime.driver.active: there is no device
        return self

    def __getitem__(self, key):
        return self

    def __contains__(self, key):
        return False  # "cpu" in triton.backends.backends: were it True, dynamo would look for one endlessly

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class Inert(type):
    """The class of stand-in classes; they answer for attributes that they do not have."""

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(cls, *args, **kwargs):
        inert = super().__call__()
        return Nothing.__call__(inert, *args, **kwargs)


class StandIn(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = Inert(name, (Nothing,), {}) if name[:1].isupper() else Nothing()
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.append(Finder())
    if os.environ.get("SGLANG_CPU_FORK") == "1":  # its processes don't import all of it once more: 8 s of each 18
        import multiprocessing

        start = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda method, force=False: start("fork", force)
