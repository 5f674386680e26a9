// Marks what the shared library shows. All code is built with hidden symbols; a public header opens
// its namespace as `namespace wyvern WYVERN_API {`, and what it declares there is visible.
#pragma once

#define WYVERN_API __attribute__((visibility("default")))
