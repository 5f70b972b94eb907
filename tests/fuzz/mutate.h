#pragma once

#include <filesystem>
#include <random>

#include "fuzz/parser.h"

namespace ours::fuzz {

using Random = std::mt19937_64;

/// One of the seeds with a few bytes changed, removed, repeated, inserted, or taken from another seed.
Bytes mutate(const std::vector<Bytes>& seeds, Random& random);

/// A file, or the files of a folder, sorted by name.
std::vector<Seed> read_seeds(const std::filesystem::path& place);

}  // namespace ours::fuzz
