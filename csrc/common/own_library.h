#pragma once

#include <string>

// Parts of the package with optional requirements are libraries of their own beside the main one, and are loaded when
// they are needed.

namespace ours {

/// The folder that this library was loaded from.
std::string own_folder();

/// The file in own_folder() of the library that setup.py calls `name`: the name, a platform tag, and .so. Empty if
/// there is none.
std::string find_own_library(const std::string& name);

/// Loads the library at `path`, and never unloads it. Throws Error with the loader's reason.
void* load_library(const std::string& path);

/// The address of `symbol` in such a library, or null.
void* symbol_of(void* library, const char* symbol);

}  // namespace ours
