#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "collectives/select.h"
#include "common/fd.h"
#include "fuzz/parser.h"

// The rules by which algorithms are chosen: the text of OURS_SELECT, and the file that it may name.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  return {{"one", "all_reduce nodes>=8 bytes<=64K doubling"},
          {"some", "all nodes=2 local<=4 ring; reduce sent>=1M sent<=1G direct;node_reduce read<=16 whole"},
          {"comments", "# mine\nall_gather nodes>=3 ring # between nodes\n\nreduce_scatter direct"},
          {"table", Selection::parse("all_reduce whole").table()}};
}

void check(const Selection& selection) {
  const std::string rules = selection.rules();
  require(rules.size() <= Selection::kMaxRules, "rules fit into the store");
  require(Selection::parse(rules).rules() == rules, "what was understood can be written");
  for (const Selectable operation : {Selectable::AllReduce, Selectable::NodeReduce}) {
    for (const int nodes : {2, 500}) {
      const Selection::BySize by_size = selection.by_size(operation, nodes, 8);
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{65536}, size_t{1} << 40, SIZE_MAX}) {
        require(by_size.choose(bytes) == selection.choose({operation, nodes, 8, bytes}), "both tables choose alike");
      }
    }
  }
}

void parse(const Bytes& input) { check(Selection::parse(input)); }

void parse_file(const Bytes& input) {
  const Fd file(::memfd_create("rules", MFD_CLOEXEC));
  if (::write(file.get(), input.data(), input.size()) != static_cast<ssize_t>(input.size())) return;
  check(selection_from("/proc/self/fd/" + std::to_string(file.get())));
}

const Registration registration("rules", seeds, parse);
const Registration registration_of_file("rules_file", seeds, parse_file);

}  // namespace
}  // namespace ours::fuzz
