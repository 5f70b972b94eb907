#pragma once

#include <string>
#include <vector>

#include "common/whereabouts.h"

namespace ours {

/// A rank, and where its process can be asked.
struct AskedRank {
  int number;
  AskedProcess process;
};

/// How many ranks are asked: those that a reader can look into.
constexpr size_t kMostAsked = 8;

/// Lines to append to the error that `ranks` have caused: "\nRank 3 is at train.py:41 in load". Ranks that answer the
/// same share a line, and only the first kMostAsked are asked. Takes at most kAskingTime.
std::string roll_call(const std::vector<AskedRank>& ranks);

/// Those lines, for ranks that answered these texts.
std::string describe_roll(const std::vector<int>& ranks, const std::vector<std::string>& texts);

}  // namespace ours
