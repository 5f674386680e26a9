#!/usr/bin/env python3
"""Makes the corpora and dictionaries of the fuzz targets from what the command itself writes.

usage: make_corpus.py WYVERN

WYVERN is a build's wyvern, on a machine with nothing but its CPU: what it tunes there goes into the
seeds of database. Seeds are overwritten and none is removed: inputs that a target has failed on,
found-*, stay, and so do those of the archives, which learn.py writes.
"""

import hashlib
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPERATORS = {"delta_rule": [], "gated_delta_rule": ["--g-dtype", "bf16"],
             "kda": ["--use-gate-in-kernel", "--lower-bound=-5"], "gdn2": [],
             "gated_delta_product": ["--num-householder", "2"]}
PAGE = 512  # small, so that a seed has many of them


class Maker:
    def __init__(self, wyvern, folder):
        self.wyvern = wyvern
        self.folder = Path(folder)
        self.environment = {**os.environ, "WYVERN_CACHE_DIR": str(self.folder / "cache")}

    def run(self, *arguments, check=True):
        done = subprocess.run([self.wyvern, *arguments], env=self.environment, check=check,
                              capture_output=True, text=True)
        return done.stdout

    def json(self, *arguments):
        return json.loads(self.run(*arguments, "--json"))


def put(target, name, content):
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def dictionary(target, words):
    """Words as libFuzzer's dictionary, each quoted and escaped."""
    def quoted(word):
        return "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}"
                       for b in word.encode())
    (HERE / f"{target}.dict").write_text("".join(f'"{quoted(word)}"\n' for word in sorted(set(words))))


def safetensors(maker):
    words = {"__metadata__", '"dtype":"', '"shape":[', '"data_offsets":[', "F32", "F16", "BF16",
             "I32", "I64"}
    for op, options in OPERATORS.items():
        for name, more in {"forward": [], "backward": ["--pass", "backward"],
                           "recurrent": ["--pass", "recurrent", "--state-index", "2"],
                           "packed": ["--seqlens", "1,0,2"]}.items():
            shape = "H=1,HV=1,K=16,V=16" if name == "packed" else "B=1,T=2,H=1,HV=1,K=16,V=16"
            file = maker.folder / "x.safetensors"
            maker.run("example", op, "--shape", shape, *more, *options, "-o", str(file))
            put("safetensors", f"{op}-{name}", file.read_bytes())
            header = file.read_bytes()[8:]
            words |= set(re.findall(r'"(\w+)":\{', header.split(b"}}")[0].decode()))

    def bare(text, data=b""):
        return struct.pack("<Q", len(text)) + text.encode() + data
    put("safetensors", "none", bare("{}"))
    put("safetensors", "metadata", bare('{"__metadata__":{"format":"pt"}}'))
    for name, shape in {"empty": [0], "scalar": [], "huge": [1 << 40, 1 << 40, 0],
                        "huge-empty": [0, 1 << 62, 1 << 62]}.items():
        size = 4 if name == "scalar" else 0
        entry = {"q": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
        put("safetensors", name, bare(json.dumps(entry), b"\0" * size))
    huge = {"q": {"dtype": "F32", "shape": [1 << 40, 1 << 40, 1, 0], "data_offsets": [0, 0]}}
    huge["k"] = huge["v"] = huge["q"]
    put("safetensors", "huge-inputs", bare(json.dumps(huge)))
    dictionary("safetensors", words)


def spelled(config):
    """A config as documents show it, as text."""
    return ",".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}"
                    for name, value in sorted(config.items()))


def plans(maker):
    """Default plans, and the problems that they are of."""
    found = []
    for op, name in (("gated_delta_rule", "forward"), ("gated_delta_rule", "recurrent"),
                     ("kda", "forward"), ("delta_rule", "backward")):
        given, made = (str(maker.folder / file) for file in ("given", "made"))
        maker.run("example", op, "--pass", name, "--shape", "B=1,T=2,H=1,HV=1,K=16,V=16", "-o", given)
        done = maker.json("run", op, "--pass", name, "--input", given, "--output", made)
        plan = [{"template": step["template"], "config": spelled(step["config"])}
                for step in done["plan"]]
        put("plan", f"{op}-{name}", compact(plan))
        found.append(plan)
    put("plan", "empty", "[]")
    put("plan", "unknown", '[{"template":"softmax.cpu","config":""}]')
    put("plan", "illegal", '[{"template":"fwd_h.cpu","config":"BT=0,BV=-1"}]')
    return found


def compact(document):
    return json.dumps(document, separators=(",", ":"))


