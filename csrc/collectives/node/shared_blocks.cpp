#include "collectives/node/shared_blocks.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/error.h"

namespace ours {

namespace {

struct Offer {
  SymmetricBlock::Place place;
  std::array<int64_t, 4> facts;
};

/// Why a rank could not map the block of another; empty if it could.
struct Outcome {
  char trouble[400];
};

template <class T>
std::vector<T> all_gather(Group& group, const Call& call, const T& own) {
  std::vector<T> all(static_cast<size_t>(group.size()));
  std::vector<Span> outputs;
  outputs.reserve(all.size());
  for (T& one : all) outputs.push_back({&one, sizeof(T)});
  group.all_gather(call, {&own, sizeof(T)}, outputs);
  return all;
}

Outcome outcome_of(const std::string& trouble) {
  Outcome outcome{};
  std::memcpy(outcome.trouble, trouble.data(), std::min(trouble.size(), sizeof(outcome.trouble) - 1));
  return outcome;
}

}  // namespace

std::vector<SharedBlock> share_blocks(Group& group, const Call& call, const SharedBlock& own) {
  const std::vector<Offer> offers = all_gather(group, call, Offer{own.block->place(), own.facts});
  std::vector<SharedBlock> shared;
  std::string trouble;
  for (int r = 0; r < group.size(); ++r) {
    const Offer& offer = offers[static_cast<size_t>(r)];
    try {
      shared.push_back({r == group.rank() ? own.block : SymmetricBlock::open(offer.place), offer.facts});
    } catch (const Error& e) {
      trouble = "rank " + std::to_string(group.rank()) + " cannot map the symmetric memory of rank " +
                std::to_string(r) + ": " + e.what();
      break;
    }
  }
  for (const Outcome& outcome : all_gather(group, call, outcome_of(trouble))) {
    if (outcome.trouble[0] != '\0') throw Error({outcome.trouble, ::strnlen(outcome.trouble, sizeof(Outcome))});
  }
  return shared;
}

std::vector<std::byte*> data_of(const std::vector<SharedBlock>& blocks) {
  std::vector<std::byte*> data;
  data.reserve(blocks.size());
  for (const SharedBlock& one : blocks) data.push_back(one.block->data());
  return data;
}

}  // namespace ours
