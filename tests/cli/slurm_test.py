"""A manifest tuned by a job array of Slurm itself: a controller and a node of this machine, in a scratch
folder and with ports of their own. Skipped where Slurm is not installed (Debian's package: slurm-wlm)."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import time
import unittest
from pathlib import Path

from support import OP, WYVERN, Case

PATH = os.environ.get("PATH", "") + ":/usr/sbin"
PROGRAMS = {name: shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "sbatch", "sinfo")}
CONFIGURATION = """
ClusterName=wyvern
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


@unittest.skipUnless(all(PROGRAMS.values()), "no Slurm here (Debian's package: slurm-wlm)")
class Slurm(Case):
    def setUp(self):
        super().setUp()
        host = socket.gethostname().split(".")[0]
        for folder in ("state", "spool"):
            (self.folder / folder).mkdir()
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(CONFIGURATION.format(
            host=host, ports=free_ports(2), folder=self.folder,
            user=pwd.getpwuid(os.getuid()).pw_name))
        self.daemons = []
        self.addCleanup(self.stop)
        self.start("slurmctld", "-D")
        self.start("slurmd", "-D", "-N", host)
        self.wait_for_node()

    def start(self, name, *options):
        log = open(self.folder / f"{name}.log", "wb")
        self.addCleanup(log.close)
        self.daemons.append(subprocess.Popen([PROGRAMS[name], "-f", str(self.conf), *options],
                                             stdout=log, stderr=subprocess.STDOUT))

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def logs(self):
        return "\n".join(path.read_text(errors="replace")[-3000:]
                         for path in sorted(self.folder.glob("*.log")))

    def slurm(self, name, *arguments, timeout=300):
        # A user's own variables of Slurm would be options here.
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith(("SLURM", "SBATCH"))}
        return subprocess.run([PROGRAMS[name], *arguments], cwd=self.folder, capture_output=True,
                              text=True, timeout=timeout, check=False,
                              env={**clean, "SLURM_CONF": str(self.conf),
                                   "WYVERN_CACHE_DIR": str(self.cache)})

    def wait_for_node(self):
        """Where a sandbox lets no daemon of Slurm run there is nothing to show."""
        for _ in range(120):
            if any(daemon.poll() is not None for daemon in self.daemons):
                break
            if self.slurm("sinfo", "--noheader", "-o", "%t").stdout.strip() == "idle":
                return
            time.sleep(0.25)
        self.skipTest(f"Slurm does not start here: {self.logs()}")

    def test_an_array_tunes_a_manifest(self):
        shapes = [f"T={tokens},H=1,K=16" for tokens in (10, 20, 30, 40)]
        manifest = self.folder / "problems.jsonl"
        manifest.write_text("".join(json.dumps({"operator": OP, "shape": shape}) + "\n"
                                    for shape in shapes))
        tune = f"exec '{WYVERN}' tune --json --manifest '{manifest}' --device cpu --budget 0.1s"
        done = self.slurm("sbatch", "--parsable", "--wait", "--array=0-1", "--output=%a.json",
                          "--error=%a.log", "--wrap", tune)
        self.assertEqual(done.returncode, 0, f"{done.stderr}\n{self.logs()}")
        documents = [json.loads((self.folder / f"{task}.json").read_text()) for task in range(2)]
        self.assertEqual([d["shard"] for d in documents],
                         [{"index": task, "count": 2} for task in range(2)])
        lines = [tuning["line"] for d in documents for tuning in d["tunings"]]
        self.assertEqual(sorted(lines), [1, 2, 3, 4])
        # Each task has a cache of its own; together they are what the machines have found.
        parts = [Path(d["cache"]).parent for d in documents]
        self.assertEqual([part.name for part in parts], ["shard-0-of-2", "shard-1-of-2"])
        self.document("cache", "merge", *(part for part, d in zip(parts, documents) if d["tunings"]))
        for shape in shapes:
            answer = self.document("cache", "explain", OP, "--device", "cpu", "--shape", shape)
            self.assertEqual((answer["layer"], answer["origin"]), ("user", "exact"))


if __name__ == "__main__":
    unittest.main()
