"""The program that `sandbox.run_python` starts: isolates itself, runs Python code in a child, reports how it exited.

The program runs as `python -I -S` without this package. It reads a request (its length, then JSON) from standard input,
which the caller keeps open: at end of file the caller has exited, and the program kills the child. It writes its report
as JSON to the file descriptor that the request names. The child inherits standard output and error.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
CAPABILITY_VERSION_3 = 0x20080522
FIRST_UID = 2_000_000_000
UNPRIVILEGED = 65534
REPORT_FD = 3
"""File descriptor to which the child may write a report."""
BOX = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")

libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags, options=None):
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    checked(libc.mount(*texts, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")


class Isolation:
    """Isolates this process, as far as the kernel allows.

    Attributes:
        done: kinds of isolation that were set up.
        missing: kinds that could not be set up, with the reason.
    """

    def __init__(self, limits):
        self.limits = limits
        self.done = []
        self.missing = {}
        self.is_root = os.geteuid() == 0
        self.uid = self.gid = 0
        self.folder = None
        """Temporary folder for the code; None if it has a private file system."""

    def attempt(self, kind, action, *args):
        try:
            action(*args)
        except (OSError, KeyError) as error:
            self.missing[kind] = str(error)
            return False
        self.done.append(kind)
        return True

    def enter(self):
        """Enter new namespaces, and a private file system that holds only the interpreter."""
        if not self.is_root:
            self.attempt("user_namespace", self.enter_user_namespace)
        self.attempt("processes", self.unshare, CLONE_NEWPID)
        self.attempt("network", self.unshare, CLONE_NEWNET)
        self.attempt("ipc", self.unshare, CLONE_NEWIPC | CLONE_NEWUTS)
        if self.is_root:
            self.uid = self.gid = FIRST_UID + os.getpid()
        if not self.attempt("files", self.enter_private_files):
            import tempfile

            self.folder = tempfile.mkdtemp(prefix="lucidrl-sandbox-")
            if self.is_root:
                os.chown(self.folder, self.uid, self.gid)
            os.chdir(self.folder)

    def unshare(self, flags):
        checked(libc.unshare(flags), "unshare")

    def enter_user_namespace(self):
        uid, gid = os.geteuid(), os.getegid()
        self.unshare(CLONE_NEWUSER)
        maps = {"uid_map": f"{UNPRIVILEGED} {uid} 1", "gid_map": f"{UNPRIVILEGED} {gid} 1"}
        for name, line in {"setgroups": "deny", **maps}.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)

    def enter_private_files(self):
        """Make a read-only root with the interpreter and its libraries, and a small writable folder."""
        number = PIVOT_ROOT[os.uname().machine]
        self.unshare(CLONE_NEWNS)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        root = "/proc"  # a mount point that hides no files of the interpreter
        mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        for path in self.interpreter_paths():
            self.show(root, path)
        os.mkdir(root + "/dev")
        for path in filter(os.path.exists, DEVICES):
            os.close(os.open(root + path, os.O_CREAT))
            mount(path, root + path, None, MS_BIND)
        os.mkdir(root + BOX)
        owner = f",uid={self.uid},gid={self.gid}" if self.is_root else ""
        size = self.limits["folder_bytes"]
        mount("tmpfs", root + BOX, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes=4096,mode=700{owner}")
        mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
        os.chdir(root)
        checked(libc.syscall(number, b".", b"."), "pivot_root")
        checked(libc.umount2(b".", MNT_DETACH), "umount")
        os.chdir(BOX)

    def interpreter_paths(self):
        prefix = os.path.realpath(sys.base_prefix)
        paths = [path for path in (*LIBRARIES, prefix) if os.path.exists(path)]
        return [path for path in paths if path == prefix or not f"{path}/".startswith(f"{prefix}/")]

    def show(self, root, path):
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            if not os.path.lexists(target):
                os.symlink(os.readlink(path), target)
            return
        os.makedirs(target, exist_ok=True)
        mount(path, target, None, MS_BIND | MS_REC)
        had = os.statvfs(path).f_flag
        kept = had & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048) | (MS_RELATIME if had & 4096 else 0)
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)

    def drop_rights(self):
        """Become another user, or drop capabilities; called in the child."""
        if self.is_root:
            for uid in (self.uid, UNPRIVILEGED):
                if self.attempt("user", self.change_user, uid):
                    self.missing.pop("user", None)
                    break
            else:
                self.attempt("capabilities", self.drop_capabilities)
        elif "user_namespace" in self.done:
            self.attempt("capabilities", self.drop_capabilities)
            self.missing["user"] = "the code keeps the user id of the caller, which is not root"
        else:
            self.missing["user"] = "only root can change the user id"
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    def change_user(self, uid):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    def drop_capabilities(self):
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def set_limits(limits):
    for kind, number in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(kind, (number, number))


def wait(pid, timeout_s):
    """Wait until the child exits; kill it at the timeout or when the caller exits. Return whether it was in time."""
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    ready = [descriptor for descriptor, _ in poll.poll(timeout_s * 1000)]
    if handle not in ready:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    return handle in ready


class Children:
    """Processes that the child left behind; without a process namespace they become children of this subreaper."""

    def __init__(self):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:  # a private file system has no /proc
            self.list_fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
        except OSError:
            self.list_fd = -1

    def kill(self):
        while self.list_fd >= 0 and (pids := os.pread(self.list_fd, 1 << 16, 0).split()):
            for pid in map(int, pids):
                os.kill(pid, signal.SIGKILL)
            for pid in map(int, pids):
                os.waitpid(pid, 0)


def run_code(code):
    """Run the code as the main module."""
    main = sys.modules["__main__"]
    module = type(main)("__main__")
    vars(module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = ["completion"]
    try:
        exec(compile(code, "<completion>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException:
        import traceback

        kind, error, trace = sys.exc_info()
        traceback.print_exception(kind, error, trace.tb_next if trace else None, limit=20)
        sys.exit(1)


def child(isolation, request, setup_fd):
    """Drop rights, report which kinds of isolation hold, and run the code."""
    os.setsid()
    stdin = os.memfd_create("stdin")
    with open(os.dup(stdin), "wb") as file:
        file.write(request["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    isolation.drop_rights()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of the user id would clear it
    # Raises if the parent has exited already.
    os.write(setup_fd, json.dumps({"done": isolation.done, "missing": isolation.missing}).encode())
    os.close(setup_fd)
    os.dup2(stdin, 0)
    child_fd = request["child_fd"]
    if child_fd != REPORT_FD:
        os.dup2(child_fd, REPORT_FD)
    os.closerange(REPORT_FD + 1, os.sysconf("SC_OPEN_MAX"))
    set_limits(request["limits"])
    run_code(request["code"])


def main():
    size = int.from_bytes(os.read(0, 8), "big")
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            sys.exit(0)  # the caller exited
        parts.append(part)
        size -= len(part)
    request = json.loads(b"".join(parts))
    report_fd, limits = request["report_fd"], request["limits"]
    children = Children()
    isolation = Isolation(limits)
    isolation.enter()
    setup_read, setup_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(setup_read)
        return child(isolation, request, setup_write)
    os.close(setup_write)
    os.close(request["child_fd"])
    in_time = wait(pid, limits["timeout_s"])
    _, status, usage = os.wait4(pid, 0)
    children.kill()
    if isolation.folder is not None:
        import shutil

        os.chdir("/")
        shutil.rmtree(isolation.folder, ignore_errors=True)
    setup = os.read(setup_read, 1 << 16)
    report = {
        "setup": json.loads(setup) if setup else None,
        "exit": os.waitstatus_to_exitcode(status),
        "in_time": in_time,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    os.write(report_fd, json.dumps(report).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
