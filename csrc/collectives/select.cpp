#include "collectives/select.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>
#include <system_error>

#include "common/error.h"
#include "common/listed.h"

namespace ours {

namespace {

/// The sizes at which to switch follow from the model of benchmarks/scale.py, with 10 Gbit/s and 8 ranks a node.
constexpr const char* kBuiltIn = R"(
node_reduce read<=256K whole             # in a node, short: every rank reduces all, with one synchronisation
node_reduce direct                       # and long: every rank reduces a slice
all local<=1 nodes<=16 sent<=64K whole   # ranks with a node each, few: short messages go to everybody
all local<=1 nodes<=16 direct            # and of long ones everybody reduces a slice
all local<=1 bytes<=64K doubling         # many: short messages are exchanged in pairs
all local<=1 ring                        # and long ones, and what is only moved, go around
all nodes>=32 bytes<=16K doubling        # nodes of several ranks, many: less to send than to everybody
all nodes>=96 bytes<=64K doubling        # and still less with more of them
all nodes>=300 bytes<=128K doubling      # and more
all nodes>=450 bytes<=2M doubling        # so many that a process may not have enough descriptors
all nodes>=450 ring                      # for connections to all of them
all sent<=64K whole                      # few: short messages go to everybody
all direct                               # and of long ones everybody reduces a slice
)";

// In the order of the enums.
constexpr std::array kAlgorithms = {"whole", "doubling", "direct", "ring"};
constexpr std::array kOperations = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "node_reduce"};
constexpr std::array kKeyNames = {"nodes", "local", "bytes", "sent", "read"};
static_assert(kAlgorithms.size() == static_cast<size_t>(Algorithm::Last) + 1, "a name for each Algorithm");
static_assert(kOperations.size() == static_cast<size_t>(Selectable::Last) + 1, "a name for each Selectable");

template <class Names>
std::string listed_names(const Names& names) {
  return listed(names, [](const char* name) { return std::string(name); });
}

/// What a rule looks like, for messages.
std::string form() {
  return "; a rule is an operation (all, " + listed_names(kOperations) + "), conditions (" + listed_names(kKeyNames) +
         " with <=, >= or = and a number, suffix K, M or G allowed), and an algorithm (" + listed_names(kAlgorithms) +
         ")";
}

/// The text of a table in a file.
std::string content_of(const std::string& path) {
  constexpr size_t kMaxFile = 64 * 1024;  // more than any table needs, with comments
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFile + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  const int error = errno;
  if (!file.is_open() || file.bad()) {
    throw InvalidArgument("cannot read the table of algorithms: " + std::generic_category().message(error) +
                          ". Correct the variable, or write the file with 'python -m ourddp tune'");
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFile) throw InvalidArgument("it is longer than any table: 64 KiB");
  return text;
}

template <class Names>
std::optional<size_t> find(const Names& names, const std::string& word) {
  const auto found = std::find(names.begin(), names.end(), word);
  if (found == names.end()) return std::nullopt;
  return static_cast<size_t>(found - names.begin());
}

std::optional<uint64_t> parse_number(std::string text) {
  int shift = 0;
  const size_t suffix = text.empty() ? std::string::npos : std::string("KMG").find(text.back());
  if (suffix != std::string::npos) {
    shift = 10 * (static_cast<int>(suffix) + 1);
    text.pop_back();
  }
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  // Nothing that is computed from a value below 2^62 overflows.
  if (result.ec != std::errc() || result.ptr != end || value > (uint64_t{1} << 62 >> shift)) return std::nullopt;
  return value << shift;
}

std::string show_number(uint64_t value) {
  const char* suffix = "";
  for (const char* next : {"K", "M", "G"}) {
    if (value == 0 || value % 1024 != 0) break;
    value /= 1024;
    suffix = next;
  }
  return std::to_string(value) + suffix;
}

bool can(Selectable operation, Algorithm algorithm) {
  const bool reduces_between_nodes = operation == Selectable::AllReduce || operation == Selectable::Reduce;
  switch (algorithm) {
    case Algorithm::Whole:
      return reduces_between_nodes || operation == Selectable::NodeReduce;
    case Algorithm::Doubling:
      return reduces_between_nodes;
    case Algorithm::Direct:
      return true;
    case Algorithm::Ring:
      return operation != Selectable::NodeReduce;
  }
  return false;
}

