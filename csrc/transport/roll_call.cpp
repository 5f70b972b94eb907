#include "transport/roll_call.h"

#include <algorithm>
#include <utility>

#include "common/listed.h"

namespace ours {

std::string roll_call(const std::vector<AskedRank>& ranks) {
  std::vector<AskedProcess> processes;
  std::vector<int> numbers;
  for (size_t i = 0; i < std::min(ranks.size(), kMostAsked); ++i) {
    processes.push_back(ranks[i].process);
    numbers.push_back(ranks[i].number);
  }
  return processes.empty() ? "" : describe_roll(numbers, ask_whereabouts(processes));
}

std::string describe_roll(const std::vector<int>& ranks, const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::vector<int>>> answers;
  for (size_t i = 0; i < texts.size(); ++i) {
    auto same = std::find_if(answers.begin(), answers.end(), [&](const auto& one) { return one.first == texts[i]; });
    if (same == answers.end()) same = answers.insert(answers.end(), {texts[i], {}});
    same->second.push_back(ranks[i]);
  }
  std::string lines;
  for (const auto& [text, numbers] : answers) {
    lines += (numbers.size() == 1 ? "\nRank " : "\nEach of ranks ") + listed(numbers) + ' ' + text;
  }
  return lines;
}

}  // namespace ours
