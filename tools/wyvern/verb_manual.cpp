#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/wyvern/command.hpp"
#include "tools/wyvern/output.hpp"

// The manual page and the completions of shells are made from the verbs and their options, so that
// they agree with the command.
namespace wyvern::cli {
namespace {

using Apps = std::vector<const CLI::App*>;

Apps children(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

/// "cache gc": the words behind `wyvern`.
std::string words_of(const CLI::App& app) {
  const CLI::App* parent = app.get_parent();
  if (parent == nullptr) return "";
  const std::string before = words_of(*parent);
  return before.empty() ? app.get_name() : before + ' ' + app.get_name();
}

/// Every verb and action that does something.
void collect(const CLI::App& app, Apps& leaves) {
  for (const CLI::App* child : children(app)) {
    if (children(*child).empty())
      leaves.push_back(child);
    else
      collect(*child, leaves);
  }
}

std::vector<std::string> option_words(const CLI::App& app) {
  std::vector<std::string> words;
  for (const CLI::Option* option : app.get_options())
    if (!option->get_positional()) words.push_back(option->get_name(false, true));
  std::vector<std::string> single;
  for (const std::string& names : words)
    for (std::size_t at = 0; at <= names.size();) {
      const std::size_t end = std::min(names.find(',', at), names.size());
      single.push_back(names.substr(at, end - at));
      at = end + 1;
    }
  return single;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

/// The words that may stand where `app` has an operator.
std::string positional_words(const CLI::App& app) {
  const auto all = app.get_options();
  const bool takes_operator = std::any_of(
      all.begin(), all.end(), [](const CLI::Option* o) { return o->get_name() == "OP"; });
  std::vector<std::string> words;
  if (takes_operator)
    for (const std::string_view name : operators()) words.emplace_back(name);
  return joined(words);
}

std::string preset_words() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return joined(names);
}

// ---- The manual page

/// Text of troff: backslashes, hyphens and a dot or quote that begins a line are not taken for
/// more.
std::string troff(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    if (c == '\\')
      safe += "\\e";
    else if (c == '-')
      safe += "\\-";
    else
      safe += c;
  }
  if (!safe.empty() && (safe.front() == '.' || safe.front() == '\'')) safe.insert(0, "\\&");
  return safe;
}

std::string manual(const CLI::App& root) {
  std::string text =
      fmt::format(".TH WYVERN 1 \"\" \"wyvern {}\" \"User Commands\"\n", WYVERN_VERSION);
  text += ".SH NAME\nwyvern \\- kernels for the chunked delta rule, compiled and tuned here\n";
  text += ".SH SYNOPSIS\n.B wyvern\n.I VERB\n[\\fIOPTIONS\\fR]\n";
  text += ".SH DESCRIPTION\n" + troff(root.get_description()) +
          ".\nWith \\fB\\-\\-json\\fR a verb prints one JSON document; tools/schemas.json of the "
          "sources describes each.\n.SH VERBS\n";
  Apps leaves;
  collect(root, leaves);
  for (const CLI::App* verb : leaves) {
    text +=
        fmt::format(".SS wyvern {}\n{}\n", troff(words_of(*verb)), troff(verb->get_description()));
    for (const CLI::Option* option : verb->get_options()) {
      const std::string name =
          option->get_positional() ? option->get_name(true) : option->get_name(false, true);
      if (name == "--help" || name == "-h,--help" || name == "--json") continue;
      text += fmt::format(".TP\n\\fB{}\\fR\n{}\n", troff(name), troff(option->get_description()));
    }
  }
  text +=
      ".SH EXIT STATUS\n"
      "0: done. 1: a check failed. 2: bad usage, input or file. 3: a device, a compiler or memory "
      "is missing or failed.\n"
      ".SH ENVIRONMENT\n"
      ".TP\n\\fBWYVERN_CACHE_DIR\\fR\nwhere the cache lies (else $XDG_CACHE_HOME/wyvern, "
      "~/.cache/wyvern)\n"
      ".TP\n\\fBWYVERN_PACKS\\fR\npacks and directories of them, separated by colons, that are "
      "asked behind the cache\n"
      ".TP\n\\fBWYVERN_CACHE_OWNER\\fR\na user whose cache is read nevertheless\n";
  return text;
}

// ---- Completions

std::string bash(const CLI::App& root) {
  std::string verbs, cases, actions;
  for (const CLI::App* verb : children(root)) {
    verbs += (verbs.empty() ? "" : " ") + verb->get_name();
    std::string names;
    for (const CLI::App* action : children(*verb))
      names += (names.empty() ? "" : " ") + action->get_name();
    if (!names.empty())
      actions += fmt::format("    {}) words=\"{}\" ;;\n", verb->get_name(), names);
  }
  Apps leaves;
  collect(root, leaves);
  for (const CLI::App* verb : leaves)
    cases += fmt::format("    \"{}\"*) words=\"{} {}\" ;;\n", words_of(*verb),
                         positional_words(*verb), joined(option_words(*verb)));
  return fmt::format(R"sh(# bash completion of wyvern; made by `wyvern completion bash`.
_wyvern() {{
  local now=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
  COMPREPLY=()
  case $before in
    --preset) COMPREPLY=($(compgen -W "{0}" -- "$now")); return ;;
    --device) COMPREPLY=($(compgen -W "cpu cuda:0" -- "$now")); return ;;
    --pass) COMPREPLY=($(compgen -W "forward backward recurrent" -- "$now")); return ;;
    --dtype|--g-dtype) COMPREPLY=($(compgen -W "bf16 fp16 fp32" -- "$now")); return ;;
    --state-dtype)
      COMPREPLY=($(compgen -W "bf16 fp16 fp32 float8_e4m3 float8_e5m2" -- "$now")); return ;;
    -o|--output|--input) COMPREPLY=($(compgen -f -- "$now")); return ;;
  esac
  case "${{COMP_WORDS[*]:1:2}}" in
{1}  esac
  if [ "$COMP_CWORD" = 1 ]; then words="{2}"; fi
  if [ "$COMP_CWORD" = 2 ]; then case ${{COMP_WORDS[1]}} in
{3}  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$now"))
  if [ ${{#COMPREPLY[@]}} = 0 ]; then COMPREPLY=($(compgen -f -- "$now")); fi
}}
complete -F _wyvern wyvern
)sh",
                     preset_words(), cases, verbs, actions);
}

