"""The command under attack: one small CPU problem, what it must give, and the judge of every outcome."""

import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

OP = "delta_rule"
SHAPE = "B=1,T=17,H=1,K=16"
BOUND = 1e-5  # of fp32 against the oracle
HANGS = 150   # seconds after which a process that should take one or two counts as hanging


@dataclass
class Done:
    """How a process ended: exit code (negative: the signal), what it printed."""
    code: int | None  # None: it did not end
    out: bytes
    err: bytes

    def what(self):
        if self.code is None:
            return "hangs"
        if self.code < 0:
            return signal.Signals(-self.code).name
        return f"exit code {self.code}"


@dataclass
class Tally:
    """One line of the table: what was tried how often and what happened."""
    fault: str
    promise: str
    times: int = 0
    outcomes: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, label, outcome, wrong=None, times=1):
        with self.lock:
            self.times += times
            if wrong:
                self.failures.append(f"{label}: {wrong}")
                print(f"    FAILED {self.fault}: {label}: {wrong}", file=sys.stderr, flush=True)
            else:
                self.outcomes[outcome] += times


class Target:
    def __init__(self, command, scratch):
        self.command = str(command)
        self.scratch = Path(scratch)
        self.names = iter(range(10 ** 9))
        self.lock = threading.Lock()
        self.input = self.scratch / "in.safetensors"
        self.check(self.start("example", OP, "--shape", SHAPE, "--dtype", "fp32", "-o", self.input))
        # What every run must give, to the bit; it agrees with an oracle that shares no code with it.
        self.warm = self.scratch / "warm"
        golden = self.scratch / "golden.safetensors"
        for cache in (self.warm, self.warm):
            self.check(self.start(*self.run_arguments(golden), cache=cache))
        self.golden = golden.read_bytes()
        self.against_oracle(golden)
        self.rows = rows_of(self.warm)
        assert self.rows, "the cache is empty"

    @staticmethod
    def check(done):
        assert done.code == 0, (done.code, done.err)

    def against_oracle(self, path):
        sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
        os.environ.setdefault("WYVERN", self.command)
        import oracle
        import support
        tensors = {name: oracle.tensor(entry) for name, entry in
                   support.read_file(self.input).items()}
        wanted = oracle.forward(oracle.Options(OP), tensors)
        for name, entry in support.read_file(path).items():
            error = oracle.error(oracle.numbers(entry), wanted[name])
            assert math.isfinite(error) and error < BOUND, (name, error)

    def folder(self):
        """A new one, for one trial."""
        with self.lock:
            path = self.scratch / f"t{next(self.names)}"
        path.mkdir()
        return path

    def cache(self, folder, kind="warm"):
        """A cache of its own: with the kernels of the problem, or none yet."""
        path = folder / "cache"
        if kind == "warm":
            shutil.copytree(self.warm, path)
        return path

    def run_arguments(self, output):
        return ["run", OP, "--device", "cpu", "--input", self.input, "--output", output]

    def popen(self, *arguments, cache=None, env=None, **options):
        environment = dict(os.environ, WYVERN_CACHE_DIR=str(cache or self.scratch / "none"),
                           **{name: str(value) for name, value in (env or {}).items()})
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
                   "stderr": subprocess.PIPE, "cwd": self.scratch, **options}
        return subprocess.Popen([self.command, *map(str, arguments)], env=environment, **options)

    def start(self, *arguments, timeout=HANGS, **options):
        process = self.popen(*arguments, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            return Done(None, out or b"", err or b"")
        return Done(process.returncode, out or b"", err or b"")

    def wrong_with(self, done, output=None, old=None, says=True, codes=(0, 2, 3)):
        """What is wrong with how a process ended; `output` is its file, which held `old`."""
        if done.code == 127 and b"cannot allocate memory for thread-local data" in done.err:
            return None  # by the C library, where a library of the compiler's is first entered
        if done.code not in codes:
            return f"{done.what()}: {last_line(done.err)}"
        if done.code != 0 and says:
            lines = [line for line in done.err.decode(errors="replace").splitlines()
                     if line.startswith("wyvern: ") and "nothing is tuned" not in line]
            said = [line for line in lines if not about_cache(line)]
            if len(said) != 1 and (said or not lines):  # or it failed for the cache's sake
                return f"{len(said)} sentences: {done.err[:300]!r}"
        if output is None:
            return None
        found = Path(output).read_bytes() if Path(output).exists() else None
        if done.code == 0 and found != self.golden:
            return "done, and the output is wrong"
        if found not in (old, self.golden):
            return "what stood in the output is lost"
        if any(name.endswith(".tmp") for name in os.listdir(Path(output).parent)):
            return "a fragment is left"
        return None

    def wrong_with_cache(self, cache, rows=None):
        """Every row that was there is there as it was, in a sound file."""
        try:
            found = rows_of(cache)
        except sqlite3.DatabaseError as error:
            return f"the cache is damaged: {error}"
        for row in self.rows if rows is None else rows:
            if row not in found:
                return "the cache has lost a row"
        return None

    def still_works(self, cache):
        """A run without any fault, on what a fault has left."""
        folder = self.folder()
        output = folder / "out"
        done = self.start(*self.run_arguments(output), cache=cache)
        wrong = self.wrong_with(done, output, codes=(0,))
        shutil.rmtree(folder, ignore_errors=True)
        return wrong and "afterwards: " + wrong


def about_cache(line):
    return re.match(r"wyvern: (the cache|no directory for the cache|there is no (?:space|memory) for the cache|a row )",
                    line) is not None


def last_line(text):
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "nothing said"


def rows_of(cache):
    """All rows of a cache's tables, after an integrity check; a file that is not there has none."""
    path = Path(cache) / "wyvern.db"
    if not path.exists():
        return set()
    database = sqlite3.connect(path, timeout=30)
    try:
        (verdict,) = database.execute("PRAGMA integrity_check").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        tables = [name for (name,) in database.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name IN"
            " ('artifacts', 'measurements', 'winners')")]
        # Of an artifact what is the same however often it is compiled.
        columns = {"artifacts": "key, template_id, target, config, metadata, digest, code"}
        return {(table, *row) for table in tables
                for row in database.execute(f"SELECT {columns.get(table, '*')} FROM {table}")}
    finally:
        database.close()


def spread(count, most):
    """At most `most` of 1..count (0: all): the first ones, the last one, and evenly in between."""
    if most == 0 or count <= most:
        return list(range(1, count + 1))
    first = most // 3
    rest = most - first
    return sorted({*range(1, first + 1),
                   *(first + round((count - first) * (i + 1) / rest) for i in range(rest))})


def in_parallel(jobs, work, items):
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        list(threads.map(work, items))


def scratch_folder():
    """In memory where that can be had: thousands of small files."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="wyvern-attack-",
                                       dir=memory if os.access(memory, os.W_OK) else None)
