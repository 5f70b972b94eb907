#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "fuzz/mutate.h"
#include "support/testing.h"

// A short run of all parsers from the inputs in seeds/, which include those that once were findings. tests/fuzz/fuzz.py
// runs longer ones.

namespace ours::testing {
namespace {

using fuzz::Bytes;
using fuzz::Parser;
using fuzz::Seed;

/// Parses an input that is a finding if anything but an Error is thrown.
void run(const Parser& parser, const Bytes& input, const std::string& name) {
  try {
    parser.run(input);
  } catch (const std::exception& e) {
    std::string digits;
    for (const char c : input) {
      char two[3];
      std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned char>(c));
      digits += two;
    }
    throw Failure("parser " + parser.name + ", " + name + ": " + e.what() + "; the input in hexadecimal: " + digits);
  }
}

std::vector<Seed> kept_seeds(const Parser& parser) { return fuzz::read_seeds("tests/fuzz/seeds/" + parser.name); }

TEST(parsers_bear_what_lies_around_their_seeds) {
  // So that all parsers together take a few seconds.
  constexpr std::chrono::milliseconds kTime{150};
  constexpr int kMost = 3000;
  CHECK(fuzz::parsers().size() >= 10);
  for (const Parser& parser : fuzz::parsers()) {
    std::vector<Bytes> seeds;
    for (const Seed& seed : kept_seeds(parser)) {
      run(parser, seed.bytes, seed.name);
      seeds.push_back(seed.bytes);
    }
    CHECK(!seeds.empty());
    fuzz::Random random(7);
    const auto end = std::chrono::steady_clock::now() + kTime;
    for (int i = 0; i < kMost && std::chrono::steady_clock::now() < end; ++i) {
      run(parser, fuzz::mutate(seeds, random), "mutation " + std::to_string(i));
    }
  }
}

TEST(the_kept_seeds_are_those_of_the_present_messages) {
  for (const Parser& parser : fuzz::parsers()) {
    const std::vector<Seed> kept = kept_seeds(parser);
    for (const Seed& seed : parser.seeds()) {
      const bool same = std::any_of(kept.begin(), kept.end(),
                                    [&](const Seed& one) { return one.name == seed.name && one.bytes == seed.bytes; });
      if (!same) throw Failure(parser.name + '/' + seed.name + " is out of date: run tests/fuzz/fuzz.py --write-seeds");
    }
  }
}

TEST(seeds_are_read_from_a_folder_or_a_file) {
  const Parser& parser = fuzz::parsers().front();
  const std::vector<Seed> all = kept_seeds(parser);
  const std::vector<Seed> one = fuzz::read_seeds("tests/fuzz/seeds/" + parser.name + '/' + all.back().name);
  CHECK_EQ(one.size(), size_t{1});
  CHECK(one[0].bytes == all.back().bytes);
  CHECK(fuzz::read_seeds("tests/fuzz/seeds/nothing").empty());
}

}  // namespace
}  // namespace ours::testing
