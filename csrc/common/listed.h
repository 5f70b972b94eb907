#pragma once

#include <cstddef>
#include <string>

namespace ours {

constexpr size_t kMostListed = 16;

/// The entries by name, as in "rank 1, rank 2": at most kMostListed of them, and " and more" if there are more.
template <class List, class Name>
std::string listed(const List& list, Name&& name) {
  std::string text;
  size_t count = 0;
  for (const auto& entry : list) {
    if (count == kMostListed) return text + " and more";
    text += (count++ == 0 ? "" : ", ") + name(entry);
  }
  return text;
}

/// A list of numbers, in the same way.
template <class Numbers>
std::string listed(const Numbers& numbers) {
  return listed(numbers, [](auto number) { return std::to_string(number); });
}

}  // namespace ours
