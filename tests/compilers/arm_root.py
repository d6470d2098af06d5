"""A Python for 64-bit ARM in a folder, out of Debian's and PyPI's packages: a test's helper.

Nothing is installed on this machine: apt fetches into lists and archives of the folder's own, and
dpkg-deb takes the packages apart there. Programs in it run under qemu-aarch64.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.compilers.builds import run

# Debian's own Python may be of another version than ours: its packages are.
_PACKAGES = ("python3", "libstdc++6")
_WHEELS = ("numpy", "msgspec", "pytest", "pytest-timeout", "hypothesis")
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")


class ArmRoot:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.site = folder / "site"
        if not (folder / "complete").exists():
            self._fetch()
            (folder / "complete").touch()
        (python,) = (p for p in self.root.glob("usr/bin/python3.*") if p.name[9:].isdigit())
        self.python = python
        self.version = python.name.removeprefix("python")
        self.headers = self.root / f"usr/include/{python.name}"
        self.suffix = f".cpython-{self.version.replace('.', '')}-aarch64-linux-gnu.so"

    def run(self, processor: str, package: Path, *words: str) -> str:
        """Runs its Python with our package in `package`, as on such a processor."""
        path = os.pathsep.join(str(p) for p in (package, self.site))
        return run(
            *("qemu-aarch64", "-cpu", processor, "-L", str(self.root)),
            *("-E", f"PYTHONPATH={path}", "-E", "PYTHONDONTWRITEBYTECODE=1"),
            *(str(self.python), *words),
        )

    def _fetch(self) -> None:
        apt = self.folder / "apt"
        for name in ("lists/partial", "archives/partial"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()  # nothing is installed: everything is needed
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures::": "arm64",
            "APT::Sandbox::User": "root",  # whoever runs this, not a user of apt's own
            "Dir::State::lists": str(apt / "lists"),
            "Dir::State::status": str(apt / "status"),
            "Dir::Cache::archives": str(apt / "archives"),
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "Debug::NoLocking": "1",
        }
        options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        run("apt-get", *options, "update")
        run(
            *("apt-get", *options, "install", "--yes", "--download-only"),
            *("--no-install-recommends", *_PACKAGES),
        )
        (minimal,) = (apt / "archives").glob("libpython3.*-minimal_*.deb")
        version = minimal.name.removeprefix("libpython").partition("-")[0]
        # Its headers, without the compiler that they would bring along.
        headers = f"libpython{version}-dev"
        there = 'cd "$1" && shift && exec apt-get "$@"'
        run("sh", "-c", there, "sh", str(apt / "archives"), *options, "download", headers)
        for archive in sorted((apt / "archives").glob("*.deb")):
            run("dpkg-deb", "-x", str(archive), str(self.root))
        platforms = [w for p in _PLATFORMS for w in ("--platform", f"{p}_aarch64")]
        run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(self.site)),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", version),
            *(*platforms, *_WHEELS),
        )
