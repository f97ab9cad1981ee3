"""What malicious code tries: each attack returns if it succeeds and raises if it does not.

Runs as a program: it reads its targets from stdin and prints a line "NAME reached" or "NAME stopped: WHY" for each.
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import pathlib
import resource
import signal
import socket
import struct
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(name, *arguments):
    """A function of the C library that returns -1 for an error."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    value = getattr(libc, name)(*words)
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value


def kernel(x86, arm, *arguments):
    return call("syscall", x86 if os.uname().machine == "x86_64" else arm, *arguments)


def read(*parts):
    return some(pathlib.Path(*parts).read_bytes())


def some(found):
    """To find nothing is no success."""
    assert found
    return found


def writes_a_file(at):
    with open(at["open_file"], "a") as file:
        file.write("x")


def follows_a_symlink(at):
    os.symlink(at["secret"], "link")
    try:
        assert pathlib.Path("link").read_text()
    finally:
        os.remove("link")


def climbs_out_by_a_folder_descriptor(at):
    descriptor = os.open("/", os.O_PATH)
    assert os.open(at["secret"].lstrip("/"), os.O_RDONLY, dir_fd=descriptor) >= 0


def changes_pythons_own_files(at):
    with open(os.__file__, "a"):
        pass


def opens_shared_memory(at):
    pathlib.Path("/dev/shm", f"megarl_{os.getpid()}").write_text("x")
    os.remove(f"/dev/shm/megarl_{os.getpid()}")


def finds_the_truth(at):
    """The name of the reward's variable in any file that this program can find, in the environment, or in memory."""
    places = ["/proc/self/environ", "/proc/self/maps", "/proc/1/environ", f"/proc/{at['runner']}/environ"]
    places += [f"/proc/self/fd/{number}" for number in range(3, 64)]
    for root in ("/dev/shm", at["folder"], "."):
        places += [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    for place in places:
        try:
            if os.path.isfile(place) and at["truth"][::-1] in pathlib.Path(place).read_text(errors="replace"):
                return
        except OSError:
            continue
    raise LookupError("nowhere")


def reads_an_inherited_descriptor(at):
    os.lseek(at["descriptor"], 0, os.SEEK_SET)
    assert os.read(at["descriptor"], 10)


def reads_anothers_memory(at):
    with open(f"/proc/{at['victim']}/mem", "rb"):
        pass


def sends_from_half_a_pair_of_datagram_sockets(at):
    half, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    half.sendto(b"x", at["datagrams"])


def asks_for_a_pair_of_internet_sockets(at):
    """Which the kernel itself answers with another error."""
    try:
        socket.socketpair(socket.AF_INET, socket.SOCK_STREAM)
    except PermissionError:
        raise
    except OSError:
        pass


def signals_process_1(at):
    assert os.getpid() != 1 or kernel(62, 129, at["victim"], 0) == 0
    os.kill(1, 0)


def signals_through_a_file(at):
    read, _ = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, at["victim"])
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGURG)


def traces_a_process(at):
    call("ptrace", 16, at["victim"], 0, 0)
    os.waitpid(at["victim"], 0x40000000)
    call("ptrace", 17, at["victim"], 0, 0)


def reads_by_process_vm(at):
    buffer = ctypes.create_string_buffer(8)
    words = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 8))
    call("process_vm_readv", at["victim"], words, 1, words, 1, 0)


def in_a_child(do):
    """Of a child, as a program that leads its group may not leave it in any case."""
    child = os.fork()
    if child == 0:
        try:
            do()
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, "it is refused"


def becomes_root(at):
    os.setuid(0)
    assert os.getuid() == 0


def clones_into_a_user_namespace(at):
    child = kernel(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def opens_perf(at):
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 9), 128)
    kernel(298, 241, attributes, 0, -1, -1, 0)


def loads_bpf(at):
    attributes = ctypes.create_string_buffer(struct.pack("IIII", 1, 4, 4, 1), 128)
    kernel(321, 280, 0, attributes, 128)


def makes_system_v_memory(at):
    identifier = call("shmget", 0, 4096, 0o1600)
    call("shmctl", identifier, 0, None)


def makes_a_message_queue(at):
    identifier = call("msgget", 0, 0o1600)
    call("msgctl", identifier, 0, None)


