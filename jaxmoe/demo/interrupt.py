"""Ctrl-C: one line and exit status 130, at any moment.

Python raises `KeyboardInterrupt` between two steps of the interpreter, so a compilation of many seconds would have to
end first, and the traceback would show where JAX happened to be. A thread that hears of the signal at once has neither
problem.
"""

import os
import signal
import socket
import sys
import threading

INTERRUPTED = 130  # what a shell reports for a process that SIGINT ended


def exit_on_interrupt() -> None:
    """Ends the process as soon as SIGINT arrives; call it from the main thread.

    Nothing is left half-written: the plots are the only files of the demo, and each is moved into place when complete.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # started in the background by a shell that keeps Ctrl-C for others
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    # The C part of Python's handler writes there, in whichever thread it runs and whatever the main thread does.
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_wait, args=(receiver, sender), name="interrupt", daemon=True).start()


def _wait(receiver: socket.socket, sender: socket.socket) -> None:
    with sender:
        while signal.SIGINT not in receiver.recv(1):
            continue
    # A progress bar may stand on the current line.
    os.write(sys.stderr.fileno(), b"\njaxmoe demo: stopped by Ctrl-C\n")
    os._exit(INTERRUPTED)
