#include <algorithm>

#include "common/options.h"
#include "fuzz/parser.h"

// The environment: one variable, as NAME=value.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  std::vector<Seed> all = {{"affinity", "OURS_COMM_THREAD_AFFINITY=0-3,8"},
                           {"bytes", "OURS_CHUNK_BYTES=512K"},
                           {"ports", "OURS_PORT_RANGE=20000-20999"},
                           {"stray", "OURS_TCP_STREAM=2"}};
  for (const OptionRow& row : option_rows()) {
    all.push_back({std::string("default_of_") + row.name, std::string(row.name) + '=' + row.show(Options())});
  }
  return all;
}

void parse(const Bytes& input) {
  const size_t equals = std::min(input.find('='), input.size());
  const std::string name = input.substr(0, equals);
  const std::string value = input.substr(std::min(equals + 1, input.size()));
  // No name is long, and comparing it with all others takes its time.
  require(name.size() > 40 || stray_variables({name}).size() <= 1, "a variable has one complaint");
  for (const OptionRow& row : option_rows()) {
    Options options;
    if (name != row.name || !row.parse(value, options)) continue;
    const std::string shown = row.show(options);
    require(shown.size() <= value.size() + (size_t{1} << 20), "a value does not become much longer");
    Options again;
    require(row.parse(shown, again) && row.show(again) == shown, "a value that is shown is accepted");
  }
}

const Registration registration("options", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
