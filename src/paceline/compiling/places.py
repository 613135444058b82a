"""Where a compile cache lies, and on what kind of file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from paceline.errors import UserError

_NETWORK = """
    nfs nfs3 nfs4 cifs smb smb2 smb3 smbfs afs lustre gpfs beegfs ceph glusterfs orangefs pvfs2 panfs wekafs ocfs2 9p
    fuse.sshfs fuse.s3fs fuse.gcsfuse fuse.goofys fuse.glusterfs fuse.ceph fuse.juicefs fuse.blobfuse fuse.rclone
    fuse.beegfs fuse.moosefs fuse.weka
"""
NETWORK_FILESYSTEMS = frozenset(_NETWORK.split())


def default_root() -> Path:
    """``$XDG_CACHE_HOME/paceline/compile``, or ``~/.cache/paceline/compile``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "paceline" / "compile"


def chosen_root(setting: str = "") -> Path:
    """The root that ``compiling.cache`` names, or the default where it is empty."""
    return Path(setting).expanduser().absolute() if setting else default_root()


def unwritable(place: Path, error: OSError) -> UserError:
    """What is raised where a cache, or what belongs to it, cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return UserError(
        f"cannot write the compile cache {place}: {error.strerror or error}",
        "make room there, or set compiling.cache to a folder on another disk"
        if full
        else "set compiling.cache to a folder on a local disk that you may write",
    )


def filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that `path` lies on, or would ("ext4", "nfs4"); "unknown" where that cannot be read."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "unknown"
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for _, mount, fstype, *_ in (line.split() for line in lines if line.count(" ") >= 2):
        point = mount.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fstype
    return kind


def is_network_filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Caches there have lost files under readers, kept stale handles, and locks that hold nobody: use a local disk."""
    return filesystem(path, mounts) in NETWORK_FILESYSTEMS
