#!/usr/bin/env python3
"""Turns what `wyvern verify OP --json` printed into tables of support in Markdown, and what `wyvern
precompile --json` printed into one of code.

    tools/support_table.py DOCUMENT.json...

Any number of documents: of several operators, devices, dtypes and seeds. One table per operator, a
row per option, columns per device. A cell has the largest error of all cases that use the option
and, in percent, the largest part of its bound that an error takes. Options of one kind share a row
where each of them was met. The table of code has a row per operator and pass, a column per target:
how many kernels, the most registers of one, the most bytes that one spills (stores and loads). Exit
code 2, and one line, for a file that is no such document, or is of another command than the others.
"""
import json
import sys

# What shares a bound (runtime/SPECIFICATION.md, section 5), by pass.
COLUMNS = (
    ("forward", ("forward", {"o", "o_raw", "o_scale", "final_state", "intermediate_states", "summary"})),
    ("backward: q k v", ("backward", {"dq", "dk", "dv", "dinitial_state", "dsummary", "dinitial_conv_state"})),
    ("backward: gates", ("backward", {"dbeta", "derase", "dwrite", "dg", "dA_log", "ddt_bias",
                                      "dnorm_weight", "dnorm_gate", "dconv_weight", "dconv_bias"})),
    ("recurrent", ("recurrent", {"o", "final_state", "state"})),
)

# Options that share a row where all of them were met, in the order of the rows.
KINDS = (
    ("bf16", "fp16"),
    ("fp32 ieee", "fp32 tf32x3"),
    ("fp32 tf32",),
    ("GVA",),
    ("K or V no power of two", "K = 256, V = 512"),
    ("scale", "beta in fp32", "erase and write in fp32", "g in 16 bits"),
    ("cu_seqlens int32", "cu_seqlens int64"),
    ("initial_state fp32", "initial_state bf16", "output_final_state"),
    ("state_v_first",),
    ("batch_invariant",),
    ("use_qk_l2norm",),
    ("use_beta_sigmoid", "allow_neg_eigval"),
    ("use_gate_in_kernel", "no dt_bias"),
    ("lower_bound", "no A_log"),
    ("safe_gate",),
    ("no decay", "strong gates"),
    ("chunk_size 16", "chunk_size 32", "chunk_size 64"),
    ("chunk_size 128",),
    ("disable_recompute",),
    ("return_intermediate_states",),
    ("inplace_state", "state_index int32", "state_index int64"),
    ("output_state_index", "null_slot_zero", "has_initial_state"),
    ("checkpoint_every", "checkpoint_offsets", "fp32_checkpoints"),
    ("index_columns", "intermediate_rows", "parent", "disable_state_update"),
    ("output_norm silu", "output_norm sigmoid", "keep_output"),
    ("output_dtype float8_e4m3", "output_scale_tokens_last"),
    ("short_conv 2", "short_conv 3", "short_conv 4", "conv_activation none"),
    ("conv_bias", "conv_weight as q", "initial_conv_state", "output_conv_state"),
    ("inplace_conv_state", "conv_columns", "conv_tokens_first"),
    ("summary", "transition", "segment_chunks"),
)


class BadDocument(Exception):
    """A file that `wyvern verify --json` did not write; the message names it."""


