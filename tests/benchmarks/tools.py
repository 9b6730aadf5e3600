"""The programs that the benchmark needs from the system: nginx with its Lua module, and wrk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("nginx", "libnginx-mod-http-lua", "wrk")
"""Of Debian and Ubuntu."""

_MODULES = ("ndk_http_module.so", "ngx_http_lua_module.so")
_MODULE_FOLDERS = ("/usr/lib/nginx/modules", "/usr/lib64/nginx/modules")


def nginx_modules() -> list[Path]:
    """The Lua module's files, in the order in which nginx must load them; empty where one is missing."""
    for folder in _MODULE_FOLDERS:
        found = [Path(folder, name) for name in _MODULES]
        if all(path.exists() for path in found):
            return found
    return []


def ensure_tools() -> None:
    """Installs what is missing where that can be done without asking: as root, with apt.

    Raises:
        SystemExit: Something is missing still; says what to install.
    """
    if _complete():
        return
    if shutil.which("apt-get") and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        print(f"installing {', '.join(PACKAGES)}", file=sys.stderr)
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            subprocess.run(["apt-get", "-qq", *arguments], env=environment, stdout=sys.stderr, check=False)
    if not _complete():
        raise SystemExit(f"error: the benchmark needs nginx with Lua, and wrk: apt-get install {' '.join(PACKAGES)}")


def _complete() -> bool:
    return bool(shutil.which("nginx") and shutil.which("wrk") and nginx_modules())