/// bash's, in zsh's own emulation of it.
std::string zsh(const CLI::App& root) {
  return "#compdef wyvern\nautoload -U +X bashcompinit && bashcompinit\n" + bash(root);
}

std::string fish_quoted(std::string_view text) {
  std::string safe = "'";
  for (const char c : text) safe += c == '\'' || c == '\\' ? std::string{'\\', c} : std::string{c};
  return safe + "'";
}

std::string fish(const CLI::App& root) {
  std::string text = "# fish completion of wyvern; made by `wyvern completion fish`.\n";
  for (const CLI::App* verb : children(root)) {
    text += fmt::format("complete -c wyvern -n __fish_use_subcommand -f -a {} -d {}\n",
                        verb->get_name(), fish_quoted(verb->get_description()));
    for (const CLI::App* action : children(*verb))
      text +=
          fmt::format("complete -c wyvern -n '__fish_seen_subcommand_from {}' -f -a {} -d {}\n",
                      verb->get_name(), action->get_name(), fish_quoted(action->get_description()));
  }
  Apps leaves;
  collect(root, leaves);
  for (const CLI::App* verb : leaves) {
    const std::string where = fmt::format("-n '__fish_seen_subcommand_from {}'", verb->get_name());
    if (const std::string words = positional_words(*verb); !words.empty())
      text += fmt::format("complete -c wyvern {} -f -a '{}'\n", where, words);
    for (const CLI::Option* option : verb->get_options()) {
      if (option->get_positional()) continue;
      const auto& names = option->get_lnames();
      for (const std::string& name : names)
        text += fmt::format("complete -c wyvern {} -l {} -d {}{}\n", where, name,
                            fish_quoted(option->get_description()),
                            name == "preset" ? fmt::format(" -x -a '{}'", preset_words()) : "");
    }
  }
  return text;
}

/// The whole command, from one of its verbs.
const CLI::App& root_of(const CLI::App& app) {
  return app.get_parent() == nullptr ? app : root_of(*app.get_parent());
}

int print(const std::string& text, bool json) {
  if (json)
    print_document({{"text", text}});
  else
    put(text);
  return kDone;
}

int complete(const CLI::App& root, const std::string& shell, bool json) {
  if (shell == "bash") return print(bash(root), json);
  if (shell == "zsh") return print(zsh(root), json);
  if (shell == "fish") return print(fish(root), json);
  throw Error(ErrorKind::kBadInput,
              fmt::format("SHELL is {}; it must be one of bash, zsh, fish",
                          shell.empty() ? "missing" : fmt::format("'{}'", shell)));
}

}  // namespace

void add_manual(Command& command) {
  const auto own = std::make_shared<const CLI::App*>(nullptr);
  *own = &command.verb("manual", "print the manual page (troff)",
                       [own](bool json) { return print(manual(root_of(**own)), json); });
  const auto shell = std::make_shared<std::string>();
  CLI::App& verb =
      command.verb("completion", "print a shell's completion script",
                   [own, shell](bool json) { return complete(root_of(**own), *shell, json); });
  verb.add_option("SHELL", *shell, "bash, zsh or fish");
}

}  // namespace wyvern::cli