class Sweeps:
    """The cases of all documents, by operator and device."""

    def __init__(self):
        self.cases = {}    # operator -> device -> {case: its JSON}
        self.devices = []  # in the order met

    def add(self, document):
        device = document["model"]
        if device not in self.devices:
            self.devices.append(device)
        cases = self.cases.setdefault(document["operator"], {}).setdefault(device, {})
        for case in document["cases"]:
            cases[case["case"], case["seed"]] = case

    def of(self, operator, device):
        return list(self.cases[operator].get(device, {}).values())


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if "passes" in document:
            for row in document["passes"]:
                code_cell(row)
            document["target"]  # pylint: disable=pointless-statement
            return document
        for case in document["cases"]:
            case["options"].append(number_of(case["problem"]))
        document["operator"], document["model"]  # pylint: disable=pointless-statement
        return document
    except OSError as error:
        raise BadDocument(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadDocument(f"{path} is no document of `wyvern verify OP --json` or `wyvern precompile "
                          f"--json`: {type(error).__name__} {error}") from error


def number_of(problem):
    """dtype, and for fp32 the floor: 16-bit inputs have none."""
    dtype = problem["dtype"]
    return f"{dtype} {problem['precision']}" if dtype == "fp32" else dtype


def using(cases, options, pass_):
    return [case for case in cases
            if case["problem"]["pass"] == pass_ and options & set(case["options"])]


def rows(sweeps, operator):
    """Lists of options, one a row: a kind whole, or its options one by one where some device and pass
    met only a part of them."""
    groups = [(sweeps.of(operator, device), pass_)
              for device in sweeps.devices for pass_ in ("forward", "backward", "recurrent")]
    met = [{option for case in cases if case["problem"]["pass"] == pass_
            for option in case["options"]} for cases, pass_ in groups]
    known = {option for kind in KINDS for option in kind}
    others = sorted(set().union(*met) - known)
    for kind in (*KINDS, *((option,) for option in others)):
        there = [option for option in kind if any(option in one for one in met)]
        if all(len(one & set(there)) in (0, len(there)) for one in met):
            if there:
                yield there
        else:
            yield from ([option] for option in there)


def label(options):
    """"chunk_size 16, 32": the name of an option with values is there once."""
    text = options[0]
    for before, option in zip(options, options[1:]):
        name, _, value = option.partition(" ")
        text += ", " + (value if "_" in name and value and before.startswith(name + " ") else option)
    return text


def cell(cases, quantities):
    """Largest error and largest part of a bound; what failed is bold."""
    if not cases:
        return "–"
    if any("message" in case for case in cases):
        return "**cannot run**"
    checks = [check for case in cases for check in case["checks"]
              if check["quantity"] in quantities]
    if not checks:
        return "–"
    if any(check["error"] is None for check in checks):
        return "**not finite**"
    error = max(check["error"] for check in checks)
    part = max(check["error"] / check["bound"] for check in checks)
    text = f"{error:.1e}".replace("e-0", "e-") + (" <1%" if part < 0.01 else f" {part:.0%}")
    if not all(case["repeatable"] for case in cases):
        return f"**{text}, not repeatable**"
    return text if all(check["ok"] for check in checks) else f"**{text}**"


def table(sweeps, operator):
    devices = [device for device in sweeps.devices if sweeps.of(operator, device)]
    head = ["option"] + [f"{device}: {name}" if i == 0 else name
                         for device in devices for i, (name, _) in enumerate(COLUMNS)]
    lines = [f"**{operator}**", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for options in rows(sweeps, operator):
        cells = [cell(using(sweeps.of(operator, device), set(options), pass_), quantities)
                 for device in devices for _, (pass_, quantities) in COLUMNS]
        lines.append("| " + " | ".join([label(options), *cells]) + " |")
    return lines


def code_cell(row):
    """Kernels, registers, spilled bytes; what spills is bold."""
    text = f"{row['kernels']}: {row['registers']}, {row['spill_bytes']} B"
    return f"**{text}**" if row["spill_bytes"] else text


def code_table(documents):
    cells = {}  # (operator, pass) -> {target: cell}
    for document in documents:
        for row in document["passes"]:
            cells.setdefault((row["operator"], row["pass"]), {})[document["target"]] = code_cell(row)
    targets = [document["target"] for document in documents]
    lines = ["| " + " | ".join(["operator, pass", *targets]) + " |", "| --- " * (1 + len(targets)) + "|"]
    lines += ["| " + " | ".join([", ".join(of), *(row.get(target, "–") for target in targets)]) + " |"
              for of, row in cells.items()]
    for document in documents:
        for row in document["passes"]:
            if row["spilling"]:
                lines.append(f"\n{document['target']}, {row['operator']} {row['pass']}: "
                             + ", ".join(row["spilling"]))
    return lines


def summary(sweeps, device):
    cases = [case for operator in sweeps.cases for case in sweeps.of(operator, device)]
    bad = sum(not case["ok"] for case in cases)
    return f"{device}: {len(cases)} cases, " + (f"{bad} failed." if bad else "none failed.")


def main(paths):
    if not paths or paths[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if paths else sys.stderr)
        return 0 if paths else 2
    sweeps = Sweeps()
    try:
        documents = [read(path) for path in paths]
        of_code = ["passes" in document for document in documents]
        if any(of_code) and not all(of_code):
            raise BadDocument(f"{paths[of_code.index(not of_code[0])]} is of another command than "
                              f"{paths[0]}; all must be of `verify` or all of `precompile`")
    except BadDocument as error:
        print(f"support_table: {error}", file=sys.stderr)
        return 2
    if of_code[0]:
        print("\n".join(code_table(documents)))
        return 0
    for document in documents:
        sweeps.add(document)
    for operator in sweeps.cases:
        print("\n".join(table(sweeps, operator)), end="\n\n")
    for device in sweeps.devices:
        print(summary(sweeps, device))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