def configs(maker):
    words = {"true", "false", "fp32", "fp16", "bf16", "int32", "int64", "tf32", "tf32x3", "ieee",
             "native-cpu", "sm_90a", "sm_80", "9223372036854775807", "-9223372036854775808"}
    for stage in maker.json("stages")["stages"]:
        for template in stage["templates"]:
            words.add(template["id"])
            words |= {name + "=" for name in template["tunables"]}
            config = spelled({name: values[0] for name, values in template["tunables"].items()})
            put("config", template["id"], f"{template['id']}\n{config}")
    for name, config in {"target": "sm_90a\nBT=64", "host": "native-cpu\n", "nothing": "",
                         "zero": "fwd_h.cpu\nBT=0,BV=0", "least": "fwd_h.cpu\nBT=-9223372036854775808",
                         "beyond": "fwd_h.cpu\nBT=9223372036854775808", "twice": "x\nBT=1,BT=2"}.items():
        put("config", name, config)
    dictionary("config", words | {",", "="})
    dictionary("plan", words | {'{"template":"', '","config":"', '"},'})


def protocol(maker, plans_found):
    shown = maker.json("example", "gated_delta_rule", "--shape", "B=1,T=2,H=1,HV=1,K=16,V=16", "-o",
                       str(maker.folder / "given"))["problem"]
    # As the tuner sends it: names of fields, and nothing that is unset.
    problem = {name: value for name, value in shown.items() if value is not None and name != "key"}
    problem |= {"op": problem.pop("operator"), "state_slots": 0}
    opening = {"open": {"device": "cpu", "problem": problem, "cache": "/nowhere", "seed": 1}}
    measure = {"measure": {"plan": plans_found[0], "step": 0, "bar_us": 12.5}}
    compare = {"compare": {"plans": plans_found[:2], "seconds": 4.0}}
    put("protocol", "requests", "".join(compact(each) + "\n" for each in (opening, measure, compare)))
    answer = {"status": "ok", "detail": "", "samples_us": [1.5, 2, 1e300], "error": 0.001, "compiled": 0}
    put("protocol", "answers", "".join(compact(each) + "\n" for each in (
        {"ready": True}, answer, {**answer, "status": "wrong", "error": None, "samples_us": []},
        {"at": 0}, {"plans": [answer, answer], "compiled": 1},
        {"error": "no such device", "kind": "unavailable"})))
    for name, line in {"no-json": "{", "list": "[]", "open-number": '{"open":5}',
                       "open-list": '{"open":[{}]}', "unknown": '{"close":{}}'}.items():
        put("protocol", name, line + "\n")
    keys = {f'"{key}":' for key in problem}
    dictionary("protocol", keys | {'{"open":', '{"measure":', '{"compare":', '"plan":', '"plans":',
                                   '"step":', '"bar_us":', '"seconds":', '"device":', '"status":',
                                   '"ok"', '"samples_us":', '"error":', '"detail":', "null"})


def command(maker):
    words = {"fp32", "bf16", "none", "ieee", "tf32", "tf32x3", "forward", "backward", "recurrent",
             "true", "false", "T=", "H=", "HV=", "K=", "V=", "B=", "--json", "--help", *OPERATORS}
    verbs = re.findall(r"^  ([a-z]+) ", maker.run().split("Subcommands:")[1], re.MULTILINE)
    for verb in verbs:
        text = maker.run(verb, "--help")
        words |= {verb, *re.findall(r"(--?[A-Za-z][-A-Za-z0-9]*)", text)}
        put("command", f"{verb}-help", f"{verb}\n--help")
    shape = ["--shape", "B=1,T=2048,H=4,HV=8,K=128,V=128"]
    lines = {"nothing": [], "version": ["--version"], "verb": ["paint"],
             "run": ["run", "kda", "--input", "a", "--output", "b", "--device", "cpu", "--verify"],
             "tune": ["tune", "gated_delta_rule", *shape, "--budget", "2m", "--json"],
             "preset": ["bench", "kda", "--preset", "kimi-linear-48b", "--tokens", "4096"],
             "packed": ["tune", "gated_delta_rule", "--shape", "H=4,K=64", "--seqlens", "5,0,77"],
             "compile": ["compile", "fwd_h", "--arch", "sm_90a", "--config", "BT=64", "--emit",
                         "source", "-o", "x"],
             "cache": ["cache", "show", "w12"], "verify": ["verify", "kda", "--count=5", "--seed=1"],
             "gate": ["tune", "kda", *shape, "--use-gate-in-kernel", "--lower-bound=-5", "--safe-gate"],
             "floor": ["tune", "delta_rule", *shape, "--dtype", "fp32", "--precision", "ieee"],
             "steps": ["tune", "gated_delta_product", *shape, "--num-householder", "2", "--no-g"],
             "decode": ["tune", "gdn2", *shape, "--pass", "recurrent", "--inplace-state",
                        "--state-index", "9"],
             "kept": ["tune", "gated_delta_rule", *shape, "--chunk-size", "64", "--scale", "0.5",
                      "--disable-recompute", "--state-v-first", "--use-beta-sigmoid",
                      "--allow-neg-eigval", "--use-qk-l2norm=true"],
             "maybe": ["run", "kda", "--use-qk-l2norm=maybe"], "no-value": ["run", "--input", "--output"]}
    for name, line in lines.items():
        put("command", name, "\n".join(line))
    dictionary("command", words | {"\n"})


