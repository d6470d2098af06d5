"""How this program starts Python processes of its own: what they import, what they are told.

    process = Popen(python_command("headrace.server.link.engine_process"), env=child_environment())

A child imports nothing from the current folder, which other users may be able to write to, and its
environment is built from a list of known variables, not inherited: a process that runs a model does
not need the keys and passwords in the server's environment. Does not know who the children are.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_KEPT = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR"),
        *("TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_STATE_HOME", "VIRTUAL_ENV"),
        *("CC", "CXX", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "GLIBC_TUNABLES"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES"),
        # Not settings, but read by code outside of server/: where files are kept.
        *("HEADRACE_CACHE", "HEADRACE_STATE", "HEADRACE_OFFLINE", "HEADRACE_DEBUG"),
        # Windows can't start a process without these.
        *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE"),
        *("APPDATA", "LOCALAPPDATA", "NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE"),
    }
)
_KEPT_PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "HEADRACE_TEST_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "TRITON_", "TORCH_", "TORCHINDUCTOR_"),
    *("PYTORCH_",),
)
# Dropped even if the prefix is kept: NVIDIA_API_KEY is a secret.
_SECRET = re.compile(r"(^|_)(API)?(KEYS?|TOKENS?|SECRETS?|PASS|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")


def python_command(module: str) -> list[str]:
    """Runs a module as `python -m` does, but without the current folder on the import path. The
    flags -I, -E and -s of this interpreter are passed on to the child."""
    flags = ["-P"]
    if sys.flags.ignore_environment:
        flags.append("-E")
    if sys.flags.no_user_site:
        flags.append("-s")
    return [sys.executable, *flags, "-m", module]


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """For Popen's preexec_fn. Linux: the child gets this signal when the process that started it
    ends, even by a SIGKILL, after which nobody else could stop it (strictly: when the thread that
    started it ends). Elsewhere it does nothing."""
    if sys.platform == "linux":
        import ctypes

        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, number)


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of `variables` (default: this process's) that a child may need, without secrets."""
    found = os.environ if variables is None else variables
    kept = {name: value for name, value in found.items() if _is_kept(name)}
    if path := _import_path(found.get("PYTHONPATH", "")):
        kept["PYTHONPATH"] = path
    else:
        kept.pop("PYTHONPATH", None)
    return kept


def _is_kept(name: str) -> bool:
    if name == "HEADRACE_RANK_KEY":  # an engine's process lets ranks of other hosts in with it
        return True
    known = name.upper() in _KEPT or name.startswith(_KEPT_PREFIXES)
    return known and not _SECRET.search(name.upper())


def _import_path(given: str) -> str:
    """PYTHONPATH with absolute folders. Empty parts, as in `$PYTHONPATH:/more` with the variable
    unset, are dropped: Python would take them as the current folder. Includes the folder of this
    package if it was imported from the front of sys.path."""
    parts = [os.path.abspath(part) for part in given.split(os.pathsep) if part]
    home = str(Path(__file__).resolve().parents[2])
    if sys.path and os.path.abspath(sys.path[0]) == home and home not in parts:
        parts.append(home)
    return os.pathsep.join(parts)
