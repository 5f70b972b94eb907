#include "transport/roll_call.h"

#include <algorithm>
#include <utility>

#include "common/listed.h"

namespace ours {

std::string roll_call(const std::vector<AskedRank>& ranks) {
  if (ranks.empty()) return "";
  const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(std::min(ranks.size(), kMostAsked));
  std::vector<AskedProcess> processes;
  std::transform(ranks.begin(), end, std::back_inserter(processes), [](const AskedRank& rank) { return rank.process; });
  const std::vector<std::string> texts = ask_whereabouts(processes);
  std::vector<std::pair<std::string, std::vector<int>>> answers;
  for (size_t i = 0; i < texts.size(); ++i) {
    auto same = std::find_if(answers.begin(), answers.end(), [&](const auto& one) { return one.first == texts[i]; });
    if (same == answers.end()) same = answers.insert(answers.end(), {texts[i], {}});
    same->second.push_back(ranks[i].number);
  }
  std::string lines;
  for (const auto& [text, numbers] : answers) {
    lines += (numbers.size() == 1 ? "\nRank " : "\nEach of ranks ") + listed(numbers) + ' ' + text;
  }
  return lines;
}

}  // namespace ours
