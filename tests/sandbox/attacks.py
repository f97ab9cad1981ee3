"""What malicious code tries, each in a function that returns if it succeeds and raises if it does not.

Runs as a program: it reads its targets from stdin and prints a line "NAME reached" or "NAME stopped: WHY" for each.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import resource
import signal
import socket
import struct
import sys
import threading

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


# ---- files


def reads_a_file(at):
    assert pathlib.Path(at["secret"]).read_text()


def reads_the_password_file(at):
    assert pathlib.Path("/etc/passwd").read_text()


def lists_files_of_the_system(at):
    assert set(os.listdir("/usr/share")) - {"zoneinfo"}


def writes_a_file(at):
    with open(at["open_file"], "a") as file:
        file.write("x")


def makes_a_file_outside(at):
    pathlib.Path(at["folder"], f"made_{os.getpid()}").write_text("x")


def lists_a_folder(at):
    assert os.listdir(at["folder"])


def follows_a_symlink(at):
    os.symlink(at["secret"], "link")
    try:
        assert pathlib.Path("link").read_text()
    finally:
        os.remove("link")


def links_a_file_into_its_folder(at):
    os.link(at["open_file"], "linked")


def climbs_out_by_dots(at):
    assert pathlib.Path("../" * 20, at["secret"].lstrip("/")).read_text()


def climbs_out_by_a_folder_descriptor(at):
    descriptor = os.open("/", os.O_PATH)
    assert os.open(at["secret"].lstrip("/"), os.O_RDONLY, dir_fd=descriptor) >= 0


def truncates_a_file(at):
    os.truncate(at["open_file"], 0)


def truncates_by_opening(at):
    os.close(os.open(at["open_file"], os.O_RDONLY | os.O_TRUNC))


def removes_a_file(at):
    os.remove(at["removable"])


def changes_a_mode(at):
    os.chmod(at["own_file"], 0o777)


def changes_the_mode_of_an_open_file(at):
    os.fchmod(os.open(at["own_file"], os.O_RDONLY), 0o777)


def changes_an_owner(at):
    os.chown(at["own_file"], os.getuid(), -1)


def changes_a_time(at):
    os.utime(at["own_file"])


def sets_an_attribute(at):
    os.setxattr(at["own_file"], "user.x", b"x")


def changes_pythons_own_files(at):
    with open(os.__file__, "a"):
        pass


def makes_a_device(at):
    os.mknod("device", 0o600 | 0o020000, os.makedev(1, 1))


def opens_a_disk(at):
    os.open("/dev/vda", os.O_RDONLY)


def opens_shared_memory(at):
    pathlib.Path("/dev/shm", f"megarl_{os.getpid()}").write_text("x")
    os.remove(f"/dev/shm/megarl_{os.getpid()}")


# ---- the tests, and secrets


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


def sees_the_environment(at):
    assert any("TOKEN" in name or "KEY" in name for name in os.environ)


def reads_an_inherited_descriptor(at):
    os.lseek(at["descriptor"], 0, os.SEEK_SET)
    assert os.read(at["descriptor"], 10)


def reads_another_environment(at):
    assert pathlib.Path(f"/proc/{at['runner']}/environ").read_bytes()


def reads_anothers_memory(at):
    with open(f"/proc/{at['victim']}/mem", "rb"):
        pass


def reads_its_own_proc(at):
    assert pathlib.Path("/proc/self/status").read_text()


def lists_processes(at):
    assert os.listdir("/proc")


# ---- network


def connects_by_tcp(at):
    socket.create_connection(("127.0.0.1", at["port"]), 5).close()


def sends_by_udp(at):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", at["port"]))


def listens(at):
    socket.create_server(("127.0.0.1", 0)).close()


def connects_to_a_unix_socket(at):
    socket.socket(socket.AF_UNIX).connect(at["unix"])


def connects_to_an_abstract_socket(at):
    socket.socket(socket.AF_UNIX).connect("\0" + at["abstract"])


def sends_from_half_a_pair_of_datagram_sockets(at):
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", at["datagrams"])


def asks_for_a_pair_of_internet_sockets(at):
    """Which the kernel itself answers with another error."""
    try:
        socket.socketpair(socket.AF_INET, socket.SOCK_STREAM)
    except PermissionError:
        raise
    except OSError:
        pass


def opens_netlink(at):
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)


def opens_a_packet_socket(at):
    socket.socket(17, socket.SOCK_RAW, 0)


# ---- other processes


def signals_a_process(at):
    os.kill(at["victim"], signal.SIGURG)


def signals_the_runner(at):
    os.kill(at["runner"], 0)


def signals_process_1(at):
    assert os.getpid() != 1 or kernel(62, 129, at["victim"], 0) == 0
    os.kill(1, 0)


def signals_everybody(at):
    os.kill(-1, signal.SIGURG)


def signals_a_thread(at):
    kernel(234, 131, at["victim"], at["victim"], signal.SIGURG)


def signals_through_a_descriptor(at):
    signal.pidfd_send_signal(os.pidfd_open(at["victim"]), signal.SIGURG)


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


def limits_another_process(at):
    resource.prlimit(at["victim"], resource.RLIMIT_CORE, (0, 0))


def slows_another_process(at):
    os.setpriority(os.PRIO_PROCESS, at["victim"], 19)


def moves_another_process(at):
    os.sched_setaffinity(at["victim"], os.sched_getaffinity(0))


def leaves_its_group(at):
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.wait()
    assert status == 0, "setsid is refused"


def moves_to_another_group(at):
    if os.fork() == 0:
        try:
            os.setpgid(0, 0)
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.wait()
    assert status == 0, "setpgid is refused"


# ---- the system


def becomes_root(at):
    os.setuid(0)
    assert os.getuid() == 0


def mounts(at):
    call("mount", b"none", b".", b"tmpfs", 0, None)


def unshares_a_user_namespace(at):
    call("unshare", 0x10000000)


def clones_into_a_user_namespace(at):
    child = kernel(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def changes_its_root(at):
    os.chroot(".")


def joins_a_namespace(at):
    call("setns", os.open(f"/proc/{at['runner']}/ns/net", os.O_RDONLY), 0)


def loads_bpf(at):
    attributes = ctypes.create_string_buffer(struct.pack("IIII", 1, 4, 4, 1), 128)
    kernel(321, 280, 0, attributes, 128)


def opens_perf(at):
    kernel(298, 241, ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 9), 128), 0, -1, -1, 0)


def starts_io_uring(at):
    kernel(425, 425, 4, ctypes.create_string_buffer(120))


def adds_a_key(at):
    kernel(248, 217, b"user", b"megarl", b"x", 1, -3)


def makes_system_v_memory(at):
    identifier = call("shmget", 0, 4096, 0o1600)
    call("shmctl", identifier, 0, None)


def makes_a_message_queue(at):
    identifier = call("msgget", 0, 0o1600)
    call("msgctl", identifier, 0, None)


def makes_files_in_memory(at):
    os.memfd_create("x")


def handles_page_faults(at):
    kernel(323, 282, 1)


def loosens_the_filter(at):
    """A new filter can only be stricter; to set one at all is refused."""
    call("prctl", 22, 2, ctypes.create_string_buffer(16), 0, 0)
    raise AssertionError("and would not help")


def raises_its_limits(at):
    resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))


def sets_the_hosts_name(at):
    socket.sethostname(socket.gethostname())


def outlives_its_parent(at):
    """Takes back the signal at the parent's death."""
    call("prctl", 1, 0, 0, 0, 0)


# ---- limits, each in a size that is harmless without them


def takes_much_memory(at):
    assert bytearray(700 << 20)


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


if __name__ == "__main__":
    targets = json.loads(sys.stdin.read())
    wanted = targets["attacks"]
    for name in wanted:
        try:
            globals()[name](targets)
        except BaseException as error:
            print(f"{name} stopped: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name} reached", flush=True)
    os._exit(0)  # without waiting for threads
