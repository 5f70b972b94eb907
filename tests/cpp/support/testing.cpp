#include "support/testing.h"

#include <chrono>
#include <cstdio>
#include <exception>
#include <vector>

namespace ours::testing {

namespace {

struct Test {
  std::string name;
  void (*body)();
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

/// Returns the message of the failure, or an empty one.
std::string run(const Test& test) {
  try {
    test.body();
    return "";
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

Registration::Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }

std::string show(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

void fail_equal(const char* text, const std::string& a, const std::string& b, const char* file, int line) {
  fail(file, line, std::string(text) + ": " + a + " != " + b);
}

void check_contains(const std::string& text, const std::string& part, const char* file, int line) {
  if (text.find(part) == std::string::npos) fail(file, line, "\"" + part + "\" is not in \"" + text + "\"");
}

}  // namespace ours::testing

// Usage: tests [part of a name]...   Runs the tests whose names contain one of the parts; all without arguments.
// Forked children start threads of their own.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0:allocator_may_return_null=1"; }
// The C++ library counts an exception's owners with atomics that ThreadSanitizer does not see, so it takes the deletion
// by the last owner for a race with the others.
extern "C" const char* __tsan_default_suppressions() { return "race:std::__exception_ptr::exception_ptr::_M_release"; }
// Memory that cannot be had is refused, as without the sanitizer, and does not end the program.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

int main(int argc, char** argv) {
  const auto chosen = [&](const std::string& name) {
    for (int i = 1; i < argc; ++i) {
      if (name.find(argv[i]) != std::string::npos) return true;
    }
    return argc == 1;
  };
  int passed = 0, failed = 0;
  for (const auto& test : ours::testing::tests()) {
    if (!chosen(test.name)) continue;
    const auto start = std::chrono::steady_clock::now();
    const std::string error = run(test);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    ++(error.empty() ? passed : failed);
    std::printf("%s %s (%.2f s)\n", error.empty() ? "ok    " : "FAILED", test.name.c_str(), took.count());
    if (!error.empty()) std::printf("  %s\n", error.c_str());
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0 || passed == 0 ? 1 : 0;
}
