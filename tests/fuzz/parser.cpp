#include "fuzz/parser.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace ours::fuzz {

namespace {

std::vector<Parser>& registered() {
  static std::vector<Parser> all;
  return all;
}

}  // namespace

Registration::Registration(const char* name, std::vector<Seed> (*seeds)(), void (*parse)(const Bytes&)) {
  registered().push_back({name, seeds, parse});
  std::sort(registered().begin(), registered().end(), [](const Parser& a, const Parser& b) { return a.name < b.name; });
}

const std::vector<Parser>& parsers() { return registered(); }

void Parser::run(const Bytes& input) const {
  try {
    parse(input);
  } catch (const Error&) {
    // It was refused.
  }
}

Bytes Source::take(size_t bytes) {
  Bytes taken = input_.substr(at_, bytes);
  at_ += taken.size();
  return taken;
}

void Source::take_to(void* to, size_t bytes) {
  const size_t taken = std::min(bytes, input_.size() - at_);
  std::memcpy(to, input_.data() + at_, taken);
  at_ += taken;
}

}  // namespace ours::fuzz
