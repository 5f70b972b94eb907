#pragma once

#include <string>

// Parts of the package that need what not everybody has are libraries of their own beside the one with this code, and
// are loaded when they are wanted.

namespace ours {

/// The folder that this library was loaded from.
std::string own_folder();

/// The file in own_folder() that is called as setup.py calls the library `name`: its name, what it was built for, .so.
/// Empty if there is none.
std::string find_own_library(const std::string& name);

/// Loads the library at `path`, for good. Throws Error with the loader's reason.
void* load_library(const std::string& path);

/// What a library loaded so exports under `symbol`, or null.
void* symbol_of(void* library, const char* symbol);

}  // namespace ours
