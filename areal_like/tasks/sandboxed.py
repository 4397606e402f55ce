"""The inside of the sandbox (`areal_like.tasks.sandbox`): gives up its rights, then calls a program's function.

Run as a file, by `python -I -S`, with standard modules only. Standard input has the request. Standard error gets
"ready", or the error before that, and is then closed. Standard output gets a line per call: `[value]`, or `null`.
"""

import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
import time

FOR_PROGRAMS = (
    "ast bisect collections.abc copy dataclasses datetime decimal enum fractions functools heapq io itertools operator "
    "random re statistics string typing"
)
"""Modules that are loaded before: when a program runs, there are no files to import from."""
for module in FOR_PROGRAMS.split():
    importlib.import_module(module)

AT_LIMIT = (signal.SIGKILL, signal.SIGXCPU)
OUT_OF_TIME = 124
"""Exit code of the process that waits for a program which used up its processor time."""
NOBODY = 65534
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
CAPABILITY_VERSION_3 = 0x20080522
NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount, IPC, user, PID, network
# machine → its number for filters of system calls, and that of the call `socket`
MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
IO_URING_SETUP, X32 = 425, 0x40000000
REFUSED = ("open", "os.", "socket.", "subprocess.", "shutil.", "ctypes.", "pty.", "import", "signal.", "mmap.")
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def die_with_parent(parent: int | None = None) -> None:
    """Until the user or capabilities change: that clears it. `parent`: its number; it may have ended before."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def become_nobody() -> None:
    """Limits on processes don't hold for root, and files of the run are root's."""
    os.chown(".", NOBODY, NOBODY)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    check(LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # or /proc/self would stay root's


def enter_namespaces(caller: int) -> None:
    """Returns in a child, which is process 1 of its namespace. Its parent only waits, so the caller can kill it."""
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(NAMESPACES) != 0:
        error = os.strerror(ctypes.get_errno())
        raise OSError(f"this machine permits no user namespaces ({error}); isolation=weak does without")
    for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w", encoding="utf-8") as out:  # users that are not mapped can't make files
            out.write(line)
    alive, held = os.pipe()
    child = os.fork()
    if child:
        die_with_parent(caller)  # again: as another user, and in a new user namespace, it had no such signal
        status = os.waitpid(child, 0)[1]  # only the kernel can kill process 1 of a namespace
        os._exit(OUT_OF_TIME if os.WIFSIGNALED(status) and os.WTERMSIG(status) in AT_LIMIT else 0)
    os.close(held)
    die_with_parent()
    os.set_blocking(alive, False)
    try:
        if os.read(alive, 1) == b"":
            os._exit(1)  # the parent ended before this request
    except BlockingIOError:
        os.close(alive)


def leave_files() -> None:
    folder = os.getcwd().encode()
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    check(LIBC.mount(b"tmpfs", folder, b"tmpfs", flags, b"size=1m,nr_inodes=64,mode=777"), "mount")
    os.chdir(folder)
    os.chroot(".")
    os.chdir("/")


def limit(seconds: float, memory: int, output: int) -> None:
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    for what, most in (
        (resource.RLIMIT_CPU, math.ceil(seconds + time.process_time())),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_NPROC, 1),  # itself
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def refuse_sockets() -> None:
    """An empty network namespace is not enough: some families of sockets ignore it (vsock: the host of a virtual
    machine). A filter in the kernel (seccomp), for good: no socket is made, nor a ring that could make one."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"sockets can't be refused on {machine}; isolation=weak does without")
    architecture, make_socket = MACHINES[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, not_permitted = 0x80000000, 0x7FFF0000, 0x00050001
    program = [  # (operation, lines to skip if true, if false, operand)
        (load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill),
        (load, 0, 0, 0), (equal, 3, 0, make_socket), (equal, 2, 0, IO_URING_SETUP), (at_least, 1, 0, X32),
        (give, 0, 0, allow), (give, 0, 0, not_permitted),
    ]  # fmt: skip
    lines = [what | yes << 16 | no << 24 | operand << 32 for what, yes, no, operand in program]
    table = (ctypes.c_uint64 * len(lines))(*lines)
    head = (ctypes.c_uint64 * 2)(len(lines), ctypes.addressof(table))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, head, 0, 0), "seccomp")


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """The audit hook of isolation="weak"; what is loaded already may be imported again (that is no event)."""
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not permitted here")


def lock_in(isolation: str, caller: int) -> None:
    die_with_parent(caller)
    if isolation == "full":
        if os.geteuid() == 0:
            become_nobody()
        enter_namespaces(caller)
        leave_files()
        no_capabilities = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        check(LIBC.capset(*no_capabilities), "capset")


def answer(function: object, arguments: list[object]) -> str:
    try:
        assert callable(function)
        return json.dumps([function(*arguments)], allow_nan=False).replace("\n", " ")
    except Exception:
        return "null"


def main() -> None:
    request = json.load(sys.stdin)
    replies = os.dup(1)
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        lock_in(request["isolation"], int(sys.argv[1]))
        limit(request["seconds"], request["memory"], request["output"])
        if request["isolation"] == "full":
            refuse_sockets()
    except OSError as error:
        os.write(2, str(error).encode())
        return
    os.write(2, b"ready")
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    os.close(devnull)
    if request["isolation"] == "weak":
        sys.addaudithook(refuse)
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(request["code"], "program", "exec"), names)
    for arguments in request["calls"]:
        os.write(replies, answer(names[request["function"]], arguments).encode() + b"\n")


if __name__ == "__main__":
    main()
