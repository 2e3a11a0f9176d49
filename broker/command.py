"""What every command does around its work: one-line errors, exit codes, signals, logging."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from broker.errors import PipesdError

EXIT_INTERRUPTED = 130
#: Seconds after which a signal that was lost in a callback is sent once more.
_RETRY_S = 0.05


class Stopped(BaseException):
    """SIGTERM or SIGINT: unwind and clean up. Not an Exception, so that nothing swallows it."""


def raise_on_signals() -> None:
    """Turn the first SIGTERM or SIGINT into Stopped in the main thread, ignore those after it.

    A clean-up that a second Ctrl-C tears apart leaves children behind.
    """

    def handler(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise Stopped

    def arm() -> None:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    others = sys.unraisablehook

    def on_unraisable(lost: Any) -> None:
        # Python handles a signal wherever it comes back to bytecode; in a finaliser or a callback
        # from C (llama.cpp writes its log through one while it loads) nothing can be raised.
        if not issubclass(lost.exc_type, Stopped):
            others(lost)
            return
        arm()
        again = threading.Timer(_RETRY_S, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()

    sys.unraisablehook = on_unraisable
    arm()


def set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def run(work: Callable[[], int], program: str) -> int:
    """Run a command's ``work`` and turn how it ends into an exit code (DESIGN.md, Commands)."""
    try:
        return work()
    except PipesdError as error:
        line = " ".join(str(error).split())
        print(f"{program}: {line}", file=sys.stderr)
        return error.exit_code
    except Stopped:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is left to tell anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        # The last line of defence: a person gets a line, not a traceback.
        logging.getLogger(program).debug("unexpected error", exc_info=True)
        kind = type(error).__name__
        line = " ".join(str(error).split())[:300]
        print(
            f"{program}: unexpected {kind}: {line} (run again with --verbose for the trace)",
            file=sys.stderr,
        )
        return 1
