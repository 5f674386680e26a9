"""What lies on the disk is not what it should be: flipped bits, cuts, wrong winners, broken inputs."""

import json
import random
import shutil
import sqlite3
import struct

from target import Tally, in_parallel, last_line, spread


def run_on(target, tally, label, spoil, promise_rows=False):
    """Spoils a warm cache, runs twice: right output both times, the second time in silence."""
    folder = target.folder()
    cache = target.cache(folder)
    spoil(cache / "wyvern.db")
    output = folder / "out"
    done = target.start(*target.run_arguments(output), cache=cache)
    wrong = target.wrong_with(done, output, codes=(0,))
    outcome = "right output, repaired" if done.err else "right output"
    if not wrong and promise_rows:
        wrong = target.wrong_with_cache(cache, [])
    if not wrong:
        wrong = target.still_works(cache)
    tally.add(label, outcome, wrong and f"{wrong} [{last_line(done.err)}]")
    shutil.rmtree(folder, ignore_errors=True)


def page_kinds(raw):
    """{kind of page: [page numbers]} by SQLite's file format: 2, 10: index; 5, 13: table; else: rest."""
    size = struct.unpack(">H", raw[16:18])[0]
    pages = {}
    for number in range(len(raw) // size):
        kind = raw[number * size + (100 if number == 0 else 0)]
        pages.setdefault(kind if kind in (2, 5, 10, 13) else 0, []).append(number)
    return size, pages


def flipped_bits(target, options):
    raw = (target.warm / "wyvern.db").read_bytes()
    size, pages = page_kinds(raw)
    tallies = []
    for title, kinds in (("bit of a key index flipped", (2, 10)), ("other bit flipped", (5, 13, 0))):
        tally = Tally(title, "right output, by a miss that repairs itself if need be")
        bits = [bit for kind in kinds for page in pages.get(kind, [])
                for bit in range(page * size * 8, (page + 1) * size * 8)
                if raw[bit // 8] or options.full]  # empty space is the rest of most pages

        def flip(bit):
            def spoil(path):
                bytes_ = bytearray(raw)
                bytes_[bit // 8] ^= 1 << bit % 8
                path.write_bytes(bytes_)
            run_on(target, tally, f"bit {bit}", spoil)
        chosen = random.Random(0).sample(bits, min(options.bits, len(bits)))
        in_parallel(options.jobs, flip, chosen)
        tallies.append(tally)
    return tallies


def cuts(target, options):
    raw = (target.warm / "wyvern.db").read_bytes()
    tally = Tally("database cut short", "right output; what can be read is kept")

    def cut(length):
        run_on(target, tally, f"cut to {length}", lambda path: path.write_bytes(raw[:length]), True)
    in_parallel(options.jobs, cut, spread(len(raw) - 1, options.cuts))
    return [tally]


WRONG = [-1, 0, 1, 3, 7, 48, 1 << 31, -(1 << 31), 1 << 62, 10 ** 30, 1.5, "64", None, True, [], {}]


def wrong_winners(target, options):
    tally = Tally("wrong winner", "never run; right output by another plan")
    # A winner of this problem, as a tuning stores it.
    folder = target.folder()
    cache = target.cache(folder)
    done = target.start("tune", "delta_rule", "--shape", "B=1,T=17,H=1,K=16", "--dtype", "fp32",
                        "--device", "cpu", "--budget", "0.3s", cache=cache)
    assert done.code == 0, done
    database = sqlite3.connect(cache / "wyvern.db")
    row = database.execute("SELECT device, family, tokens, sequences, plan FROM winners").fetchone()
    columns = [c[1] for c in database.execute("PRAGMA table_info(winners)")]
    whole = database.execute("SELECT * FROM winners").fetchone()
    database.close()
    plan = json.loads(row[4])
    chance = random.Random(1)
    plans = []
    for step in range(len(plan)):
        for tunable in plan[step]["config"] if isinstance(plan[step]["config"], dict) else []:
            for value in WRONG:
                changed = json.loads(row[4])
                changed[step]["config"][tunable] = value
                plans.append(json.dumps(changed))
        config = plan[step]["config"]
        if isinstance(config, str):
            for part in config.split(","):
                name = part.split("=")[0]
                for value in (*WRONG[:10], "", "x"):
                    changed = json.loads(row[4])
                    changed[step]["config"] = config.replace(part, f"{name}={value}")
                    plans.append(json.dumps(changed))
        for name in ("fwd_o.cpu", "solve_tril.cpu", "fwd_h.portable", "", "x" * 500):
            changed = json.loads(row[4])
            changed[step]["template"] = name
            plans.append(json.dumps(changed))
        plans.append(json.dumps(plan[:step] + plan[step + 1:]))
        plans.append(json.dumps(plan[:step] + [plan[step]] + plan[step:]))
    plans += [json.dumps(plan[::-1]), "[]", "{}", "null", "1", '"x"', "[[]]", "[{}]", "[null]"]
    text = row[4]
    while len(plans) < options.winners:  # bytes changed; it must still be JSON for the table
        at = chance.randrange(len(text))
        changed = text[:at] + chance.choice("0123456789-,:[]{}\"eE. ") + text[at + 1:]
        try:
            json.loads(changed)
            plans.append(changed)
        except ValueError:
            pass
    whole = list(whole)

    def put(text):
        def spoil(path):
            whole_here = list(whole)
            whole_here[columns.index("plan")] = text
            other = sqlite3.connect(path)
            other.execute(f"INSERT INTO winners VALUES ({','.join('?' * len(whole))})", whole_here)
            other.commit()
            other.close()
        run_on(target, tally, f"plan {text[:120]}", spoil)
    chosen = plans if len(plans) <= options.winners else chance.sample(plans, options.winners)
    in_parallel(options.jobs, put, chosen)
    return [tally]


def mutated(raw, chance):
    """A broken safetensors file: its header's length, its text, its numbers, its end."""
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = raw[8:8 + length], raw[8 + length:]
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice([0, 1, length - 1, length + 1, 1 << 31, 1 << 63, (1 << 64) - 1]
                             ).to_bytes(8, "little") + header + data
    if kind == 1:
        return raw[:chance.randrange(len(raw))]
    if kind in (2, 3):
        text = bytearray(header)
        for _ in range(chance.randint(1, 4)):
            text[chance.randrange(len(text))] = chance.choice(b"0123456789-[]{},:\"\\FBIe. \x00\xff")
        return struct.pack("<Q", len(text)) + bytes(text) + data
    tensors = json.loads(header)
    name = chance.choice([n for n in tensors if n != "__metadata__"])
    entry = tensors[name]
    if kind == 4:
        entry["shape"][chance.randrange(len(entry["shape"]))] = chance.choice(
            [-1, 0, 2, 1 << 31, 1 << 62, 1.5, None, "1"])
    elif chance.random() < 0.5:
        entry["data_offsets"][chance.randrange(2)] = chance.choice(
            [-1, 0, 1, 1 << 40, (1 << 64) - 1, None])
    else:
        entry["dtype"] = chance.choice(["F64", "BF16", "F32", "I64", "U8", "", 3, None])
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data


def broken_inputs(target, options):
    tally = Tally("safetensors file changed", "one sentence, or the output of a sound file; no output lost")
    raw = target.input.read_bytes()

    def one(seed):
        folder = target.folder()
        (folder / "in").write_bytes(mutated(raw, random.Random(seed)))
        output = folder / "out"
        output.write_bytes(b"old")
        done = target.start("run", "delta_rule", "--device", "cpu", "--input", folder / "in",
                            "--output", output, "--verify", cache=target.cache(folder))
        # What still is a sound file may say another problem: the oracle of the command judges it.
        wrong = target.wrong_with(done, codes=(0, 2, 3))
        if not wrong and done.code != 0 and output.read_bytes() != b"old":
            wrong = "what stood in the output is lost"
        tally.add(f"seed {seed}", "one sentence" if done.code else "verified", wrong)
        shutil.rmtree(folder, ignore_errors=True)
    in_parallel(options.jobs, one, range(options.inputs))
    return [tally]


def attack(target, options):
    for family in (flipped_bits, cuts, wrong_winners, broken_inputs):
        yield from family(target, options)