/// `bytes`, `sent` and `read`, as multiples of the bytes of a call.
std::array<uint64_t, 3> multiples(int nodes, int local) {
  return {1, static_cast<uint64_t>(std::max(nodes - 1, 1)), static_cast<uint64_t>(std::max(local, 1))};
}

}  // namespace

const char* name_of(Algorithm algorithm) { return kAlgorithms.at(static_cast<size_t>(algorithm)); }
const char* name_of(Selectable operation) { return kOperations.at(static_cast<size_t>(operation)); }

Selectable selectable_of(const std::string& name) {
  const auto found = find(kOperations, name);
  if (!found) {
    throw InvalidArgument("there is no choice of algorithms for '" + name + "'; there is for " +
                          listed_names(kOperations));
  }
  return static_cast<Selectable>(*found);
}

bool Selection::Rule::has_sizes() const {
  return std::any_of(ranges.begin() + kBytes, ranges.end(),
                     [](const Range& range) { return range.least != 0 || range.most != UINT64_MAX; });
}

bool Selection::Rule::applies(const SelectionCase& call) const {
  // `all` go between nodes.
  const bool meant = operation ? *operation == call.operation
                               : call.operation != Selectable::NodeReduce && can(call.operation, algorithm);
  if (!meant) return false;
  // The ranks' inputs to all_gather may differ in size, and then ranks would choose differently.
  if (call.operation == Selectable::AllGather && has_sizes()) return false;
  std::array<uint64_t, kKeys> values = {static_cast<uint64_t>(call.nodes), static_cast<uint64_t>(call.local)};
  const std::array<uint64_t, 3> factors = multiples(call.nodes, call.local);
  std::transform(factors.begin(), factors.end(), values.begin() + kBytes, [&](uint64_t factor) {
    uint64_t product = 0;
    return __builtin_mul_overflow(uint64_t{call.bytes}, factor, &product) ? UINT64_MAX : product;
  });
  return std::equal(values.begin(), values.end(), ranges.begin(),
                    [](uint64_t value, const Range& range) { return value >= range.least && value <= range.most; });
}

std::string Selection::Rule::text() const {
  std::string text = operation ? name_of(*operation) : "all";
  for (size_t key = 0; key < kKeys; ++key) {
    const Range& range = ranges.at(key);
    const std::string name = std::string(" ") + kKeyNames.at(key);
    if (range.least == range.most) {
      text += name + "=" + show_number(range.least);
      continue;
    }
    if (range.least != 0) text += name + ">=" + show_number(range.least);
    if (range.most != UINT64_MAX) text += name + "<=" + show_number(range.most);
  }
  return text + " " + name_of(algorithm);
}

void Selection::parse_condition(const std::string& word, Rule& rule) {
  const size_t sign = word.find_first_of("<>=");
  const auto key = find(kKeyNames, word.substr(0, sign));
  const bool two = sign != std::string::npos && word[sign] != '=';
  const size_t begin = sign == std::string::npos ? word.size() : sign + (two ? 2 : 1);
  const bool sound = key && begin < word.size() && (!two || word[sign + 1] == '=');
  const auto value = sound ? parse_number(word.substr(begin)) : std::nullopt;
  if (!value) throw InvalidArgument("'" + word + "' is neither a condition nor, at the end, an algorithm");
  Range& range = rule.ranges.at(*key);
  if (word[sign] != '<') range.least = std::max(range.least, *value);
  if (word[sign] != '>') range.most = std::min(range.most, *value);
  if (range.least > range.most) throw InvalidArgument("with '" + word + "' no call can meet all conditions");
}

