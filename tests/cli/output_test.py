"""Where the output goes: streams that are closed or full, files that are replaced, FIFOs, devices."""

import os
import resource
import stat
import subprocess
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import OP, WYVERN, Case, read_file

SMALL = ("--shape", "T=4,H=1,K=16")


class Streams(Case):
    """One command for each way in which it may end."""

    ENDS = ((("--help",), 0), (("--version",), 0), ((), 0), (("run", "--help"), 0),
            (("cache", "path"), 0), (("cache", "stats", "--json"), 0), (("stages",), 0),
            (("stages", "--json"), 0), (("devices",), 0), (("frobnicate",), 2),
            (("run", OP, "--colour"), 2), (("run", "softmax", "--json"), 2),
            (("run", OP, "--input", "/nowhere", "--output", "x"), 2),
            (("example", OP, *SMALL, "-o", "example"), 0))

    def ends(self, arguments, **streams):
        """The exit code; below 0 where a signal ended it."""
        environment = dict(os.environ, WYVERN_CACHE_DIR=str(self.cache))
        return subprocess.run([WYVERN, *arguments], env=environment, cwd=self.folder, timeout=300,
                              check=False, **streams)

    def test_a_stderr_that_takes_nothing(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            for arguments, code in self.ENDS:
                for spoiled in ({"stderr": full}, {"preexec_fn": lambda: os.close(2)}):
                    with self.subTest(arguments):
                        done = self.ends(arguments, stdout=subprocess.PIPE, **spoiled)
                        self.assertEqual(done.returncode, code)
                        self.assertTrue(done.stdout or code != 0)

    def test_a_stdout_that_takes_nothing(self):
        """What was to be printed is lost: exit code 2, and one sentence that says so."""
        with open("/dev/full", "w", encoding="utf-8") as full:
            for arguments, code in self.ENDS:
                for spoiled in ({"stdout": full}, {"preexec_fn": lambda: os.close(1)}):
                    with self.subTest(arguments):
                        done = self.ends(arguments, stderr=subprocess.PIPE, text=True, **spoiled)
                        self.assertEqual(done.returncode, 2)
                        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                        if code == 0:
                            self.assertIn("cannot write to standard output", done.stderr)

    def test_no_stream_at_all(self):
        def close_all():
            for number in (0, 1, 2):
                os.close(number)
        for arguments, _ in self.ENDS:
            with self.subTest(arguments):
                self.assertEqual(self.ends(arguments, preexec_fn=close_all).returncode, 2)

    def test_nothing_printed_goes_into_a_file(self):
        """The output file is not given the number of a stream that is closed."""
        self.wyvern("example", OP, *SMALL, "-o", self.path("good"))
        for closed in ((1,), (2,), (0, 1, 2)):
            self.ends(("example", OP, *SMALL, "-o", self.path("out")),
                      preexec_fn=lambda numbers=closed: [os.close(number) for number in numbers])
            self.assertEqual(Path(self.path("out")).read_bytes(),
                             Path(self.path("good")).read_bytes())
            os.remove(self.path("out"))


class Files(Case):
    def example(self, path, *options, **more):
        environment = dict(os.environ, WYVERN_CACHE_DIR=str(self.cache))
        return subprocess.run([WYVERN, "example", OP, *SMALL, *options, "-o", path], env=environment,
                              cwd=self.folder, capture_output=True, text=True, timeout=300,
                              check=False, **more)

    def check_only(self, *names):
        self.assertEqual(sorted(os.listdir(self.folder)), sorted(names))

    def test_a_full_disk_leaves_the_old_file(self):
        """A limit on the size of files stands for the disk: a write fails in the middle."""
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for old in (None, b"what was there before"):
            if old is not None:
                Path(self.path("out")).write_bytes(old)
            done = self.example(self.path("out"), preexec_fn=limit)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("out': File too large", done.stderr)
            self.assertEqual(len(done.stderr.splitlines()), 1)
            if old is not None:
                self.assertEqual(Path(self.path("out")).read_bytes(), old)
            self.check_only(*(["out"] if old is not None else []))
            compiled = subprocess.run([WYVERN, "compile", "fwd_h", "--arch", "sm_80", "--emit",
                                       "source", "-o", self.path("out")], preexec_fn=limit,
                                      env=dict(os.environ, WYVERN_CACHE_DIR=str(self.cache)),
                                      capture_output=True, text=True, timeout=300, check=False)
            self.assertEqual(compiled.returncode, 2, compiled.stderr)
            if old is not None:
                self.assertEqual(Path(self.path("out")).read_bytes(), old)
            self.check_only(*(["out"] if old is not None else []))

    def test_a_file_is_replaced_as_a_whole(self):
        """Who has the old one open goes on reading it; its permissions stay."""
        Path(self.path("out")).write_bytes(b"old")
        os.chmod(self.path("out"), 0o640)
        with open(self.path("out"), "rb") as old:
            self.assertEqual(self.example(self.path("out")).returncode, 0)
            self.assertEqual(old.read(), b"old")
        self.assertIn("q", read_file(self.path("out")))
        self.assertEqual(stat.S_IMODE(os.stat(self.path("out")).st_mode), 0o640)
        self.check_only("out")

    def test_a_new_file_has_the_permissions_of_one(self):
        self.example(self.path("out"), preexec_fn=lambda: os.umask(0o027))
        self.assertEqual(stat.S_IMODE(os.stat(self.path("out")).st_mode), 0o640)

    def test_a_link_is_followed(self):
        os.mkdir(self.path("there"))
        os.symlink("there/file", self.path("link"))
        for _ in range(2):  # first to no file yet
            self.assertEqual(self.example(self.path("link")).returncode, 0)
            self.assertTrue(os.path.islink(self.path("link")))
            self.assertIn("q", read_file(self.path("there/file")))
        self.assertEqual(os.listdir(self.path("there")), ["file"])

    def test_what_cannot_be_replaced(self):
        os.mkdir(self.path("folder"))
        for path in (self.path("folder"), self.path("no/such/folder"), self.path("x" * 300),
                     self.path("out") + "/"):
            self.refuses("example", OP, *SMALL, "-o", path, names=[path])
        self.check_only("folder")

    def test_a_fifo_that_nobody_reads(self):
        os.mkfifo(self.path("fifo"))
        self.refuses("example", OP, *SMALL, "-o", self.path("fifo"),
                     names=[self.path("fifo"), "nothing reads from it"])

    def test_a_fifo_that_is_read(self):
        os.mkfifo(self.path("fifo"))
        self.example(self.path("file"))
        reader = os.open(self.path("fifo"), os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        with ThreadPoolExecutor() as threads, open(reader, "rb") as fifo:
            done = threads.submit(self.example, self.path("fifo"))
            # A read before the writer is there is at the end at once.
            content = b""
            while not done.done():
                content += fifo.read()
                time.sleep(0.01)
            content += fifo.read()
        self.assertEqual(done.result().returncode, 0, done.result().stderr)
        self.assertEqual(content, Path(self.path("file")).read_bytes())

    def test_devices(self):
        self.assertEqual(self.example("/dev/null").returncode, 0)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        done = self.example("/dev/full")
        self.assertEqual(done.returncode, 2)
        self.assertIn("'/dev/full': No space left", done.stderr)

    def test_stdout(self):
        """The file, then the report; nothing is written over what stood in stdout before."""
        source = ("compile", "fwd_h", "--arch", "sm_80", "--emit", "source")
        self.wyvern(*source, "-o", self.path("source"))
        wanted = Path(self.path("source")).read_text(encoding="utf-8")
        piped = self.wyvern(*source, "-o", "/dev/stdout").stdout
        self.assertTrue(piped.startswith(wanted))
        self.assertIn("wrote /dev/stdout", piped[len(wanted):])
        with open(self.path("both"), "w+", encoding="utf-8") as both:
            both.write("before\n")
            both.flush()
            subprocess.run([WYVERN, *source, "-o", "/dev/stdout"], stdout=both, timeout=300,
                           check=True, env=dict(os.environ, WYVERN_CACHE_DIR=str(self.cache)))
            both.seek(0)
            text = both.read()
        self.assertTrue(text.startswith("before\n" + wanted))
        self.assertIn("wrote /dev/stdout", text[len(wanted):])


if __name__ == "__main__":
    unittest.main()
