"""The process that the embedded broker runs in; started by ``broker.embedded`` and by nobody else.

Run by path, as ``python embedded_child.py CONFIG PARENT_PID``, so that it needs nothing but
``iotcore``. rumqttd cannot be shut down from within, hence a process; and it must never outlive its
parent, not even one that was killed: standard input is a pipe whose other end only the parent
holds, and on Linux the kernel tells of the parent's death as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
#: Exit statuses that ``broker.embedded`` understands.
NOT_INSTALLED, BROKER_FAILED = 3, 4


def _end_with(parent: int) -> None:
    def look(_number: int, _frame: object) -> None:
        # Linux sends this when the *thread* that started us ends; the process may well live on.
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    # Ctrl-C reaches the whole process group; the parent says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.signal(signal.SIGUSR1, look)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(0)


def _serve(config: str) -> None:
    try:
        from iotcore.iotcore import IotCoreBroker
    except ImportError as error:
        print(f"cannot import iotcore: {error}", file=sys.stderr, flush=True)
        os._exit(NOT_INSTALLED)
    try:
        IotCoreBroker(config_path=config).run_forever()
    except BaseException as error:  # noqa: BLE001  (pyo3's panics are BaseException)
        # One line: the parent shows the last one.
        print(f"{type(error).__name__}:", *str(error).split(), file=sys.stderr, flush=True)
    os._exit(BROKER_FAILED)


def main() -> None:
    """Serve until standard input ends."""
    del sys.path[0]  # this file's folder: its modules are no top-level modules
    _end_with(int(sys.argv[2]))
    # rumqttd writes a record of level error for every message that it routes.
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)
    threading.Thread(target=_serve, args=(sys.argv[1],), daemon=True).start()
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
