"""The first thing that a local worker process does, as a plugin of Beam: it leaves Ctrl-C to the command.

A terminal sends Ctrl-C to every process of the run. The command ends its workers; each of them would print tracebacks.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
