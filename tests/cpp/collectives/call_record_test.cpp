#include "collectives/call_record.h"

#include <functional>
#include <limits>
#include <set>
#include <vector>

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(records_that_differ_in_one_field_have_different_digests) {
  CallRecord record{};
  record.factor = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::function<void(CallRecord&)>> changes = {
      [](CallRecord&) {},
      [](CallRecord& r) { r.seq = 1; },
      [](CallRecord& r) { r.count = 1; },
      [](CallRecord& r) { r.factor = 1; },
      [](CallRecord& r) { r.root = 1; },
      [](CallRecord& r) { r.op = 1; },
      [](CallRecord& r) { r.dtype = 1; },
      [](CallRecord& r) { r.kind = 1; },
  };
  std::set<uint64_t> digests;
  for (const auto& change : changes) {
    CallRecord changed = record;
    change(changed);
    digests.insert(digest_of(changed));
  }
  CHECK_EQ(digests.size(), changes.size());
}

// Numbers of calls, elements and roots are small and near one another.
TEST(records_of_small_numbers_have_different_digests) {
  std::set<uint64_t> digests;
  size_t records = 0;
  for (uint64_t seq = 0; seq < 40; ++seq) {
    for (uint64_t count = 0; count < 40; ++count) {
      for (int root = -1; root < 40; ++root, ++records) {
        CallRecord record{};
        record.seq = seq;
        record.count = count;
        record.root = root;
        digests.insert(digest_of(record));
      }
    }
  }
  CHECK_EQ(digests.size(), records);
}

}  // namespace
}  // namespace ours::testing