def loosens_the_filter(at):
    """A new filter can only be stricter; to set one at all is refused."""
    call("prctl", 22, 2, ctypes.create_string_buffer(16), 0, 0)
    raise AssertionError("and would not help")


def raises_its_limits(at):
    resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))


def outlives_its_parent(at):
    """Takes back the signal at the parent's death."""
    call("prctl", 1, 0, 0, 0, 0)


def writes_a_big_file(at):
    try:
        with open("big", "wb") as file:
            file.write(bytes(20 << 20))
    finally:
        os.remove("big")


def forks_many(at):
    children = []
    try:
        for _ in range(250):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            with contextlib.suppress(PermissionError):  # in a sandbox
                os.kill(child, signal.SIGKILL)


def starts_many_threads(at):
    stop = threading.Event()
    try:
        for _ in range(250):
            threading.Thread(target=stop.wait, daemon=True).start()
    finally:
        stop.set()


def opens_many_files(at):
    files = []
    try:
        for _ in range(100):
            files.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for file in files:
            os.close(file)


def locks_pythons_own_files(at):
    """Until it ends: so that whoever installs a new version waits."""
    with open(os.__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


BIG_FILES = 12  # of 15 MB: three times what the folder may have


def keep(at, *files):
    """Until somebody has noticed."""
    time.sleep(at["keeps_s"])
    for file in files:
        file.close()


def filled(path, flags=os.O_CREAT):
    file = os.fdopen(os.open(path, os.O_RDWR | flags, 0o600), "r+b", buffering=0)
    file.write(bytes(15 << 20))
    return file


def keeps_deleted_files_open(at):
    files = []
    for _ in range(BIG_FILES):
        files.append(filled("deleted"))
        os.remove("deleted")
    keep(at, *files)


def keeps_deleted_files_mapped(at):
    maps = []
    for _ in range(BIG_FILES):
        with filled("deleted") as file:
            maps.append(mmap.mmap(file.fileno(), 4096))
        os.remove("deleted")
    keep(at, *maps)


def keeps_files_that_never_had_a_name(at):
    keep(at, *[filled(".", os.O_TMPFILE) for _ in range(BIG_FILES)])


def writes_into_a_closed_folder(at):
    os.mkdir("closed", 0o300)
    keep(at, *[filled(f"closed/{number}") for number in range(BIG_FILES)])


def functions(names):
    return {name: globals()[name] for name in names.split()}


# Nothing but a sandbox stops these, whoever tries them, on any machine.
ANYBODY_CAN = {
    "reads_a_file": lambda at: read(at["secret"]),
    "reads_the_password_file": lambda at: read("/etc/passwd"),
    "lists_files_of_the_system": lambda at: some(set(os.listdir("/usr/share")) - {"zoneinfo"}),
    "makes_a_file_outside": lambda at: pathlib.Path(at["folder"], f"made_{os.getpid()}").write_text("x"),
    "lists_a_folder": lambda at: some(os.listdir(at["folder"])),
    "climbs_out_by_dots": lambda at: read("../" * 20, at["secret"].lstrip("/")),
    "truncates_a_file": lambda at: os.truncate(at["open_file"], 0),
    "truncates_by_opening": lambda at: os.close(os.open(at["open_file"], os.O_RDONLY | os.O_TRUNC)),
    "removes_a_file": lambda at: os.remove(at["removable"]),
    "changes_a_mode": lambda at: os.chmod(at["own_file"], 0o777),
    "changes_the_mode_of_an_open_file": lambda at: os.fchmod(os.open(at["own_file"], os.O_RDONLY), 0o777),
    "changes_a_time": lambda at: os.utime(at["own_file"]),
    "sees_the_environment": lambda at: some(any("TOKEN" in name or "KEY" in name for name in os.environ)),
    "reads_its_own_proc": lambda at: read("/proc/self/status"),
    "lists_processes": lambda at: some(os.listdir("/proc")),
    "connects_by_tcp": lambda at: socket.create_connection(("127.0.0.1", at["port"]), 5).close(),
    "sends_by_udp": lambda at: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", at["port"])),
    "listens": lambda at: socket.create_server(("127.0.0.1", 0)).close(),
    "connects_to_a_unix_socket": lambda at: socket.socket(socket.AF_UNIX).connect(at["unix"]),
    "connects_to_an_abstract_socket": lambda at: socket.socket(socket.AF_UNIX).connect("\0" + at["abstract"]),
    "signals_a_process": lambda at: os.kill(at["victim"], signal.SIGURG),
    "signals_everybody": lambda at: os.kill(-1, signal.SIGURG),
    "signals_a_thread": lambda at: kernel(234, 131, at["victim"], at["victim"], signal.SIGURG),
    "limits_another_process": lambda at: resource.prlimit(at["victim"], resource.RLIMIT_CORE, (0, 0)),
    "slows_another_process": lambda at: os.setpriority(os.PRIO_PROCESS, at["victim"], 19),
    "moves_another_process": lambda at: os.sched_setaffinity(at["victim"], os.sched_getaffinity(0)),
    "leaves_its_group": lambda at: in_a_child(os.setsid),
    "moves_to_another_group": lambda at: in_a_child(lambda: os.setpgid(0, 0)),
    "makes_files_in_memory": lambda at: os.memfd_create("x"),
    "takes_much_memory": lambda at: some(bytearray(700 << 20)),
    **functions(
        """
writes_a_file follows_a_symlink climbs_out_by_a_folder_descriptor finds_the_truth reads_an_inherited_descriptor
asks_for_a_pair_of_internet_sockets sends_from_half_a_pair_of_datagram_sockets signals_through_a_file
outlives_its_parent writes_a_big_file forks_many starts_many_threads
opens_many_files locks_pythons_own_files
"""
    ),
}
FILLS_THE_DISK = functions(
    """
keeps_deleted_files_open keeps_deleted_files_mapped keeps_files_that_never_had_a_name writes_into_a_closed_folder
"""
)  # the first one ends its program
ATTACKS = ANYBODY_CAN | {
    "links_a_file_into_its_folder": lambda at: os.link(at["open_file"], "linked"),
    "changes_an_owner": lambda at: os.chown(at["own_file"], os.getuid(), -1),
    "sets_an_attribute": lambda at: os.setxattr(at["own_file"], "user.x", b"x"),
    "makes_a_device": lambda at: os.mknod("device", 0o600 | 0o020000, os.makedev(1, 1)),
    "opens_a_disk": lambda at: os.open("/dev/vda", os.O_RDONLY),
    "reads_another_environment": lambda at: read(f"/proc/{at['runner']}/environ"),
    "opens_netlink": lambda at: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "opens_a_packet_socket": lambda at: socket.socket(17, socket.SOCK_RAW, 0),
    "signals_the_runner": lambda at: os.kill(at["runner"], 0),
    "signals_through_a_descriptor": lambda at: signal.pidfd_send_signal(os.pidfd_open(at["victim"]), signal.SIGURG),
    "mounts": lambda at: call("mount", b"none", b".", b"tmpfs", 0, None),
    "unshares_a_user_namespace": lambda at: call("unshare", 0x10000000),
    "changes_its_root": lambda at: os.chroot("."),
    "joins_a_namespace": lambda at: call("setns", os.open(f"/proc/{at['runner']}/ns/net", os.O_RDONLY), 0),
    "starts_io_uring": lambda at: kernel(425, 425, 4, ctypes.create_string_buffer(120)),
    "adds_a_key": lambda at: kernel(248, 217, b"user", b"megarl", b"x", 1, -3),
    "handles_page_faults": lambda at: kernel(323, 282, 1),
    "sets_the_hosts_name": lambda at: socket.sethostname(socket.gethostname()),
    **functions(
        """
changes_pythons_own_files opens_shared_memory reads_anothers_memory signals_process_1 traces_a_process
reads_by_process_vm becomes_root clones_into_a_user_namespace loads_bpf opens_perf makes_system_v_memory
makes_a_message_queue loosens_the_filter raises_its_limits
"""
    ),
}


if __name__ == "__main__":
    targets = json.loads(sys.stdin.read())
    wanted = targets["attacks"]
    for name in wanted:
        try:
            (ATTACKS | FILLS_THE_DISK)[name](targets)
        except BaseException as error:
            print(f"{name} stopped: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name} reached", flush=True)
    os._exit(0)  # without waiting for threads
