"""What happens to and around processes: kills, limits, streams, owners, stopped peers, FIFOs."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from target import Done, Tally, in_parallel, last_line

NOBODY = 65534


def kills(target, options):
    """SIGKILL at points spread over the life of a cold run or a tuning."""
    tally = Tally("SIGKILL", "no row lost, old or new output, the next run is right")
    problem = ["delta_rule", "--shape", "B=1,T=17,H=1,K=16", "--dtype", "fp32", "--device", "cpu"]
    took = {}
    for kind in ("run", "tune"):
        begin = time.monotonic()
        folder = target.folder()
        target.start(*(target.run_arguments(folder / "out") if kind == "run" else
                       ["tune", *problem, "--budget", "0.3s"]), cache=folder / "cache")
        took[kind] = time.monotonic() - begin
    chance = random.Random(2)

    def one(i):
        kind = "run" if i % 3 else "tune"
        folder = target.folder()
        cache, output = target.cache(folder, "warm" if i % 2 else "cold"), folder / "out"
        output.write_bytes(b"old")
        arguments = (target.run_arguments(output) if kind == "run" else
                     ["tune", *problem, "--budget", "0.3s"])
        process = target.popen(*arguments, cache=cache, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
        time.sleep(chance.random() * took[kind] * (0.1 if i % 2 and kind == "run" else 1))
        process.kill()
        process.wait()
        wrong = None
        if output.read_bytes() not in (b"old", target.golden):
            wrong = "a fragment stands in the output"
        wrong = wrong or target.wrong_with_cache(cache, target.rows if i % 2 else [])
        wrong = wrong or target.still_works(cache)
        tally.add(f"kill {i}", "nothing lost", wrong)
        shutil.rmtree(folder, ignore_errors=True)
    in_parallel(options.jobs, one, range(options.kills))
    return [tally]


def limits(target, options):
    """ulimit -n, -v, -f."""
    tallies = []
    for name, limit, values in (
            ("ulimit -n", resource.RLIMIT_NOFILE, range(3, 31)),
            # The program itself takes 11: with less there is nobody to say a sentence.
            ("ulimit -v (MB)", resource.RLIMIT_AS, range(20, 620, 20)),
            ("ulimit -f (kB)", resource.RLIMIT_FSIZE, [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128])):
        tally = Tally(name, "right output or one sentence; no output or row is lost")
        unit = {"ulimit -n": 1, "ulimit -v (MB)": 1 << 20, "ulimit -f (kB)": 1 << 10}[name]
        values = list(values)[::1 if options.full else 3]

        def one(trial):
            value, kind = trial
            folder = target.folder()
            cache, output = target.cache(folder, kind), folder / "out"
            output.write_bytes(b"old")
            done = target.start(
                *target.run_arguments(output), cache=cache,
                preexec_fn=lambda: resource.setrlimit(limit, (value * unit, value * unit)))
            if done.code == 127 or b"error while loading shared libraries" in done.err:
                tally.add(f"{value}, {kind}", "not started by the loader")
                return
            wrong = target.wrong_with(done, output, b"old")
            wrong = wrong or target.wrong_with_cache(cache, target.rows if kind == "warm" else [])
            wrong = wrong or target.still_works(cache)
            tally.add(f"{value}, {kind}", "one sentence" if done.code else "right output",
                      wrong and f"{wrong} [{last_line(done.err)}]")
            shutil.rmtree(folder, ignore_errors=True)
        in_parallel(options.jobs, one, [(v, kind) for v in values for kind in ("warm", "cold")])
        tallies.append(tally)
    return tallies


def streams(target, options):
    """stdout and stderr closed or full."""
    tally = Tally("stdout, stderr closed or full", "documented exit code, right output")
    verbs = {
        "run": lambda f: target.run_arguments(f / "out"),
        "help": lambda f: ["--help"],
        "list": lambda f: ["cache", "list", "--json"],
        "devices": lambda f: ["devices"],
        "stages": lambda f: ["stages", "--json"],
        "bad": lambda f: ["run", "nothing"],
    }
    for verb, make in verbs.items():
        for out in ("open", "full", "closed"):
            for err in ("open", "full", "closed"):
                folder = target.folder()
                full = open("/dev/full", "wb", buffering=0)
                closed = [n for n, how in ((1, out), (2, err)) if how == "closed"]
                done = target.start(
                    *make(folder), cache=target.cache(folder),
                    stdout=full if out == "full" else subprocess.PIPE,
                    stderr=full if err == "full" else subprocess.PIPE,
                    preexec_fn=lambda: [os.close(n) for n in closed])
                full.close()
                says_nothing = out != "open"
                wanted = 2 if verb == "bad" or says_nothing else 0
                wrong = None if done.code == wanted else f"{done.what()}, not {wanted}"
                if verb == "run" and not wrong and (folder / "out").read_bytes() != target.golden:
                    wrong = "the output is wrong"
                tally.add(f"{verb}, stdout {out}, stderr {err}", f"exit code {wanted}", wrong)
                shutil.rmtree(folder, ignore_errors=True)
    return [tally]


def owners(target, options):
    """Caches that others own or may write: their code must not run, nor anything be written there."""
    tally = Tally("foreign cache", "refused in one sentence, right output, untouched")
    is_root = os.geteuid() == 0
    trials = [("directory", mode, None) for mode in (0o777, 0o770, 0o722, 0o1777)]
    trials += [("file", mode, None) for mode in (0o666, 0o660, 0o622)]
    trials += [("link to directory", None, None), ("link to file", None, None)]
    if is_root:
        trials += [("directory", 0o700, NOBODY), ("file", 0o600, NOBODY)]
    for what, mode, owner in trials:
        folder = target.folder()
        cache = target.cache(folder)
        path = cache if "directory" in what else cache / "wyvern.db"
        if what.startswith("link"):
            moved = folder / "moved"
            path.rename(moved)
            path.symlink_to(moved)
        else:
            path.chmod(mode)
            if owner is not None:
                os.chown(path, owner, owner)
        before = (cache / "wyvern.db").read_bytes()
        output = folder / "out"
        done = target.start("run", "delta_rule", "--device", "cpu", "--input", target.input,
                            "--output", output, "--json", cache=cache)
        wrong = target.wrong_with(done, output, codes=(0,))
        if not wrong and json.loads(done.out)["compiled"] == 0:
            wrong = "its code was run"
        if not wrong and done.err.count(b"\n") != 1:
            wrong = f"said {done.err!r}"
        if not wrong and (cache / "wyvern.db").read_bytes() != before:
            wrong = "it was written"
        tally.add(f"{what} {mode and oct(mode)} {owner}", "refused", wrong)
        shutil.rmtree(folder, ignore_errors=True)
    return [tally]


def stopped_peer(target, options):
    """A process that is stopped while it compiles holds its claim; others wait a bounded time."""
    tally = Tally("stopped peer", "waited for, once for all kernels, then right output")
    for i in range(options.peers):
        folder = target.folder()
        cache = folder / "cache"
        peer = target.popen(*target.run_arguments(folder / "first"), cache=cache,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (cache / "wyvern.db.claims").exists() and peer.poll() is None:
            time.sleep(0.002)
        time.sleep(0.05 * i)
        peer.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        done = target.start(*target.run_arguments(folder / "out"), cache=cache)
        waited = time.monotonic() - begin
        wrong = target.wrong_with(done, folder / "out", codes=(0,))
        if not wrong and waited > 60:  # 20 s of patience for the claim and 5 s for a lock
            wrong = f"waited {waited:.0f} s"
        peer.send_signal(signal.SIGCONT)
        if peer.wait(timeout=120) != 0 and not wrong:
            wrong = "the stopped one failed when it went on"
        tally.add(f"peer {i}", "right output", wrong)
        shutil.rmtree(folder, ignore_errors=True)
    return [tally]


def fifos(target, options):
    tally = Tally("FIFO as input or output", "refused at once")
    for what in ("input", "output"):
        folder = target.folder()
        os.mkfifo(folder / "fifo")
        arguments = ["run", "delta_rule", "--device", "cpu",
                     "--input", folder / "fifo" if what == "input" else target.input,
                     "--output", folder / "fifo" if what == "output" else folder / "out"]
        done = target.start(*arguments, cache=target.cache(folder), timeout=60)
        tally.add(what, "one sentence", target.wrong_with(done, codes=(2,)))
    return [tally]


def determinism(target, options):
    tally = Tally("the same run again", "the same bytes, in any process, on any number of threads")
    cores = sorted(os.sched_getaffinity(0))

    def one(i):
        folder = target.folder()
        mine = cores[:1 + i % len(cores)]
        done = target.start(*target.run_arguments(folder / "out"),
                            cache=target.cache(folder, "cold" if i % 8 == 0 else "warm"),
                            preexec_fn=lambda: os.sched_setaffinity(0, mine))
        tally.add(f"run {i}", "the same bytes",
                  target.wrong_with(done, folder / "out", codes=(0,)))
        shutil.rmtree(folder, ignore_errors=True)
    in_parallel(options.jobs, one, range(options.runs))
    # Many at once on one empty cache.
    folder = target.folder()
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(lambda i: target.start(
            *target.run_arguments(folder / f"out{i}"), cache=folder / "cache"), range(8)))
    for i, done in enumerate(ends):
        tally.add(f"one of eight, {i}", "the same bytes",
                  target.wrong_with(done, folder / f"out{i}", codes=(0,)))
    return [tally]


WORDS = ["run", "tune", "bench", "verify", "compile", "cache", "example", "stages", "devices", "--json",
         "--help", "--version", "--shape", "B=1,T=4,H=1,K=16", "B=0", "T=-1", "K=99999999999999999999",
         "delta_rule", "kda", "gdn2", "gated_delta_rule", "--device", "cpu", "cuda:0", "cuda:-1",
         "--input", "--output", "-o", "--pass", "backward", "recurrent", "sideways", "--dtype",
         "fp32", "fp64", "--scale", "nan", "1e999", "--chunk-size", "17", "--seqlens", "5,0,-1",
         "--num-householder", "0", "--preset", "list", "show", "stats", "path", "clear", "m1", "w1",
         "--budget", "0s", "-1s", "--config", "BT=64,BV=", "--emit", "ptx", "--arch", "sm_90a",
         "native-cpu", "", "-", "--", "\x1b[31m", "\n", "\u202e", "x" * 3000, "--verify=maybe", "@file"]


def command_lines(target, options):
    tally = Tally("random command line", "documented exit code, one sentence where refused")
    folder = target.folder()

    def one(seed):
        chance = random.Random(seed)
        words = [chance.choice(WORDS) for _ in range(chance.randint(0, 9))]
        # Written into the folder, never anywhere else; what would take minutes is left out.
        if words[:1] in (["tune"], ["bench"], ["verify"]):
            words[0] = chance.choice(["run", "compile", "cache"])
        done = target.start(*words, cache=folder / "cache", cwd=folder)
        wrong = target.wrong_with(done)
        if not wrong and done.code and not done.err.decode(errors="replace").strip().isprintable():
            wrong = "it prints what acts on a terminal"
        tally.add(f"{words!r}"[:200], f"exit code {done.code}", wrong)
    in_parallel(options.jobs, one, range(options.lines))
    return [tally]


def programs(target, options):
    """What is attacked below the command: by the tests of the cache, which count for themselves."""
    tallies = []
    for title, promise, program, cases, repeat in (
            ("call of the cache to its disk fails", "right rows or none, all kept, told once",
             "cache_disk_test", "CacheDisk.*", 1),
            ("loss of power", "what was said to be stored is there, in a sound file",
             "cache_disk_test", "CachePower.*", 1),
            ("fork() while threads work", "the child works, nobody waits for ever",
             "cache_fault_test", "CacheFork.*", 3)):
        path = options.build / "bin" / program
        tally = Tally(title, promise)
        report = target.folder() / "report.json"
        for _ in range(repeat):
            process = subprocess.run(
                [path, f"--gtest_filter={cases}", f"--gtest_output=json:{report}"],
                capture_output=True, timeout=3600, check=False)
            if process.returncode < 0:
                tally.add(program, "", Done(process.returncode, b"", b"").what())
                continue
            for suite in json.loads(report.read_text())["testsuites"]:
                for case in suite["testsuite"]:
                    wrong = "; ".join(f["failure"][:300] for f in case.get("failures", []))
                    tally.add(case["name"], "as promised", wrong,
                              times=int(case.get("faults", 1)))
        if tally.times == 0:
            tally.add(program, "", f"it has no tests {cases}")
        tallies.append(tally)
    return tallies


def attack(target, options):
    for family in (kills, limits, streams, owners, stopped_peer, fifos, determinism, command_lines):
        yield from family(target, options)
