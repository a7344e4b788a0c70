"""deploy/slurm on a real single-node Slurm: a site of two ranks trains to the end of its run.

munged, slurmctld and slurmd are started for the test and end with it. Needs root, because slurmd
runs jobs as their users. Run alone: pytest tests/deploy/test_slurm.py
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, Process, free_port
from support.live import eventually
from support.programs import program

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "loco-site.sbatch"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(500),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd runs jobs as their users: needs root"),
]


class Slurm:
    """One node, one partition; everything of it lies in a directory of the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        host = socket.gethostname().split(".")[0]
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (directory / "slurm.conf").write_text(
            f"""
            ClusterName=test
            SlurmctldHost={host}(127.0.0.1)
            SlurmUser=root
            AuthType=auth/munge
            AuthInfo=socket={directory}/munge.socket
            CredType=cred/munge
            SlurmctldPort={free_port()}
            SlurmdPort={free_port()}
            StateSaveLocation={directory}/state
            SlurmdSpoolDir={directory}/spool
            SlurmctldPidFile={directory}/slurmctld.pid
            SlurmdPidFile={directory}/slurmd.pid
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SchedulerType=sched/builtin
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core
            ReturnToService=2
            JobRequeue=1
            MpiDefault=none
            NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
            PartitionName=main Nodes={host} Default=YES MaxTime=10 State=UP
            """
        )

    def daemons(self) -> list[Process]:
        d = self.directory
        socket_ = d / "munge.socket"
        munged = Process(
            d / "munged.log",
            [
                program("munged"), "--foreground", "--force", f"--socket={socket_}",
                f"--key-file={d}/munge.key", f"--pid-file={d}/munged.pid",
                f"--seed-file={d}/munged.seed", f"--log-file={d}/munged.log",
            ],
        )  # fmt: skip
        eventually(socket_.exists, "munged listens")
        controller = Process(d / "slurmctld.log", [program("slurmctld"), "-D"], **self.environment)
        node = Process(d / "slurmd.log", [program("slurmd"), "-D"], **self.environment)
        return [munged, controller, node]

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            [program(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            cwd=self.directory,
            env={**os.environ, **self.environment, **environment},
        )
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        shown = self.run("scontrol", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S+)", shown))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    directory = tmp_path / "slurm"
    directory.mkdir()
    slurm = Slurm(directory)
    daemons = slurm.daemons()
    try:
        eventually(lambda: "idle" in slurm.run("sinfo", "-h", "-o", "%T"), "the node is idle")
        yield slurm
    finally:
        slurm.run("scancel", "--user", "root")
        try:  # a job's step daemons outlive slurmd
            eventually(lambda: not slurm.run("squeue", "-h").strip(), "no job is left", 40)
        finally:
            for daemon in reversed(daemons):
                daemon.__exit__()


def submit(slurm: Slurm, coordinator: str, site: str = "paris") -> str:
    answer = slurm.run(
        "sbatch", "--parsable", "--ntasks=2", "--ntasks-per-node=2", "--overcommit",
        "--cpus-per-task=1", "--output=job.log", str(SCRIPT),
        LOCO_COORDINATOR=coordinator,
        LOCO_SITE=site,
        LOCO_DEVICE="cpu",
        LOCO_PYTHON=sys.executable,
        LOCO_ARGS="--checkpoint-every-rounds 3",
        GLOO_SOCKET_IFNAME="lo",
        PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert answer.strip().isdecimal(), answer
    return answer.strip()


def test_a_site_trains_to_the_end_and_is_requeued_when_told_to_end(
    tmp_path: Path, slurm: Slurm
) -> None:
    inner = {"steps": 10, "max_local_steps": 10}
    with Cluster(tmp_path, run={"rounds": 60}, inner=inner, quorum={"min_sites": 1}) as cluster:
        cluster.coordinator()
        number = submit(slurm, cluster.address)
        log = slurm.directory / "job.log"

        def told() -> str:
            return log.read_text() if log.exists() else ""

        cluster.reaches(4)
        slurm.run("scancel", "--batch", "--signal=TERM", number)  # as before the end of its time
        eventually(
            lambda: (
                (slurm.job(number).get("Restarts"), slurm.job(number).get("JobState"))
                == ("1", "PENDING")
            ),
            "requeued",
            60,
        )
        (site,) = cluster.status()["sites"]
        assert site["status"] == "left", told()  # it said goodbye
        # A requeued job waits for two minutes. Not here; but slurmd refuses the number for a while
        # ("job credential revoked") after it was told to end it.
        answer = slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now+8seconds")
        assert answer == "", answer
        eventually(
            lambda: slurm.job(number).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED"),
            "the job ends",
            200,
        )
        assert slurm.job(number)["JobState"] == "COMPLETED", told()
        status = cluster.status()
    assert status["phase"] == "finished"
    (site,) = status["sites"]
    assert (site["ranks"], site["incarnation"]) == (2, 2)
    assert site["theta_digest"] == status["theta_digest"]
    assert "going on from the checkpoint of round" in told()
    assert told().rstrip().endswith("the run is finished")


def test_what_no_restart_cures_ends_the_job_for_good(slurm: Slurm) -> None:
    number = submit(slurm, "127.0.0.1:1", site="Paris!")
    eventually(lambda: slurm.job(number).get("JobState") == "FAILED", "the job fails", 60)
    job = slurm.job(number)
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0")
    told = (slurm.directory / "job.log").read_text()
    assert "site name 'Paris!' is not allowed" in told
    assert "ended with exit code 2" in told
