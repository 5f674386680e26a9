#include "tests/compiler/ptx_flow.hpp"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

namespace wyvern::testing {
namespace {

using Registers = std::set<std::string, std::less<>>;

struct Instruction {
  Registers reads, writes;
  bool packs = false;  ///< makes a register from two
  std::string target;  ///< label that it may branch to
  bool falls_through = true;
  Registers live;  ///< before it
};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0)
    text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0)
    text.remove_suffix(1);
  return text;
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// "%f12": letters and a number; special registers such as %tid.x have no number.
Registers registers_in(std::string_view text) {
  Registers found;
  for (std::size_t at = text.find('%'); at != std::string_view::npos; at = text.find('%', at + 1)) {
    std::size_t end = at + 1;
    while (end < text.size() && is_name(text[end])) ++end;
    if (std::isdigit(static_cast<unsigned char>(text[end - 1])) != 0)
      found.emplace(text.substr(at, end - at));
  }
  return found;
}

bool has_no_result(std::string_view opcode) {
  for (const std::string_view prefix : {"st.", "cp.async", "bar", "red.", "membar", "fence"})
    if (opcode.starts_with(prefix)) return true;
  return false;
}

/// The first operand: up to the comma, or to the brace that closes a vector.
std::size_t first_operand_end(std::string_view operands) {
  const std::string_view text = trimmed(operands);
  const auto start = static_cast<std::size_t>(text.data() - operands.data());
  if (!text.empty() && text.front() == '{') return operands.find('}', start) + 1;
  return std::min(operands.find(',', start), operands.size());
}

Instruction parse(std::string_view text) {
  Instruction result;
  const bool conditional = text.front() == '@';
  if (conditional) {
    const std::size_t end = text.find_first_of(" \t");
    result.reads = registers_in(text.substr(0, end));
    text = trimmed(text.substr(end));
  }
  const std::size_t end = std::min(text.find_first_of(" \t"), text.size());
  const std::string_view opcode = text.substr(0, end), operands = text.substr(end);
  if (opcode.starts_with("bra")) {
    result.target = trimmed(operands);
    result.falls_through = conditional;
  } else if (opcode == "ret" || opcode == "exit") {
    result.falls_through = conditional;
  } else if (has_no_result(opcode)) {
    result.reads.merge(registers_in(operands));
  } else {
    const std::size_t split = first_operand_end(operands);
    result.writes = registers_in(operands.substr(0, split));
    result.reads.merge(registers_in(operands.substr(split)));
    result.packs = opcode.starts_with("mov.b") && operands.find('{', split) < operands.size();
  }
  return result;
}

struct Kernel {
  std::vector<Instruction> code;
  std::map<std::string, std::size_t, std::less<>> labels;

  explicit Kernel(std::string_view ptx) {
    ptx.remove_prefix(std::min(ptx.find("\n{"), ptx.size()));
    while (!ptx.empty()) {
      const std::size_t end = std::min(ptx.find('\n'), ptx.size() - 1);
      std::string_view line = ptx.substr(0, end);
      ptx.remove_prefix(end + 1);
      line = trimmed(line.substr(0, line.find("//")));
      // "{ .reg .b16 tmp; mov.b32 {tmp, %rs1}, %r1; }" takes half a register on one line.
      if (line.starts_with("{ ") && line.ends_with('}')) line = line.substr(1, line.size() - 2);
      if (line.ends_with(':'))
        labels.emplace(line.substr(0, line.size() - 1), code.size());
      else
        add_statements(line);
    }
    forget_unused_halves();
  }

  void add_statements(std::string_view line) {
    for (std::size_t end = line.find(';'); end != std::string_view::npos; end = line.find(';')) {
      const std::string_view statement = trimmed(line.substr(0, end));
      line.remove_prefix(end + 1);
      if (!statement.empty() && !statement.starts_with('.')) code.push_back(parse(statement));
    }
  }

  /// To move one half of a pair, the compiler packs it with a register that nothing ever sets and
  /// takes it out again.
  void forget_unused_halves() {
    Registers written;
    for (const Instruction& i : code) written.insert(i.writes.begin(), i.writes.end());
    for (Instruction& i : code)
      if (i.packs)
        std::erase_if(i.reads, [&](const auto& name) { return !written.contains(name); });
  }

  /// What is live after instruction i.
  Registers live_after(std::size_t i) const {
    Registers live;
    if (code[i].falls_through && i + 1 < code.size()) live = code[i + 1].live;
    if (const auto at = labels.find(code[i].target); at != labels.end() && at->second < code.size())
      live.insert(code[at->second].live.begin(), code[at->second].live.end());
    return live;
  }

  /// One pass over the code, from its end; whether anything changed.
  bool propagate() {
    bool changed = false;
    for (std::size_t i = code.size(); i-- > 0;) {
      Registers live = live_after(i);
      for (const std::string& name : code[i].writes) live.erase(name);
      live.insert(code[i].reads.begin(), code[i].reads.end());
      if (live == code[i].live) continue;
      code[i].live = std::move(live);
      changed = true;
    }
    return changed;
  }
};

}  // namespace

std::vector<std::string> registers_read_unset(std::string_view ptx) {
  Kernel kernel(ptx);
  while (kernel.propagate()) {
  }
  if (kernel.code.empty()) return {};
  const Registers& live = kernel.code.front().live;
  return {live.begin(), live.end()};
}

}  // namespace wyvern::testing
