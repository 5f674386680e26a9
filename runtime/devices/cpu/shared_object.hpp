// Whether bytes can be given to the dynamic loader as a shared object.
#pragma once

#include <string>
#include <string_view>

namespace wyvern {

/// Why `code` is not a complete shared object of this machine's word size, as the end of a
/// sentence; empty when it is one. The loader maps what the headers promise, and touching a page
/// that the file does not have is SIGBUS, so every table, segment and section has to lie within the
/// bytes. Their contents are not checked.
[[nodiscard]] std::string shared_object_problem(std::string_view code);

}  // namespace wyvern
