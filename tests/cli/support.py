"""Starting the wyvern command from a test, and making safetensors files, sound and broken ones."""

import functools
import json
import os
import re
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path

try:
    import jsonschema  # Debian's package python3-jsonschema
except ImportError:
    jsonschema = None

WYVERN = os.environ["WYVERN"]
OP = "gated_delta_rule"
FULL = "WYVERN_TESTS_FULL" in os.environ  # tools/test --full: all of every sweep
SCHEMAS = json.loads((Path(__file__).parents[2] / "tools/schemas.json").read_text())


def unextended(schema):
    """The schema without members that it does not name: others may meet those of a later Wyvern,
    but this one's are all described."""
    if isinstance(schema, list):
        return [unextended(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: unextended(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "anyOf" not in schema:
        strict.setdefault("additionalProperties", False)
    return strict


STRICT = unextended(SCHEMAS["$defs"])


@functools.cache
def validator(name):
    """Of one schema, made once: the schema is checked too, which takes longer than any document."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": STRICT}
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


def check_schema(name, document):
    """Compares with the schema of that name, or of a failure, where jsonschema is installed."""
    if jsonschema is None:
        return
    for verb, member, other in (("bench", "builds", "bench-of-builds"),
                                ("tune", "replays", "tune-replay"),
                                ("tune", "tunings", "tune-manifest")):
        if name == verb and member in document:
            name = other
    failed = isinstance(document.get("error"), dict)
    validator("error" if failed else name).validate(document)


class Case(unittest.TestCase):
    """A test with a scratch folder and a cache of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.cache = self.folder / "cache"

    def use_compiled_kernels(self):
        """For a test of what kernels compute: the build's cache of what its tests have compiled, in
        which nothing is ever tuned."""
        self.cache = Path(os.environ.get("WYVERN_TEST_CACHE", self.cache))

    def path(self, name):
        return str(self.folder / name)

    def wyvern(self, *arguments, expect=0):
        """Runs the command and checks its exit code."""
        environment = dict(os.environ, WYVERN_CACHE_DIR=str(self.cache))
        done = subprocess.run([WYVERN, *map(str, arguments)], env=environment, cwd=self.folder,
                              capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, expect,
                         f"wyvern {arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def document(self, *arguments, expect=0):
        """The one JSON document that --json must leave on stdout, as tools/schemas.json has it."""
        verb, rest = arguments[:1], arguments[1:]
        document = json.loads(self.wyvern(*verb, "--json", *rest, expect=expect).stdout)
        check_schema("-".join(arguments[:2 if verb == ("cache",) else 1]), document)
        return document

    def refuses(self, *arguments, names, code=2):
        """One sentence on stderr with each of `names`, the same in JSON, and the exit code."""
        done = self.wyvern(*arguments, expect=code)
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertTrue(done.stderr.rstrip("\n").isprintable(), ascii(done.stderr))
        self.assertLess(len(done.stderr), 3000)
        error = self.document(*arguments, expect=code)["error"]
        self.assertEqual(error["exit_code"], code)
        # Two calls: what is free may have changed between them.
        plain, json_message = (re.sub(r"\d+ MB are free", "", text)
                               for text in (done.stderr.strip(), "wyvern: " + error["message"]))
        self.assertEqual(plain, json_message)
        for name in names:
            self.assertIn(name, error["message"])

    def example(self, *arguments):
        """Writes in.safetensors and returns its path."""
        self.wyvern("example", OP, *arguments, "-o", self.path("in.safetensors"))
        return self.path("in.safetensors")


def read_file(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + length])
    data = raw[8 + length:]
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def pack(header, data=b""):
    """A file from a header (object or text) and the bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_file(path, tensors):
    """Writes {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    Path(path).write_bytes(pack(header, data))
