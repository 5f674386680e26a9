// The one exception type of the public API.
#pragma once

#include <wyvern/export.hpp>

#include <stdexcept>
#include <string>

namespace wyvern WYVERN_API {

/// The kind of an Error; the `wyvern` command's exit codes follow it.
enum class ErrorKind {
  kBadInput,     ///< an argument is wrong: the message names it, its value and the legal range
  kUnavailable,  ///< a device, driver or compiler is missing or failed: the message says how to fix
                 ///< it
  kCompile,      ///< a template did not compile: template, config and the compiler's own message
  kIo,           ///< a file could not be read or written
};

/// Thrown by every public call that fails. The message is one complete sentence for the user.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace wyvern WYVERN_API
