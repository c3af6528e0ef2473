"""Child processes that end with us, however we end."""

import ctypes
import signal
import subprocess

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


def spawn(command, log):
    """Start `command` with its output in the file `log`; the kernel kills it should we die first."""
    with open(log, "ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def end(process, grace=0):
    """Ask `process` to terminate, give it `grace` seconds, then kill it. Returns its exit code (negative: signal)."""
    if process.poll() is None and grace:
        process.terminate()
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    return process.wait()
