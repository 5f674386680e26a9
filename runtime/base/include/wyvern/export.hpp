// Marks the names that the shared library exports. All code is built with hidden symbols; a public
// header opens its namespace as `namespace wyvern WYVERN_API {`, which makes the declarations in it
// visible.
#pragma once

#define WYVERN_API __attribute__((visibility("default")))
