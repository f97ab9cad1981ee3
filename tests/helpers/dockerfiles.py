"""Dockerfiles without an engine: their steps, and a build of them in a chroot of this machine's own programs (as root).

Left out, by name, is what downloads: the base (this machine's /usr is in its place), apt-get, and the packages of
launch/gpu/install.sh, whose environments see the packages of this Python instead.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from string import Template
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PLACES = list(dict.fromkeys(["/usr", sys.base_prefix, sys.prefix]))  # of this machine, which a chroot sees read-only
SITE = f"lib/python3.{sys.version_info.minor}/site-packages"
STAND_INS = {
    "apt-get": '#!/bin/sh\necho "left out: apt-get $*"\n',
    "install-packages": f"""#!/bin/sh -e
echo "left out: the packages of $1"
case $1 in
    trainer) folder=.venv ;;
    server) folder=.venv-sglang ;;
    *) exit ;;
esac
{sys.base_prefix}/bin/python3 -m venv --without-pip $folder
echo {sys.prefix}/{SITE} > $folder/{SITE}/here.pth
""",
}
ENTER = """
set -eu
root=$1 user=$2 folder=$3 words=$4
shift 4
for place in PLACES; do
    mkdir -p "$root$place"
    mount --bind "$place" "$root$place"
    mount -o remount,bind,ro "$root$place"
done
for place in /proc /dev; do mount --rbind "$place" "$root$place"; done
exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@" /bin/sh -c "cd $folder && $words"
""".replace("PLACES", shlex.join(PLACES))


class Step(NamedTuple):
    """Example: Step("COPY", "launch/gpu launch/gpu/")."""

    what: str
    words: str


def steps(file: Path) -> list[Step]:
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [Step(*line.split(maxsplit=1)) for line in lines]


def context(folder: Path) -> None:
    """The files of the repository that .dockerignore lets through, as the builder gets them."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if any(fnmatch(name, one) or name.startswith(f"{one}/") for one in kept):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@dataclass
class Image:
    """A root folder, and what an engine keeps of an image besides."""

    root: Path
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": "/stand-ins:/usr/sbin:/usr/bin:/sbin:/bin"})
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    command: str = ""
    said: str = ""  # by its RUN steps

    @classmethod
    def base(cls, root: Path) -> Image:
        """A small root of folders, with the users of Ubuntu's image."""
        for name in (
            "etc",
            "root",
            "opt",
            "home",
            "tmp",
            "run",
            "proc",
            "dev",
            "usr",
            "var/lib/apt/lists",
            "stand-ins",
        ):
            (root / name).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        users = {"root": 0, "ubuntu": 1000}
        texts = {"passwd": "{0}:x:{1}:{1}::/:/bin/sh\n", "group": "{0}:x:{1}:\n", "shadow": "{0}:*:20000::::::\n"}
        for name, line in texts.items():
            (root / "etc" / name).write_text("".join(line.format(*user) for user in users.items()))
        for name in ("ld.so.cache", "login.defs", "ssl", "alternatives"):
            if Path("/etc", name).is_dir():
                shutil.copytree(f"/etc/{name}", root / "etc" / name, symlinks=True)
            else:
                shutil.copy(f"/etc/{name}", root / "etc" / name)
        for name, text in STAND_INS.items():
            (root / "stand-ins" / name).write_text(text)
            (root / "stand-ins" / name).chmod(0o755)
        return cls(root)

    def run(self, words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Words of a shell in the image, as its user and in its folder."""
        given = [f"{name}={value}" for name, value in {"HOME": "/tmp", **self.variables, **variables}.items()]
        uid = {line.split(":")[0]: line.split(":")[2] for line in (self.root / "etc/passwd").read_text().splitlines()}
        user = f"{uid[self.user]}:{uid[self.user]}"
        command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", ENTER, "enter", str(self.root)]
        return subprocess.run([*command, user, self.folder, words, *given], capture_output=True, text=True)

    def place(self, name: str) -> Path:
        """Where a path of the image lies here."""
        return self.root / os.path.join(self.folder, name).lstrip("/")


def built(file: Path, folder: Path, arguments: Mapping[str, str], images: Mapping[str, Image]) -> Image:
    """The last stage of a Dockerfile; `images`: those that FROM may name.  Raises RuntimeError if a step fails."""
    stages: dict[str, Image] = {}
    sources = folder / "context"
    context(sources)
    known: dict[str, str] = {}
    image = Image(folder)  # until FROM names one
    for what, words in steps(file):
        if what == "FROM":
            name, _, alias = Template(words).substitute(known).partition(" AS ")
            image = images[name] if name in images else Image.base(folder / f"stage_{len(stages)}")
            stages[alias or name] = image
        elif what == "ARG":
            name, _, default = words.partition("=")
            known[name] = arguments.get(name, default)
        elif what == "COPY":
            _copy(image, words, stages, sources)
        elif what == "RUN":
            words = re.sub(r"\bbash launch/gpu/install\.sh\b", "install-packages", words)
            done = image.run(words, **known)
            image.said += done.stdout
            if done.returncode != 0:
                raise RuntimeError(f"{file.name}: RUN {words}: {done.stdout}{done.stderr}")
        else:
            _SETTERS[what](image, Template(words).safe_substitute(known | image.variables))
    return image


def _copy(image: Image, words: str, stages: Mapping[str, Image], sources: Path) -> None:
    first, *rest = shlex.split(words)
    at = stages[first.removeprefix("--from=")].root if first.startswith("--from=") else sources
    names = rest if at is not sources else [first, *rest]
    target = image.place(names[-1])
    for name in names[:-1]:
        source = at / name.lstrip("/")
        assert target.name and (names[-1].endswith("/") or len(names) == 2), (
            f"COPY {words}: expected a folder as target"
        )
        if source.is_dir():  # its content
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def _work_in(image: Image, words: str) -> None:
    image.folder = words
    image.place("").mkdir(parents=True, exist_ok=True)


_SETTERS: dict[str, Callable[[Image, str], None]] = {
    "ENV": lambda image, words: image.variables.update(one.split("=", 1) for one in shlex.split(words)),
    "LABEL": lambda image, words: image.labels.update(one.split("=", 1) for one in shlex.split(words)),
    "USER": lambda image, words: setattr(image, "user", words),
    "CMD": lambda image, words: setattr(image, "command", words),
    "WORKDIR": _work_in,
}
