"""Tables of support from the documents of `wyvern verify`, and of code from `wyvern precompile`'s."""

import json
import subprocess
import sys
import unittest
from pathlib import Path

from support import Case

TOOL = Path(__file__).parents[2] / "tools" / "support_table.py"


def case(pass_, options, checks, dtype="bf16", name="", **more):
    """One case as `wyvern verify --json` tells of it; checks are (quantity, error, bound)."""
    listed = [{"quantity": quantity, "error": error, "bound": bound,
               "ok": error is not None and error <= bound} for quantity, error, bound in checks]
    return {"case": name or f"{pass_} {options} {dtype}", "seed": 1, "options": list(options),
            "problem": {"pass": pass_, "dtype": dtype, "precision": "tf32"},
            "repeatable": True, "checks": listed, "ok": all(c["ok"] for c in listed), **more}


class SupportTable(Case):
    def table(self, *documents, expect=0):
        files = []
        for i, document in enumerate(documents):
            files.append(self.path(f"{i}.json"))
            Path(files[-1]).write_text(document if isinstance(document, str)
                                       else json.dumps(document), encoding="utf-8")
        done = subprocess.run([sys.executable, TOOL, *files], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done

    def rows(self, *documents):
        """{option: cells} of the one table."""
        lines = [line for line in self.table(*documents).stdout.splitlines() if line[:1] == "|"]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {row[0]: row[1:] for row in cells}

    @staticmethod
    def sweep(*cases, model="A", operator="kda"):
        return {"operator": operator, "model": model, "device": "cpu", "cases": list(cases)}

    def test_largest_error_and_part_of_a_bound(self):
        rows = self.rows(
            self.sweep(case("forward", ["GVA"], [("o", 3e-3, 5e-3), ("final_state", 1e-3, 5e-3)]),
                       case("backward", ["GVA"], [("dq", 2e-3, 8e-3), ("dg", 5e-3, 2e-2)])),
            self.sweep(case("forward", ["GVA"], [("o", 9e-6, 1e-5)], dtype="fp32")))
        self.assertEqual(rows["GVA"], ["3.0e-3 90%", "2.0e-3 25%", "5.0e-3 25%", "–"])
        self.assertEqual(rows["bf16"][0], "3.0e-3 60%")
        self.assertEqual(rows["fp32 tf32"], ["9.0e-6 90%", "–", "–", "–"])

    def test_a_column_group_per_device(self):
        rows = self.rows(self.sweep(case("recurrent", ["GVA"], [("state", 1e-3, 5e-3)])),
                         self.sweep(case("recurrent", ["GVA"], [("o", 1e-6, 5e-3)]), model="B"))
        self.assertEqual(rows["option"][0::4], ["A: forward", "B: forward"])
        self.assertEqual(rows["GVA"][3::4], ["1.0e-3 20%", "1.0e-6 <1%"])

    @staticmethod
    def code(target, *rows):
        names = ("operator", "pass", "kernels", "registers", "spill_bytes", "spilling")
        return {"target": target, "passes": [dict(zip(names, row)) for row in rows]}

    def test_code(self):
        """Rows that not every target has; what spills is named."""
        rows = self.rows(self.code("sm_80", ("kda", "forward", 3, 128, 0, [])),
                         self.code("sm_90a", ("kda", "forward", 2, 255, 8, ["kda_prepare.hopper"]),
                                   ("kda", "recurrent", 1, 40, 0, [])))
        self.assertEqual(rows["operator, pass"], ["sm_80", "sm_90a"])
        self.assertEqual(rows["kda, forward"], ["3: 128, 0 B", "**2: 255, 8 B**"])
        self.assertEqual(rows["kda, recurrent"], ["–", "1: 40, 0 B"])
        said = self.table(self.code("sm_90a", ("kda", "forward", 2, 255, 8, ["kda_prepare.hopper"])))
        self.assertIn("sm_90a, kda forward: kda_prepare.hopper\n", said.stdout)

    def test_documents_of_two_commands_are_refused(self):
        sweep = self.sweep(case("recurrent", ["GVA"], [("o", 1e-3, 5e-3)]))
        for documents in ((sweep, self.code("sm_80")), (self.code("sm_80"), sweep)):
            self.assertIn("1.json is of another command", self.table(*documents, expect=2).stderr)
        self.assertIn("KeyError", self.table({"passes": [{"pass": "forward"}]}, expect=2).stderr)

    def test_kinds_share_a_row_where_all_were_met(self):
        def of(*sizes, model):
            return self.sweep(*(case("forward", [f"chunk_size {size}"], [("o", 1e-3, 5e-3)])
                                for size in sizes), model=model)
        together = self.rows(of(16, 32, model="A"), of(32, 16, model="B"))
        self.assertIn("chunk_size 16, 32", together)
        apart = self.rows(of(16, 32, model="A"), of(16, model="B"))
        self.assertEqual(apart["chunk_size 32"][0::4], ["1.0e-3 20%", "–"])
        self.assertIn("chunk_size 16", apart)

    def test_unknown_options_have_rows(self):
        self.assertIn("newer", self.rows(self.sweep(case("forward", ["newer"], [("o", 0, 1)]))))

    def test_gates_of_keys_and_values(self):
        rows = self.rows(self.sweep(case("backward", ["scale", "erase and write in fp32"],
                                         [("derase", 5e-3, 2e-2), ("dwrite", 1e-2, 2e-2)])))
        self.assertEqual(rows["scale, erase and write in fp32"][2], "1.0e-2 50%")

    def test_failures_show(self):
        rows = self.rows(self.sweep(
            case("forward", ["GVA"], [("o", 1e-2, 5e-3)]),
            case("forward", ["scale"], [("o", None, 5e-3)]),
            case("forward", ["state_v_first"], [("o", 1e-3, 5e-3)], repeatable=False),
            case("forward", ["safe_gate"], [], message="no", ok=False)))
        self.assertEqual(rows["GVA"][0], "**1.0e-2 200%**")
        self.assertEqual(rows["scale"][0], "**not finite**")
        self.assertEqual(rows["state_v_first"][0], "**1.0e-3 20%, not repeatable**")
        self.assertEqual(rows["safe_gate"][0], "**cannot run**")
        self.assertIn("A: 1 cases, 1 failed.", self.table(self.sweep(
            case("forward", ["GVA"], [("o", 1, 0.1)]))).stdout)

    def test_what_is_no_document(self):
        for text in ("", "[]", "{}", '{"cases": [{}]}', json.dumps(self.sweep())[:-9]):
            with self.subTest(text):
                done = self.table(text, expect=2)
                self.assertEqual(len(done.stderr.splitlines()), 1)
                self.assertIn("0.json", done.stderr)

    def test_of_the_command(self):
        rows = self.rows(self.document("verify", "delta_rule", "--pass", "recurrent", "--dtype",
                                       "fp32", "--precision", "ieee", "--device", "cpu"))
        self.assertNotIn("**", "".join(sum(rows.values(), [])))
        for option in ("GVA", "fp32 ieee", "inplace_state, state_index int32, int64"):
            self.assertNotEqual(rows[option][3], "–")


if __name__ == "__main__":
    unittest.main()
