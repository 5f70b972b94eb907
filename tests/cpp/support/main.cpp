#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

#include "support/testing.h"

// Usage: tests [part of a name]...   Runs the tests whose names contain one of the parts; all without arguments.
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
    std::string error;
    try {
      test.body();
    } catch (const std::exception& e) {
      error = e.what();
    } catch (...) {
      error = "an exception that is no std::exception";
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (error.empty()) {
      ++passed;
      std::printf("ok     %s (%.2f s)\n", test.name.c_str(), took.count());
    } else {
      ++failed;
      std::printf("FAILED %s (%.2f s)\n  %s\n", test.name.c_str(), took.count(), error.c_str());
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0 || passed == 0 ? 1 : 0;
}
