#pragma once

#include <cstddef>
#include <string>

namespace ours {

/// How many entries of a list an error names.
constexpr size_t kMostListed = 16;

/// The entries by name, "rank 1, rank 2": the first kMostListed, and then " and more".
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

/// The same of numbers.
template <class Numbers>
std::string listed(const Numbers& numbers) {
  return listed(numbers, [](auto number) { return std::to_string(number); });
}

}  // namespace ours
