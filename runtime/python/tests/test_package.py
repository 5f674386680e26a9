"""The package without PyTorch: unittest alone, by any Python."""

import json
import os
import subprocess
import sys
import textwrap
import unittest

BLOCKED = """
import sys
sys.modules["torch"] = None  # importing it fails
"""


def python(code, **variables):
    environment = os.environ | variables
    done = subprocess.run([sys.executable, "-c", BLOCKED + textwrap.dedent(code)], env=environment,
                          capture_output=True, text=True, check=False)
    return done


class Package(unittest.TestCase):
    def test_import_takes_less_than_50_ms(self):
        code = ("import time; start = time.perf_counter(); import wyvern; "
                "print(time.perf_counter() - start)")
        best = min(float(python(code).stdout) for _ in range(5))
        self.assertLess(best, 0.05)

    def test_what_needs_no_torch(self):
        done = python("""
            import wyvern
            assert wyvern.__version__.count(".") == 2, wyvern.__version__
            assert wyvern.prepared() == []
            for name in ("off", "fixed", "on-miss", "background"):
                wyvern.policy(name, budget=5)
            wyvern.cache.path()
            assert "ops" in dir(wyvern)
        """)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_operators_say_that_torch_is_missing(self):
        for code in ("import wyvern; wyvern.ops", "import wyvern.ops", "import wyvern.fla", "import wyvern.stages",
                     "import wyvern.transformers", "import wyvern.megatron", "import wyvern.vllm", "import wyvern.sglang",
                     "import wyvern; wyvern.tune"):
            done = python(code)
            self.assertIn("ImportError: wyvern's operators need PyTorch 2.10 or later", done.stderr)
            self.assertIn("pip install 'torch>=2.10'", done.stderr)

    def test_a_policy_that_is_none(self):
        done = python("from wyvern._policy import apply_environment; apply_environment()",
                      WYVERN_POLICY="sometimes")
        self.assertIn("WYVERN_POLICY is 'sometimes'; it must be one of background, cached, fixed, off, on-miss",
                      done.stderr)

    def test_command(self):
        code = "import sys; sys.argv[1:] = ['devices', '--json']; from wyvern._command import main; main()"
        document = json.loads(python(code).stdout)
        self.assertEqual(document["devices"][0]["name"], "cpu")

    def test_nvrtc_of_the_wheels_is_offered_to_the_command(self):
        done = python("""
            import os, tempfile, sys
            root = tempfile.mkdtemp()
            for folder in ("cu13/lib", "cuda_nvrtc/lib"):
                os.makedirs(f"{root}/nvidia/{folder}")
                open(f"{root}/nvidia/{folder}/libnvrtc.so.13", "w").close()
            sys.path.insert(0, root)
            os.environ["LD_LIBRARY_PATH"] = "/own"
            from wyvern._command import environment
            print(environment()["LD_LIBRARY_PATH"])
        """)
        folders = done.stdout.strip().split(":")
        self.assertEqual(folders[0], "/own", done.stderr)
        self.assertEqual([folder.split("nvidia/")[1] for folder in folders[1:]],
                         ["cu13/lib", "cuda_nvrtc/lib"])


if __name__ == "__main__":
    unittest.main()