Selection::Rule Selection::parse_rule(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  Rule rule;
  if (words.front() != "all") {
    const auto operation = find(kOperations, words.front());
    if (!operation) throw InvalidArgument("'" + words.front() + "' is no operation");
    rule.operation = static_cast<Selectable>(*operation);
  }
  const auto algorithm = words.size() < 2 ? std::nullopt : find(kAlgorithms, words.back());
  for (size_t i = 1; i + (algorithm ? 1 : 0) < words.size(); ++i) parse_condition(words[i], rule);
  if (!algorithm) throw InvalidArgument("the algorithm is missing");
  rule.algorithm = static_cast<Algorithm>(*algorithm);
  if (rule.operation && !can(*rule.operation, rule.algorithm)) {
    std::string others;
    for (size_t other = 0; other < kAlgorithms.size(); ++other) {
      const bool has = can(*rule.operation, static_cast<Algorithm>(other));
      if (has) others += (others.empty() ? "" : " and ") + std::string(kAlgorithms.at(other));
    }
    throw InvalidArgument(words.front() + " has the algorithms " + others + " only");
  }
  if (rule.operation == Selectable::AllGather && rule.has_sizes()) {
    throw InvalidArgument("all_gather can only be chosen by nodes and local: its ranks may differ in bytes");
  }
  return rule;
}

std::vector<Selection::Rule> Selection::parse_rules(const std::string& text) {
  std::vector<Rule> rules;
  std::istringstream lines(text);
  size_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const size_t hash = std::min(line.find('#'), line.size());
    std::istringstream parts(line.substr(0, hash));
    for (std::string part; std::getline(parts, part, ';');) {
      if (part.find_first_not_of(" \t\r\v\f") == std::string::npos) continue;
      try {
        rules.push_back(parse_rule(part));
      } catch (const InvalidArgument& e) {
        throw InvalidArgument("line " + std::to_string(number) + " of the table of algorithms, '" + part +
                              "': " + e.what() + form());
      }
      if (hash < line.size()) rules.back().comment = line.substr(hash);
    }
  }
  return rules;
}

Selection Selection::parse(const std::string& rules) {
  static const std::vector<Rule> kRules = parse_rules(kBuiltIn);
  Selection selection;
  selection.rules_ = parse_rules(rules);
  selection.own_ = selection.rules_.size();
  selection.rules_.insert(selection.rules_.end(), kRules.begin(), kRules.end());
  const size_t length = selection.rules().size();
  if (length > kMaxRules) {
    throw InvalidArgument("the table of algorithms has " + std::to_string(length) +
                          " bytes without its comments; accepted: " + std::to_string(kMaxRules));
  }
  return selection;
}

Algorithm Selection::choose(const SelectionCase& call) const {
  for (const Rule& rule : rules_) {
    if (rule.applies(call)) return rule.algorithm;
  }
  return Algorithm::Direct;
}

Selection::BySize Selection::by_size(Selectable operation, int nodes, int local) const {
  const std::array<uint64_t, 3> factors = multiples(nodes, local);
  // The sizes after which a condition may begin or cease to hold.
  std::vector<size_t> ends = {SIZE_MAX};
  for (const Rule& rule : rules_) {
    for (size_t key = kBytes; key < kKeys; ++key) {
      const Range& range = rule.ranges.at(key);
      if (range.least != 0) ends.push_back((range.least - 1) / factors.at(key - kBytes));
      if (range.most != UINT64_MAX) ends.push_back(range.most / factors.at(key - kBytes));
    }
  }
  std::sort(ends.begin(), ends.end());
  BySize result;
  for (const size_t end : ends) {
    const Algorithm algorithm = choose({operation, nodes, local, end});
    const bool longer = !result.steps_.empty() && result.steps_.back().algorithm == algorithm;
    if (longer) result.steps_.pop_back();
    result.steps_.push_back({end, algorithm});
  }
  return result;
}

std::string Selection::rules() const {
  std::string text;
  for (size_t i = 0; i < own_; ++i) text += (i == 0 ? "" : ";") + rules_[i].text();
  return text;
}

std::string Selection::table() const {
  constexpr size_t kColumn = 48;
  std::string text;
  for (size_t i = 0; i < rules_.size(); ++i) {
    const Rule& rule = rules_[i];
    std::string line = rule.text();
    line.resize(std::max(line.size() + 1, kColumn), ' ');
    text += line + (rule.comment.empty() && i < own_ ? "# yours" : rule.comment) + "\n";
  }
  return text;
}

Selection selection_from(const std::string& option) {
  const bool is_file = option.find('/') != std::string::npos;
  try {
    return Selection::parse(is_file ? content_of(option) : option);
  } catch (const InvalidArgument& e) {
    throw InvalidArgument("OURS_SELECT: " + (is_file ? "'" + option + "': " : "") + e.what() +
                          (is_file ? "" : ". The name of a file must have a slash"));
  }
}

}  // namespace ours
