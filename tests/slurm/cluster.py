"""A Slurm cluster of one node on this machine, with a configuration and ports of its own.

python -m tests.slurm.cluster FOLDER starts one to play with, until Ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
SBIN = "/usr/sbin:/sbin"
CPUS = 4
"""More than a small machine has: tasks that start or sleep need none."""
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a job that was requeued may start again when its old credentials have expired
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=2
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=tiny Nodes={host} Default=YES State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None: it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")]
    if missing:
        return f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "starting slurmd takes root"


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """A running cluster; its slurm.conf, for SLURM_CONF.

    Args:
        folder: an existing one with a short path (a socket lies in it) that all users can enter.
    """
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    config = folder / "slurm.conf"
    told = {"host": socket.gethostname().partition(".")[0], "ports": _free_ports(2), "cpus": CPUS}
    config.write_text(CONFIG.format(folder=folder, **told))
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:{SBIN}"}
    munge = [
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid",
    ]
    munge += [f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munged.log"]
    try:
        for command in (["munged", *munge], ["slurmctld"], ["slurmd"]):
            subprocess.run(command, env=environment, check=True, capture_output=True)
        _wait_until_idle(environment, folder)
        yield config
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, check=False, capture_output=True)
        for name in ("slurmd", "slurmctld", "munged"):
            _stop(folder / f"{name}.pid")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    command = ["sinfo", "--noheader", "--format", "%T"]
    for _ in range(100):
        told = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if told.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(file.read_text(errors="replace")[-2000:] for file in folder.glob("*.log"))
    raise RuntimeError(f"the node does not come up: {told.stdout}{told.stderr}\n{logs}")


def _stop(pid_file: Path) -> None:
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    with cluster(Path(sys.argv[1])) as slurm_conf:
        print(f"export SLURM_CONF={slurm_conf}", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
