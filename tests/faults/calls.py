"""Calls of the command that fail in turn: allocation, files, mapping, libraries, processes, threads."""

import itertools
import shutil

from target import Tally, in_parallel, last_line, spread

CLASSES = ("malloc", "open", "read", "write", "mmap", "dlopen", "spawn", "sync", "rename", "thread",
           "pipe")


def verbs(target):
    """{name: (arguments, cache, what it costs beside a warm run)}."""
    problem = ["delta_rule", "--shape", "B=1,T=17,H=1,K=16", "--dtype", "fp32"]
    device = ["--device", "cpu"]
    return {
        "run": (lambda f: target.run_arguments(f / "out"), "warm", 1),
        "run cold": (lambda f: target.run_arguments(f / "out"), "cold", 8),
        "compile": (lambda f: ["compile", "fwd_o.cpu", "--arch", "native-cpu", "--emit", "object",
                               "-o", f / "made"], "cold", 4),
        "tune": (lambda f: ["tune", *problem, *device, "--budget", "0.3s"], "warm", 20),
        "bench": (lambda f: ["bench", *problem, *device], "warm", 40),
        "verify": (lambda f: ["verify", "delta_rule", "--pass", "recurrent", "--dtype", "fp32",
                              *device], "warm", 12),
        "example": (lambda f: ["example", *problem, "-o", f / "made"], "warm", 1),
        "cache list": (lambda f: ["cache", "list"], "warm", 1),
        "cache stats": (lambda f: ["cache", "stats", "--json"], "warm", 1),
        "cache clear": (lambda f: ["cache", "clear"], "warm", 1),
    }


class Verb:
    def __init__(self, target, shim, name, make, kind):
        self.target, self.shim, self.name, self.make, self.kind = target, shim, name, make, kind
        self.made = {}  # what a run without fault writes into "made"
        self.calls = {}  # of it, by class and depth

    def start(self, folder, env):
        for name in ("out", "made"):
            (folder / name).write_bytes(b"old")
        cache = self.target.cache(folder, self.kind)
        return self.target.start(*self.make(folder), cache=cache,
                                 env={"LD_PRELOAD": self.shim, **env}), cache

    def count(self):
        """Runs without a fault."""
        folder = self.target.folder()
        done, _ = self.start(folder, {"FAULT_COUNTS": folder / "counts"})
        assert done.code == 0, (self.name, done)
        self.made = (folder / "made").read_bytes()
        for line in (folder / "counts").read_text().splitlines():
            depth, kind, calls = line.split()
            by_depth = self.calls.setdefault(kind, {})
            by_depth[int(depth)] = max(int(calls), by_depth.get(int(depth), 0))
        shutil.rmtree(folder, ignore_errors=True)

    def try_fault(self, tally, fault, depth):
        folder = self.target.folder()
        done, cache = self.start(folder, {"FAULT": fault, "FAULT_DEPTH": depth})
        says = not fault.startswith("write")  # what is said is written too
        wrong = self.target.wrong_with(
            done, folder / "out" if self.name.startswith("run") else None, b"old", says,
            # A case that cannot run is a case that failed.
            codes=(0, 1, 2, 3) if self.name == "verify" else (0, 2, 3))
        made = (folder / "made").read_bytes() if (folder / "made").exists() else b""
        # Where the processor cannot be told the object is one for less of it.
        is_object = self.name == "compile" and made[:4] == b"\x7fELF" and len(made) > 1000
        if not wrong and made not in (b"old", self.made) and not is_object:
            wrong = "what stood in the output is lost"
        if not wrong and done.code == 0 and made == b"old" != self.made:
            wrong = "done, and there is no output"
        if not wrong and any(p.name.endswith(".tmp") for p in folder.iterdir()):
            wrong = "a fragment is left"
        kept = self.name != "cache clear" and self.kind == "warm"
        wrong = wrong or self.target.wrong_with_cache(cache, None if kept else [])
        # A cold cache mostly stays empty, and a run on it compiles everything.
        if not wrong and self.kind == "warm" and self.name != "cache clear":
            wrong = self.target.still_works(cache)
        outcome = "right output" if done.code == 0 else "one sentence"
        where = f"{self.name}{' (worker)' if depth else ''}, {fault}"
        tally.add(where, outcome, wrong and f"{wrong} [{last_line(done.err)}]")
        shutil.rmtree(folder, ignore_errors=True)


def attack(target, options):
    """Yields a tally for each class of calls."""
    turns = itertools.cycle((("",), ("+",)))
    costs = {Verb(target, options.shim, name, make, cache): cost
             for name, (make, cache, cost) in verbs(target).items()
             if not options.verbs or name in options.verbs}
    in_parallel(options.jobs, Verb.count, costs)
    for kind in CLASSES:
        tally = Tally(f"{kind} fails", "right output or one sentence; no output or row is lost")
        trials = []
        for verb, cost in costs.items():
            most = 0 if options.full and kind != "malloc" else max(options.calls // cost,
                                                                   min(options.calls, 2))
            # Once and for good; where there is but one trial, by turns.
            lastings = ("", "+") if options.calls > 1 else next(turns)
            trials += [(verb, f"{kind}:{n}{lasting}", depth)
                       for depth, calls in verb.calls[kind].items()
                       for lasting in lastings for n in spread(calls, most)]
        in_parallel(options.jobs, lambda trial: trial[0].try_fault(tally, *trial[1:]), trials)
        if tally.times:
            yield tally
