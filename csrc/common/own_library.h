#pragma once

#include <string>

// Parts of the package that have optional dependencies are separate shared libraries next to the main one, which are
// loaded on demand.

namespace ours {

/// The folder that this library was loaded from.
std::string own_folder();

/// The path of the library that setup.py calls `name` (own_folder()/name.<platform tag>.so); empty if there is none.
std::string find_own_library(const std::string& name);

/// Loads the library at `path`, and never unloads it. Throws Error with the loader's reason.
void* load_library(const std::string& path);

/// The address of `symbol` in a library from load_library(), or null.
void* symbol_of(void* library, const char* symbol);

}  // namespace ours