def row_key(fields, code):
    return hashlib.sha256("\n".join(fields).encode() + b"\n" + code).hexdigest()


def row_digest(key, fields, code):
    """As the cache has it: each field with its size, the code by its own digest."""
    texts = [key, *fields, hashlib.sha256(code).hexdigest()]
    return hashlib.sha256("".join(f"{len(t.encode())}:{t}\n" for t in texts).encode()).hexdigest()


def shrink(database):
    """A few rows of each table; code cut short, and each artifact's key a digest of its row, as the
    target expects."""
    for table, most in (("artifacts", 3), ("measurements", 4), ("winners", 2)):
        database.execute(f"DELETE FROM {table} WHERE id NOT IN (SELECT id FROM {table} LIMIT {most})")
    rows = database.execute("SELECT id, template_id, target, config, metadata, code FROM artifacts")
    for number, *fields, code in rows.fetchall():
        code = code[:300 * number]
        key = row_key(fields, code)
        database.execute("UPDATE artifacts SET key = ?, digest = ?, code = ? WHERE id = ?",
                         (key, row_digest(key, fields, code), code, number))


def databases(maker):
    for op, name in (("gated_delta_rule", "recurrent"), ("delta_rule", "recurrent")):
        maker.run("tune", op, "--pass", name, "--shape", "B=1,T=1,H=1,K=16", "--budget", "5s",
                  "--device", "cpu")
    file = maker.folder / "seed.db"

    def variant(name, *statements, page=PAGE, damage=lambda content: content):
        file.write_bytes((maker.folder / "cache" / "wyvern.db").read_bytes())
        database = sqlite3.connect(file, isolation_level=None)
        shrink(database)
        for statement in (*statements, f"PRAGMA page_size = {page}", "VACUUM"):
            database.execute(statement)
        database.close()
        put("database", name, damage(file.read_bytes()))

    variant("current")
    variant("large-pages", "DELETE FROM measurements", "DELETE FROM winners", page=4096)
    variant("newer", "PRAGMA user_version = 4", "DELETE FROM artifacts", "DELETE FROM measurements")
    variant("foreign", "PRAGMA application_id = 1", "DELETE FROM artifacts",
            "DELETE FROM measurements")
    variant("older", "ALTER TABLE artifacts RENAME COLUMN digest TO sha256",
            "DELETE FROM measurements", "PRAGMA user_version = 2")
    variant("cut", damage=lambda content: content[:len(content) // 2])
    variant("other-table", "CREATE TABLE notes (text TEXT)", "DELETE FROM measurements")
    variant("no-index", "PRAGMA writable_schema = ON", "DELETE FROM measurements",
            "DELETE FROM sqlite_schema WHERE name = 'winners_by_rank'")
    put("database", "empty", b"")
    put("database", "text", b"This is not a database.\n")
    put("database", "journal", interrupted(file))
    dictionary("database", ["SQLite format 3\0", "artifacts", "measurements", "winners", "WYVN"])


def interrupted(file):
    """A database in the middle of a transaction, with its journal behind it."""
    file.write_bytes((HERE / "corpus" / "database" / "current").read_bytes())
    database = sqlite3.connect(file, isolation_level=None)
    for statement in ("PRAGMA cache_size = 1", "PRAGMA cache_spill = 1", "BEGIN IMMEDIATE",
                      "DELETE FROM measurements", "UPDATE artifacts SET code = zeroblob(2000)",
                      "UPDATE winners SET plan = '[]'"):
        database.execute(statement)
    content = file.read_bytes() + Path(f"{file}-journal").read_bytes()
    database.close()
    return content


def main():
    wyvern = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        maker = Maker(wyvern, folder)
        safetensors(maker)
        configs(maker)
        command(maker)
        databases(maker)
        found = plans(maker)
        database = sqlite3.connect(maker.folder / "cache" / "wyvern.db")
        for number, (plan,) in enumerate(database.execute("SELECT plan FROM winners")):
            put("plan", f"winner-{number}", plan)
        database.close()
        protocol(maker, found)


if __name__ == "__main__":
    main()
