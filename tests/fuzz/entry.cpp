#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "fuzz/parser.h"

// The two functions that libFuzzer, or blind_fuzzer.cpp, calls. OURS_TEST_PARSER names the parser. The program also has
//   fuzz --list            the names of the parsers
//   fuzz --seeds FOLDER    writes the inputs to start from into FOLDER/<parser>/

namespace {

using ours::fuzz::Parser;
using ours::fuzz::parsers;

const Parser* chosen = nullptr;

void write_seeds(const std::filesystem::path& folder) {
  for (const Parser& parser : parsers()) {
    std::filesystem::create_directories(folder / parser.name);
    for (const auto& seed : parser.seeds()) {
      std::ofstream(folder / parser.name / seed.name, std::ios::binary) << seed.bytes;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const char* const command = *argc > 1 ? (*argv)[1] : "";
  if (std::strcmp(command, "--list") == 0) {
    for (const Parser& parser : parsers()) std::puts(parser.name.c_str());
    std::exit(0);
  }
  if (std::strcmp(command, "--seeds") == 0 && *argc > 2) {
    write_seeds((*argv)[2]);
    std::exit(0);
  }
  const char* const name = std::getenv("OURS_TEST_PARSER");
  for (const Parser& parser : parsers()) {
    if (name != nullptr && parser.name == name) chosen = &parser;
  }
  if (chosen != nullptr) return 0;
  std::fputs("set OURS_TEST_PARSER to one of those that --list prints\n", stderr);
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  chosen->run({reinterpret_cast<const char*>(data), bytes});
  return 0;
}
