#pragma once

#include <cstddef>
#include <string>

#include "collectives/group.h"
#include "common/error.h"

// What groups refuse before anything is sent.

namespace ours {

inline void check_one_a_rank(const Call& call, size_t buffers, size_t ranks) {
  if (buffers == ranks) return;
  throw InvalidArgument(std::string(name_of(call.op)) + " got " + std::to_string(buffers) + " buffers in a group of " +
                        std::to_string(ranks) + " ranks; give one a rank");
}

inline void check_own(const Call& call, int rank, size_t gives, size_t expects) {
  if (gives == expects) return;
  throw InvalidArgument(std::string(name_of(call.op)) + " on rank " + std::to_string(rank) + " gives itself " +
                        std::to_string(gives) + " bytes but expects " + std::to_string(expects) +
                        "; make the sizes equal");
}

}  // namespace ours
